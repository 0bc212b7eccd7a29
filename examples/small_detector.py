"""A detector small enough for a laptop: CaffeNet's plan with fewer, smaller layers, learned from nothing.

cd examples
mheads detect train --voc VOCdevkit/VOC2007 model_args="{base: 'small_detector:network', classes: 20}" freeze=[] \
    members=4 split=conv3 data.normalize=mean_std data.scale=auto data.regions.short_side=320 \
    data.regions.long_side=480 optim.name=adamw optim.lr=0.001 optim.weight_decay=0.0001 optim.iterations=4000 \
    optim.schedule.name=cosine -f detector
mheads detect eval detector --trust
"""

from torch import nn

from mheads.networks.caffe_style_layers import conv, linear, max_pool
from mheads.networks.caffe_style_layers import network as layers


def network(classes: int = 10) -> nn.Sequential:
    """Images [B, 3, 67, 67] -> logits [B, classes]; as a detector, images of any size and their regions."""
    return layers(
        conv1=conv(3, 32, 5, stride=2, pad=2, std=0.05),
        relu1=nn.ReLU(),
        pool1=max_pool(),
        conv2=conv(32, 64, 3, pad=1, std=0.05),
        relu2=nn.ReLU(),
        pool2=max_pool(),
        conv3=conv(64, 96, 3, pad=1, std=0.04),
        relu3=nn.ReLU(),
        pool3=max_pool(),
        flatten=nn.Flatten(),
        fc6=linear(96 * 4 * 4, 256, std=0.02),
        relu6=nn.ReLU(),
        fc7=linear(256, 256, std=0.05),
        relu7=nn.ReLU(),
        fc8=linear(256, classes, std=0.01),
    )
