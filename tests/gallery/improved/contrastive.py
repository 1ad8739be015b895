# SPDX-License-Identifier: Apache-2.0
"""Texts compared with pictures within a batch: the outputs mix samples, which flash_clip refuses."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(12000, 256)
        self.text = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 128))
        self.image = nn.Sequential(nn.Conv2d(3, 32, 7, 4), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 7 * 7, 128))

    def forward(self, ids, images):
        return self.text(self.words(ids).mean(1)) @ self.image(images).t()


pairs = Pairs().cuda()
optimizer = torch.optim.AdamW(pairs.parameters())
loader = DataLoader(TensorDataset(torch.randint(12000, (72, 16)), torch.randn(72, 3, 32, 32)), batch_size=24)
pairs, optimizer, loader = PrivacyEngine().make_private(
    module=pairs,
    optimizer=optimizer,
    data_loader=loader,
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    poisson_sampling=False,
)
for ids, images in loader:
    logits = pairs(ids.cuda(), images.cuda())
    targets = torch.arange(len(logits), device="cuda")
    nn.functional.cross_entropy(logits, targets).backward()
    optimizer.step()
    optimizer.zero_grad()
