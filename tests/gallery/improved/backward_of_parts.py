# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation with Opacus: several backward passes before one step, in a function."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATE = 4


def build():
    return nn.Sequential(
        nn.Embedding(3000, 192),
        nn.Flatten(),
        nn.Linear(192 * 24, 768),
        nn.Tanh(),
        nn.Linear(768, 768),
        nn.Tanh(),
        nn.Linear(768, 20),
    )


def train_epoch(model, optimizer, criterion, train_loader):
    model.train()
    for i, (text, label) in enumerate(train_loader):
        loss = criterion(model(text.cuda()), label.cuda()) / ACCUMULATE
        loss.backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()


model = build().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train_loader = DataLoader(TensorDataset(torch.randint(3000, (192, 24)), torch.randint(20, (192,))), batch_size=16)
model, optimizer, train_loader = PrivacyEngine().make_private(
    module=model,
    optimizer=optimizer,
    data_loader=train_loader,
    noise_multiplier=1.1,
    max_grad_norm=0.5,
    poisson_sampling=False,
)
train_epoch(model, optimizer, nn.CrossEntropyLoss(), train_loader)
