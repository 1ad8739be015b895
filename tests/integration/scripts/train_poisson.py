# SPDX-License-Identifier: Apache-2.0
"""Runs steps of DP-SGD on batches that Poisson sampling draws: 40 of 2000 samples on average.

Usage: `train_poisson.py [STEPS SEED]`, by default 2 and 0. A sample takes 4 MiB, for a time twice that. Prints the size
of each batch before its step.
"""

import sys
from itertools import chain, islice, repeat

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

steps, seed = (int(sys.argv[1]), int(sys.argv[2])) if len(sys.argv) > 1 else (2, 0)
model = nn.Linear(1024, 1024, bias=False).cuda()
data = TensorDataset(torch.zeros(2000, 1024))
model, optimizer, loader = PrivacyEngine().make_private(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    data_loader=DataLoader(data, batch_size=40, generator=torch.Generator().manual_seed(seed)),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
)
for (x,) in islice(chain.from_iterable(repeat(loader)), steps):
    print("batch of", len(x), flush=True)
    optimizer.zero_grad()
    model(x.cuda()).sum().backward()
    optimizer.step()
