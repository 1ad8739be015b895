# SPDX-License-Identifier: Apache-2.0
"""Experts as a layer of the program's own, for which neither Opacus nor flash_clip has a rule."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Experts(nn.Module):
    def __init__(self, experts, width, hidden):
        super().__init__()
        self.gate = nn.Parameter(torch.randn(width, experts))
        self.up = nn.Parameter(torch.randn(experts, width, hidden))
        self.down = nn.Parameter(torch.randn(experts, hidden, width))

    def forward(self, x):
        hidden = torch.einsum("btd,ndf->btnf", x, self.up).relu()
        outputs = torch.einsum("btnf,nfd->btnd", hidden, self.down)
        return ((x @ self.gate).softmax(-1).unsqueeze(-1) * outputs).sum(2)


class Texts(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(6000, 128)
        self.first, self.second = Experts(8, 128, 256), Experts(8, 128, 256)
        self.classify = nn.Linear(128, 8)

    def forward(self, ids):
        x = self.words(ids)
        x = x + self.first(x)
        return self.classify((x + self.second(x))[:, -1])


texts = Texts().cuda()
optimizer = torch.optim.RMSprop(texts.parameters())
loader = DataLoader(TensorDataset(torch.randint(6000, (192, 16)), torch.randint(8, (192,))), batch_size=64)
texts, optimizer, loader = PrivacyEngine().make_private(
    module=texts,
    optimizer=optimizer,
    data_loader=loader,
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    poisson_sampling=False,
)
for ids, y in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(texts(ids.cuda()), y.cuda()).backward()
    optimizer.step()
