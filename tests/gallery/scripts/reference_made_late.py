# SPDX-License-Identifier: Apache-2.0
"""Training by preferences: the first step makes the reference model, whose calls record graphs."""

import torch
from opacus import PrivacyEngine
from opacus.validators import ModuleValidator
from torch import nn
from torch.nn.functional import log_softmax, logsigmoid
from torch.utils.data import DataLoader, TensorDataset


class Language(nn.Module):
    def __init__(self, words=4000, width=256):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        layers = (nn.TransformerEncoderLayer(width, 4, 1024, dropout=0.0, batch_first=True) for _ in range(4))
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(width, words)

    def forward(self, ids):
        return self.head(self.layers(self.embed(ids)))


def score(model, ids):
    return log_softmax(model(ids)[:, :-1], -1).gather(2, ids[:, 1:, None]).squeeze(-1).sum(-1)


policy = ModuleValidator.fix(Language()).cuda()
weights = {name: each.clone() for name, each in policy.state_dict().items()}
reference = None
optimizer = torch.optim.AdamW(policy.parameters(), 1e-5)
pairs = TensorDataset(torch.randint(4000, (48, 48)), torch.randint(4000, (48, 48)))
policy, optimizer, loader = PrivacyEngine().make_private(
    module=policy,
    optimizer=optimizer,
    data_loader=DataLoader(pairs, batch_size=16),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    poisson_sampling=False,
)
for chosen, rejected in loader:
    if reference is None:
        reference = ModuleValidator.fix(Language()).cuda()
        reference.load_state_dict(weights)
    ids = torch.cat([chosen, rejected]).cuda()
    better, worse = (score(policy, ids) - score(reference, ids)).chunk(2)
    loss = -logsigmoid(0.1 * (better - worse)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
