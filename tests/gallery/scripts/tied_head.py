# SPDX-License-Identifier: Apache-2.0
"""A language model whose head is its embedding: https://github.com/meta-pytorch/opacus/issues/413."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class Model(nn.Module):
    def __init__(self, vocab=8000, d=256):
        super().__init__()
        self.wte = nn.Embedding(vocab, d)
        self.h = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d)) for _ in range(2)]
        )
        self.ln_f = nn.LayerNorm(d)
        self.lm_head = nn.Linear(d, vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx):
        x = self.wte(idx)
        for block in self.h:
            x = x + block(x)
        return self.lm_head(self.ln_f(x))


model = Model().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
tokens = torch.randint(8000, (64, 65))
model, optimizer, loader = PrivacyEngine().make_private(
    module=model,
    optimizer=optimizer,
    data_loader=DataLoader(TensorDataset(tokens), batch_size=16),
    noise_multiplier=0.8,
    max_grad_norm=1.0,
    poisson_sampling=False,
)
for (batch,) in loader:
    batch = batch.cuda()
    logits = model(batch[:, :-1])
    functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
