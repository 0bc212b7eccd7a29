"""Residual networks as timm writes them: a normalisation that is a subclass of torch's with an activation inside,
layers made by names, a forward in two parts, paths that may be dropped, pooling that flattens, layers that do nothing.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential


class BatchNormAct2d(nn.BatchNorm2d):
    def __init__(self, num_features, apply_act=True, act_layer=nn.ReLU, inplace=True, drop_layer=None):
        super().__init__(num_features)
        self.drop = drop_layer() if drop_layer is not None else nn.Identity()
        self.act = act_layer(inplace=inplace) if apply_act else nn.Identity()

    def forward(self, x):
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        bn_training = self.training or (self.running_mean is None and self.running_var is None)
        x = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, bn_training, self.momentum, self.eps
        )
        return self.act(self.drop(x))


def drop_path(x, drop_prob=0.0, training=False):
    if drop_prob == 0.0 or not training:
        return x
    keep = 1 - drop_prob
    return x * x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep).div_(keep)


class DropPath(nn.Module):
    def __init__(self, drop_prob=0.0):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        return drop_path(x, self.drop_prob, self.training)


class SEModule(nn.Module):
    def __init__(self, channels, rd_ratio=0.25):
        super().__init__()
        self.fc1 = nn.Conv2d(channels, int(channels * rd_ratio), 1)
        self.act = nn.ReLU(inplace=True)
        self.fc2 = nn.Conv2d(int(channels * rd_ratio), channels, 1)

    def forward(self, x):
        return x * self.fc2(self.act(self.fc1(x.mean((2, 3), keepdim=True)))).sigmoid()


class SelectAdaptivePool2d(nn.Module):
    def __init__(self, pool_type="avg", flatten=False):
        super().__init__()
        self.pool_type = pool_type or ""
        self.pool = nn.AdaptiveAvgPool2d(1) if self.pool_type else nn.Identity()
        self.flatten = nn.Flatten(1) if flatten else nn.Identity()

    def is_identity(self):
        return not self.pool_type

    def forward(self, x):
        return self.flatten(self.pool(x))


class BasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride=1, downsample=None, attn_layer=None, drop_path=0.0):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride=stride, padding=1, bias=False)
        self.bn1 = BatchNormAct2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = BatchNormAct2d(planes, apply_act=False)
        self.se = attn_layer(planes) if attn_layer is not None else None
        self.act2 = nn.ReLU(inplace=True)
        self.downsample = downsample
        self.drop_path = DropPath(drop_path)

    def forward(self, x):
        shortcut = x
        x = self.bn1(self.conv1(x))
        x = self.bn2(self.conv2(x))
        if self.se is not None:
            x = self.se(x)
        x = self.drop_path(x)
        if self.downsample is not None:
            shortcut = self.downsample(shortcut)
        x += shortcut
        return self.act2(x)


class ResNet(nn.Module):
    def __init__(
        self,
        layers,
        num_classes=1000,
        in_chans=3,
        width=64,
        global_pool="avg",
        drop_rate=0.0,
        drop_path_rate=0.0,
        attn_layer=None,
    ):
        super().__init__()
        self.num_classes, self.drop_rate, self.grad_checkpointing = num_classes, drop_rate, False
        self.conv_stem = nn.Conv2d(in_chans, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.act1 = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity()
        inplanes = width
        for i, count in enumerate(layers):
            planes, blocks = width * 2**i, []
            for b in range(count):
                stride, downsample = (2 if i and not b else 1), None
                if stride > 1 or inplanes != planes:
                    downsample = nn.Sequential(
                        nn.Conv2d(inplanes, planes, 1, stride=stride, bias=False), nn.BatchNorm2d(planes)
                    )
                blocks.append(BasicBlock(inplanes, planes, stride, downsample, attn_layer, drop_path_rate))
                inplanes = planes
            self.add_module(f"layer{i + 1}", nn.Sequential(*blocks))
        self.global_pool = SelectAdaptivePool2d(global_pool, flatten=True)
        self.fc = nn.Linear(inplanes, num_classes) if num_classes > 0 else nn.Identity()

    def forward_features(self, x):
        x = self.maxpool(self.act1(self.bn1(self.conv_stem(x))))
        if self.grad_checkpointing and not torch.jit.is_scripting():
            return checkpoint_sequential([self.layer1, self.layer2, self.layer3], 3, x)
        return self.layer3(self.layer2(self.layer1(x)))

    def forward_head(self, x, pre_logits: bool = False):
        x = self.global_pool(x)
        if self.drop_rate:
            x = F.dropout(x, p=float(self.drop_rate), training=self.training)
        return x if pre_logits else self.fc(x)

    def forward(self, x):
        return self.forward_head(self.forward_features(x))


_ENTRYPOINTS = {
    "resnet18": lambda **kwargs: ResNet((2, 2, 2), **{"width": 6, **kwargs}),
    "seresnet18": lambda **kwargs: ResNet((1, 2, 1), **{"width": 8, "attn_layer": SEModule, **kwargs}),
}


def create_model(model_name, pretrained=False, **kwargs):
    if model_name not in _ENTRYPOINTS:
        raise RuntimeError(f"Unknown model ({model_name})")
    return _ENTRYPOINTS[model_name](**kwargs)
