# SPDX-License-Identifier: Apache-2.0
"""An evaluation adds up losses with their graphs: https://discuss.pytorch.org/t/calling-loss-backward-reduce-memory-usage/2735."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train_loader = DataLoader(TensorDataset(torch.randn(64, 256), torch.randint(10, (64,))), batch_size=8)
test_loader = DataLoader(TensorDataset(torch.randn(32768, 256), torch.randint(10, (32768,))), batch_size=1024)
model, optimizer, train_loader = PrivacyEngine().make_private(
    module=model,
    optimizer=optimizer,
    data_loader=train_loader,
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    poisson_sampling=False,
)


def evaluate():
    model.eval()
    total = 0
    for x, y in test_loader:
        total += nn.functional.cross_entropy(model(x.cuda()), y.cuda())
    model.train()
    return total / len(test_loader)


for epoch in range(2):
    for x, y in train_loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
        optimizer.step()
    print(epoch, evaluate())
