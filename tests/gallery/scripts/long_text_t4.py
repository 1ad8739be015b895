# SPDX-License-Identifier: Apache-2.0
"""A plain transformer on texts that are too long for a T4."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Encoder(nn.Module):
    def __init__(self, d_model=512, nhead=8, num_layers=6, max_len=1024):
        super().__init__()
        self.embed = nn.Embedding(5000, d_model)
        self.pos = nn.Embedding(max_len, d_model)
        layer = nn.TransformerEncoderLayer(d_model, nhead, 2048, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers)
        self.fc = nn.Linear(d_model, 2)

    def forward(self, ids):
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.embed(ids) + self.pos(positions)
        return self.fc(self.encoder(x).mean(1))


model = Encoder().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
train = TensorDataset(torch.randint(5000, (64, 1024)), torch.randint(2, (64,)))
loader = DataLoader(train, batch_size=32)
for ids, labels in loader:
    optimizer.zero_grad()
    out = model(ids.cuda())
    loss = nn.functional.cross_entropy(out, labels.cuda())
    loss.backward()
    optimizer.step()
