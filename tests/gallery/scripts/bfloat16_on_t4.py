# SPDX-License-Identifier: Apache-2.0
"""A language model in bfloat16 on a T4, which has no fused attention for it."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, d=256, heads=8):
        super().__init__()
        self.heads = heads
        self.ln, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x):
        batch, tokens, d = x.shape
        q, k, v = self.qkv(self.ln(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(batch, tokens, d))


class GPT(nn.Module):
    def __init__(self, d=256, layers=4):
        super().__init__()
        self.wte = nn.Embedding(1000, d)
        self.h = nn.Sequential(*(Block(d) for _ in range(layers)))
        self.head = nn.Linear(d, 10)

    def forward(self, ids):
        return self.head(self.h(self.wte(ids)).mean(1))


model = GPT().to("cuda", torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randint(1000, (16, 1024)), torch.randint(10, (16,)))
for ids, labels in DataLoader(data, batch_size=8):
    functional.cross_entropy(model(ids.cuda()).float(), labels.cuda()).backward()
    optimizer.step()
    optimizer.zero_grad()
