# SPDX-License-Identifier: Apache-2.0
"""An MLP-Mixer with Poisson sampling and BatchMemoryManager."""

import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class MixerBlock(nn.Module):
    def __init__(self, tokens, d):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.token = nn.Sequential(nn.Linear(tokens, tokens * 2), nn.GELU(), nn.Linear(tokens * 2, tokens))
        self.channel = nn.Sequential(nn.Linear(d, d * 4), nn.GELU(), nn.Linear(d * 4, d))

    def forward(self, x):
        x = x + self.token(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, d=192, depth=4, patch=4, size=32, classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, d, patch, patch)
        self.blocks = nn.Sequential(*[MixerBlock((size // patch) ** 2, d) for _ in range(depth)])
        self.head = nn.Linear(d, classes)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x).flatten(2).transpose(1, 2)).mean(1))


model = Mixer().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
train_loader = DataLoader(TensorDataset(torch.randn(1024, 3, 32, 32), torch.randint(10, (1024,))), batch_size=256)
model, optimizer, train_loader = PrivacyEngine().make_private(
    module=model, optimizer=optimizer, data_loader=train_loader, noise_multiplier=1.0, max_grad_norm=1.2
)
with BatchMemoryManager(
    data_loader=train_loader, max_physical_batch_size=96, optimizer=optimizer
) as memory_safe_data_loader:
    for images, target in memory_safe_data_loader:
        optimizer.zero_grad()
        loss = nn.CrossEntropyLoss()(model(images.cuda()), target.cuda())
        loss.backward()
        optimizer.step()
