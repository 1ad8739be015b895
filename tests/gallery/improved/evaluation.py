# SPDX-License-Identifier: Apache-2.0
"""An evaluation with large batches records graphs, and the last one lives on into the next epoch."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, 2, 1),
    nn.ReLU(),
    nn.Conv2d(64, 128, 3, 2, 1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(4),
    nn.Flatten(),
    nn.Linear(2048, 10),
).cuda()
opt = torch.optim.SGD(model.parameters(), 0.1)
loader = DataLoader(TensorDataset(torch.randn(128, 3, 32, 32), torch.randint(10, (128,))), batch_size=32)
tests = DataLoader(TensorDataset(torch.randn(512, 3, 32, 32), torch.randint(10, (512,))), batch_size=256)
model, opt, loader = PrivacyEngine().make_private(
    module=model, optimizer=opt, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False
)
for _ in range(2):
    model.train()
    for x, y in loader:
        opt.zero_grad()
        nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
        opt.step()
    model.eval()
    total = 0
    for x, y in tests:
        out = model(x.cuda())
        total += nn.functional.cross_entropy(out, y.cuda()).detach()
