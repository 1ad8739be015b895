# SPDX-License-Identifier: Apache-2.0
"""A network of two recurrent layers names the next character."""

import torch
from opacus import PrivacyEngine
from opacus.layers import DPGRU
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class CharRNN(nn.Module):
    def __init__(self, v=100, h=512):
        super().__init__()
        self.emb, self.rnn, self.out = (
            nn.Embedding(v, 64),
            DPGRU(64, h, num_layers=2, batch_first=True),
            nn.Linear(h, v),
        )

    def forward(self, x):
        h, _ = self.rnn(self.emb(x))
        return self.out(h)


model = CharRNN().cuda()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
text = torch.randint(100, (64, 65))
loader = DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=16)
model, opt, loader = PrivacyEngine().make_private(
    module=model, optimizer=opt, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False
)
for x, y in loader:
    x, y = x.cuda(), y.cuda()
    logits = model(x)
    loss = nn.functional.cross_entropy(logits.reshape(-1, 100), y.reshape(-1))
    loss.backward()
    opt.step()
    opt.zero_grad()
