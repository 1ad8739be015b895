# SPDX-License-Identifier: Apache-2.0
"""Distillation: a teacher in eval mode, whose calls record graphs that no backward pass frees."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax
from torch.utils.data import DataLoader, TensorDataset


def network(*widths):
    layers, before = [], 3
    for width in widths:
        layers += [nn.Conv2d(before, width, 3, 2 if layers else 1, 1), nn.GroupNorm(4, width), nn.ReLU()]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 100)).cuda()


teacher = network(128, 256, 256).eval()
student = network(32, 64, 128)
optimizer = torch.optim.SGD(student.parameters(), 0.05)
loader = DataLoader(TensorDataset(torch.randn(384, 3, 32, 32), torch.randint(100, (384,))), batch_size=128)
student, optimizer, loader = PrivacyEngine().make_private(
    module=student,
    optimizer=optimizer,
    data_loader=loader,
    noise_multiplier=1.1,
    max_grad_norm=1.0,
    poisson_sampling=False,
)
for images, labels in loader:
    images, labels = images.cuda(), labels.cuda()
    wanted = teacher(images)
    logits = student(images)
    distilled = kl_div(log_softmax(logits / 4, -1), softmax(wanted.detach() / 4, -1), reduction="batchmean")
    loss = 8 * distilled + 0.5 * cross_entropy(logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
