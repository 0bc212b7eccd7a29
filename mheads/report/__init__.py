"""Pictures of runs: figures, the HTML page, videos, and what members respond to in images.

`plot.py` draws a figure to a file, `page/` writes `mheads report`, `saliency/` is guided backprop.
"""
