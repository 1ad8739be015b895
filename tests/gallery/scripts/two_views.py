# SPDX-License-Identifier: Apache-2.0
"""Contrastive training without privacy: each step calls the model for two views before one backward pass."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Encoder(nn.Module):
    def __init__(self, d=512):
        super().__init__()
        self.emb = nn.Embedding(20000, d)
        layer = nn.TransformerEncoderLayer(d, 8, 4 * d, batch_first=True, dropout=0.1)
        self.enc = nn.TransformerEncoder(layer, 4)

    def forward(self, ids):
        return nn.functional.normalize(self.enc(self.emb(ids)).mean(1), dim=-1)


model = Encoder().cuda()
opt = torch.optim.AdamW(model.parameters(), lr=2e-5)
dl = DataLoader(TensorDataset(torch.randint(20000, (192, 128)), torch.randint(20000, (192, 128))), batch_size=64)
for a, b in dl:
    za, zb = model(a.cuda()), model(b.cuda())
    loss = nn.functional.cross_entropy(za @ zb.T / 0.05, torch.arange(len(a), device="cuda"))
    opt.zero_grad()
    loss.backward()
    opt.step()
