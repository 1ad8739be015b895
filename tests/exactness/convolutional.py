# SPDX-License-Identifier: Apache-2.0
"""Small models of torchvision, without BatchNorm."""

import torchvision
from torch import nn

LABELS, SIDE = 5, 16


def group_norm(channels: int) -> nn.Module:
    """The normalization instead of BatchNorm."""
    return nn.GroupNorm(2 if channels % 2 == 0 else 1, channels)


def densenet() -> nn.Module:
    """Builds a small densenet."""
    return without_batch_norm(torchvision.models.DenseNet(4, (2, 2), 8, drop_rate=0.1, num_classes=LABELS))


def without_batch_norm(model: nn.Module) -> nn.Module:
    """Replaces BatchNorm by GroupNorm."""
    for name, child in model.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(model, name, group_norm(child.num_features))
        else:
            without_batch_norm(child)
    return model


def efficientnet() -> nn.Module:
    """Builds a small efficientnet."""
    models = torchvision.models.efficientnet
    setting = [models.MBConvConfig(1, 3, 1, 8, 8, 1), models.MBConvConfig(2, 3, 2, 8, 12, 1)]
    return models.EfficientNet(setting, 0.1, stochastic_depth_prob=0.2, num_classes=LABELS, norm_layer=group_norm)


def mobilenet() -> nn.Module:
    """Builds a small mobilenet."""
    models = torchvision.models.mobilenetv3
    setting = [models.InvertedResidualConfig(8, 3, 16, 8, True, "HS", 2, 1, 1.0)]
    return models.MobileNetV3(setting, 16, num_classes=LABELS, norm_layer=group_norm, dropout=0.1)


def regnet() -> nn.Module:
    """Builds a small regnet."""
    models = torchvision.models.regnet
    setting = models.BlockParams([2, 1], [8, 8], [4, 4], [1.0, 1.0], [2, 2], 0.25)
    return models.RegNet(setting, LABELS, 8, norm_layer=group_norm)


def resnext() -> nn.Module:
    """Builds a small resnext."""
    models = torchvision.models.resnet
    return models.ResNet(models.Bottleneck, [1, 1, 1, 1], LABELS, groups=2, width_per_group=4, norm_layer=group_norm)


def shufflenet() -> nn.Module:
    """Builds a small shufflenet."""
    return without_batch_norm(torchvision.models.ShuffleNetV2([1, 1, 1], [4, 8, 8, 8, 8], LABELS))


def maxvit() -> nn.Module:
    """Builds a small maxvit."""
    return without_batch_norm(
        torchvision.models.MaxVit(
            (SIDE, SIDE), 8, 2, [8], [1], 4, stochastic_depth_prob=0.2, num_classes=LABELS, norm_layer=group_norm
        )
    )


def vgg() -> nn.Module:
    """Builds a small vgg."""
    convolutions = torchvision.models.vgg.make_layers([4, "M", 8, "M"], batch_norm=False)
    model = torchvision.models.VGG(convolutions, LABELS)
    model.avgpool = nn.AdaptiveAvgPool2d(1)
    model.classifier = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, LABELS))
    return model


def convnext() -> nn.Module:
    """Builds a small convnext."""
    models = torchvision.models.convnext
    setting = [models.CNBlockConfig(8, 12, 1), models.CNBlockConfig(12, None, 1)]
    return torchvision.models.ConvNeXt(setting, stochastic_depth_prob=0.1, num_classes=LABELS)


def swin_v2() -> nn.Module:
    """Builds a small swin_v2."""
    models = torchvision.models.swin_transformer
    return models.SwinTransformer(
        [2, 2],
        8,
        [1, 1],
        [2, 2],
        [2, 2],
        dropout=0.1,
        stochastic_depth_prob=0.1,
        num_classes=LABELS,
        block=models.SwinTransformerBlockV2,
        downsample_layer=models.PatchMergingV2,
    )
