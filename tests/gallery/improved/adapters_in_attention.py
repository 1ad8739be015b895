# SPDX-License-Identifier: Apache-2.0
"""A frozen classifier of texts with adapters in attention: behind the adapters each block has a wide MLP."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Adapter(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 8, bias=False), nn.Linear(8, width, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query, self.key, self.value = (Adapter(width) for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norm = nn.LayerNorm(width)
        self.mlp.requires_grad_(False)
        self.norm.requires_grad_(False)

    def forward(self, x):
        x = x + nn.functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))
        return x + self.mlp(self.norm(x))


class Texts(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.words = nn.Embedding(2000, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(6))
        self.classify = nn.Linear(width, 8)

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.classify(x.mean(1))


model = Texts().cuda()
optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
loader = DataLoader(TensorDataset(torch.randint(2000, (96, 256)), torch.randint(8, (96,))), batch_size=32)
model, optimizer, loader = PrivacyEngine().make_private(
    module=model,
    optimizer=optimizer,
    data_loader=loader,
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    poisson_sampling=False,
)
for ids, y in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(ids.cuda()), y.cuda()).backward()
    optimizer.step()
