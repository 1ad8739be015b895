# SPDX-License-Identifier: Apache-2.0
"""A language model that computes its loss itself, trained in a loop whose variable keeps its output."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LanguageModel(nn.Module):
    def __init__(self, vocabulary=8192, width=256):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids, targets):
        x = self.words(ids)
        logits = self.head(x + self.down(nn.functional.gelu(self.up(x))))
        return logits, nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


model = LanguageModel().cuda()
optimizer = torch.optim.AdamW(model.parameters())
ids = torch.randint(8192, (48, 129))
loader = DataLoader(TensorDataset(ids[:, :-1], ids[:, 1:]), batch_size=16)
model, optimizer, loader = PrivacyEngine().make_private(
    module=model,
    optimizer=optimizer,
    data_loader=loader,
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    poisson_sampling=False,
)
for x, y in loader:
    logits, loss = model(x.cuda(), y.cuda())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
