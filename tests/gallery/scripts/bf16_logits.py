# SPDX-License-Identifier: Apache-2.0
"""A bfloat16 language model, whose loss computes in float32: https://github.com/huggingface/trl/issues/1980."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.gate, self.up = nn.RMSNorm(d), *(nn.Linear(d, 4 * d, bias=False) for _ in "12")
        self.down = nn.Linear(4 * d, d, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, vocab=32000, d=512):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(Block(d) for _ in range(8))
        self.head = nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


model = Llama().to(torch.bfloat16).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
loader = DataLoader(TensorDataset(torch.randint(32000, (32, 257))), batch_size=8)
for (ids,) in loader:
    ids = ids.cuda()
    loss = nn.functional.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
