# SPDX-License-Identifier: Apache-2.0
"""Computes per-sample gradients by torch.func, and clips them: https://docs.pytorch.org/tutorials/intermediate/per_sample_grads.html."""

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of_a_sample(params, x, y):
    return nn.functional.cross_entropy(functional_call(model, params, (x[None],)), y[None])


for _ in range(3):
    params = {name: p.detach() for name, p in model.named_parameters()}
    total = {name: torch.zeros_like(p) for name, p in params.items()}
    batch = torch.randn(256, 784, device="cuda"), torch.randint(10, (256,), device="cuda")
    for x, y in [batch]:
        grads = vmap(grad(loss_of_a_sample), in_dims=(None, 0, 0))(params, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        factors = (1 / (norms + 1e-6)).clamp(max=1)
        for name, g in grads.items():
            total[name] += (g * factors.view(-1, *[1] * (g.dim() - 1))).sum(0)
    for name, p in model.named_parameters():
        p.grad = (total[name] + torch.randn_like(p)) / 256
    optimizer.step()
