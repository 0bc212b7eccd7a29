"""Images with annotated objects: the layout of PASCAL VOC, proposed regions, and what a step sees of them."""
