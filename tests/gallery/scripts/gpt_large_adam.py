# SPDX-License-Identifier: Apache-2.0
"""A language model whose parameters, states and activations are each too large: no change alone makes it fit."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.ln, self.fc, self.proj = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        return x + self.proj(nn.functional.gelu(self.fc(self.ln(x))))


class GPT(nn.Module):
    def __init__(self, vocab=2000, d=1024, layers=4):
        super().__init__()
        self.wte = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList([Block(d) for _ in range(layers)])
        self.head = nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        x = self.wte(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


model = GPT().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
tokens = torch.randint(2000, (16, 257))
model, optimizer, loader = PrivacyEngine().make_private(
    module=model,
    optimizer=optimizer,
    data_loader=DataLoader(TensorDataset(tokens), batch_size=8),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    poisson_sampling=False,
)
for (batch,) in loader:
    batch = batch.cuda()
    logits = model(batch[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
