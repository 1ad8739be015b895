# SPDX-License-Identifier: Apache-2.0
"""A one-stage detector: a backbone, a feature pyramid, and one head over all levels."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def conv(a, b, s=1):
    return nn.Sequential(nn.Conv2d(a, b, 3, stride=s, padding=1), nn.GroupNorm(8, b), nn.ReLU())


class Detector(nn.Module):
    def __init__(self, w=64, classes=20, anchors=3):
        super().__init__()
        self.stem = conv(3, w, 2)
        self.c1, self.c2, self.c3 = conv(w, w, 2), conv(w, 2 * w, 2), conv(2 * w, 4 * w, 2)
        self.l1, self.l2, self.l3 = nn.Conv2d(w, w, 1), nn.Conv2d(2 * w, w, 1), nn.Conv2d(4 * w, w, 1)
        self.tower = nn.Sequential(conv(w, w), conv(w, w))
        self.cls, self.box = nn.Conv2d(w, anchors * classes, 3, padding=1), nn.Conv2d(w, anchors * 4, 3, padding=1)

    def forward(self, x):
        a = self.c1(self.stem(x))
        b = self.c2(a)
        c = self.c3(b)
        p3 = self.l3(c)
        p2 = self.l2(b) + nn.functional.interpolate(p3, scale_factor=2)
        p1 = self.l1(a) + nn.functional.interpolate(p2, scale_factor=2)
        scores, boxes = [], []
        for p in (p1, p2, p3):
            t = self.tower(p)
            scores.append(self.cls(t).flatten(2))
            boxes.append(self.box(t).flatten(2))
        return torch.cat(scores, 2), torch.cat(boxes, 2)


model = Detector().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
n = 32 * 32 + 16 * 16 + 8 * 8
loader = DataLoader(
    TensorDataset(torch.randn(128, 3, 128, 128), torch.randint(2, (128, 60, n)).float(), torch.randn(128, 12, n)),
    batch_size=64,
)
model, optimizer, loader = PrivacyEngine().make_private(
    module=model,
    optimizer=optimizer,
    data_loader=loader,
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    poisson_sampling=False,
)
for x, y, z in loader:
    x, y, z = x.cuda(), y.cuda(), z.cuda()
    scores, boxes = model(x)
    loss = nn.functional.binary_cross_entropy_with_logits(scores, y) + nn.functional.smooth_l1_loss(boxes, z)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
