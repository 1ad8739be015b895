# SPDX-License-Identifier: Apache-2.0
"""A language model with checkpoints and without privacy; memory runs out in the loss, outside of any module."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


class RMSNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Block(nn.Module):
    def __init__(self, d=512, h=8):
        super().__init__()
        self.h = h
        self.n1, self.n2 = RMSNorm(d), RMSNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.wi, self.wg, self.wo = (
            nn.Linear(d, 4 * d, bias=False),
            nn.Linear(d, 4 * d, bias=False),
            nn.Linear(4 * d, d, bias=False),
        )

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.h, -1).permute(2, 0, 3, 1, 4)
        x = x + self.o(
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        )
        y = self.n2(x)
        return x + self.wo(nn.functional.gelu(self.wi(y)) * self.wg(y))


class T5ish(nn.Module):
    def __init__(self, vocab=8000, d=512, depth=6):
        super().__init__()
        self.shared = nn.Embedding(vocab, d)
        self.block = nn.ModuleList(Block(d) for _ in range(depth))
        self.final = RMSNorm(d)
        self.lm_head = nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        x = self.shared(ids)
        for block in self.block:
            x = checkpoint(block, x, use_reentrant=False)
        return self.lm_head(self.final(x))


lm = T5ish().cuda()
adamw = torch.optim.AdamW(lm.parameters(), lr=1e-4, fused=True)
corpus = DataLoader(TensorDataset(torch.randint(8000, (48, 512))), batch_size=16)
for (ids,) in corpus:
    ids = ids.cuda()
    logits = lm(ids)
    loss = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 8000), ids[:, 1:].reshape(-1))
    adamw.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
    adamw.step()
