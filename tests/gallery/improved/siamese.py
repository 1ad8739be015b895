# SPDX-License-Identifier: Apache-2.0
"""A siamese text matcher: its forward pass runs one recurrent encoder over both sentences of a pair."""

import torch
from opacus import PrivacyEngine
from opacus.layers import DPLSTM
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Matcher(nn.Module):
    def __init__(self, vocab=3000, d=128, h=192):
        super().__init__()
        self.words = nn.Embedding(vocab, d)
        self.lstm = DPLSTM(d, h, batch_first=True)
        self.project = nn.Linear(h, 128)

    def encode(self, ids):
        out, _ = self.lstm(self.words(ids))
        return nn.functional.normalize(self.project(out.mean(1)), dim=-1)

    def forward(self, left, right):
        return self.encode(left), self.encode(right)


model = Matcher().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
pairs = DataLoader(
    TensorDataset(torch.randint(3000, (384, 40)), torch.randint(3000, (384, 40)), torch.randint(2, (384,))),
    batch_size=128,
)
model, optimizer, pairs = PrivacyEngine().make_private(
    module=model,
    optimizer=optimizer,
    data_loader=pairs,
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    poisson_sampling=False,
)
for left, right, same in pairs:
    u, v = model(left.cuda(), right.cuda())
    distance = (u - v).pow(2).sum(-1)
    same = same.cuda()
    loss = (same * distance + (1 - same) * nn.functional.relu(1.0 - distance.clamp(min=1e-6).sqrt()).pow(2)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
