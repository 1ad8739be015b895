# SPDX-License-Identifier: Apache-2.0
"""Clients train a copy of the server's model in turn, whose private models stay in reference cycles."""

import copy
import gc

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def net():
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 1, 1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, 1, 1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 64, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


gc.disable()  # so that what is collected does not depend on when
server = net().cuda()
clients = [TensorDataset(torch.randn(64, 3, 32, 32), torch.randint(10, (64,))) for _ in range(3)]
for _ in range(2):
    states = []
    for data in clients:
        local = copy.deepcopy(server)
        opt = torch.optim.SGD(local.parameters(), lr=0.05, momentum=0.9)
        loader = DataLoader(data, batch_size=32)
        local, opt, loader = PrivacyEngine().make_private(
            module=local,
            optimizer=opt,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
        )
        for x, y in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(local(x.cuda()), y.cuda()).backward()
            opt.step()
        states.append({k: v.detach().clone() for k, v in local._module.state_dict().items()})
    server.load_state_dict({k: sum(s[k] for s in states) / len(states) for k in states[0]})
