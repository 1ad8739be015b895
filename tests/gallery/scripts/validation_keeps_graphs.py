# SPDX-License-Identifier: Apache-2.0
"""A validation that is not under no_grad, of a private model: https://github.com/meta-pytorch/opacus/issues/145."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def loader_of(count, batch):
    return DataLoader(TensorDataset(torch.randn(count, 1024), torch.randint(10, (count,))), batch_size=batch)


model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, train_loader = PrivacyEngine().make_private(
    module=model,
    optimizer=optimizer,
    data_loader=loader_of(64, 16),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    poisson_sampling=False,
)
test_loader = loader_of(8192, 2048)
criterion = nn.CrossEntropyLoss()
for _ in range(2):
    for x, y in train_loader:
        optimizer.zero_grad()
        criterion(model(x.cuda()), y.cuda()).backward()
        optimizer.step()
    correct = 0
    for x, y in test_loader:
        output = model(x.cuda())
        correct += (output.argmax(1) == y.cuda()).sum().item()
