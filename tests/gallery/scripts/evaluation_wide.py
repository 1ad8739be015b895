# SPDX-License-Identifier: Apache-2.0
"""Evaluates batches far larger than those of training, with model.eval() alone."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(32, 32, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(4),
    nn.Flatten(),
    nn.Linear(2048, 10),
).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train_set = TensorDataset(torch.randn(128, 3, 32, 32), torch.randint(10, (128,)))
test_set = TensorDataset(torch.randn(1024, 3, 32, 32), torch.randint(10, (1024,)))
test_loader = DataLoader(test_set, batch_size=1024)
model, optimizer, train_loader = PrivacyEngine().make_private(
    module=model,
    optimizer=optimizer,
    data_loader=DataLoader(train_set, batch_size=64),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    poisson_sampling=False,
)


def evaluate():
    model.eval()
    loss = sum(nn.functional.cross_entropy(model(x.cuda()), y.cuda()).item() for x, y in test_loader)
    model.train()
    return loss


for _ in range(2):
    for x, y in train_loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
        optimizer.step()
    print(evaluate())
