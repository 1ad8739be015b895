# SPDX-License-Identifier: Apache-2.0
"""Trains privately without a PrivacyEngine.

Usage: `private_by_hand.py hooks|unwrapped|ghost before|after`. The last argument says whether the optimizer is made
before or after the model becomes private.
"""

import sys

import torch
from opacus.grad_sample import GradSampleHooks, GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn

mode, order = sys.argv[1:]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
adam = torch.optim.Adam(model.parameters()) if order == "before" else None
criterion = nn.CrossEntropyLoss()
settings = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": 16}
if mode == "ghost":
    private = GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, use_ghost_clipping=True)
    optimizer = DPOptimizerFastGradientClipping(adam or torch.optim.Adam(private.parameters()), **settings)
    criterion = DPLossFastGradientClipping(private, optimizer, criterion)
else:
    hooks = GradSampleModule(model) if mode == "hooks" else GradSampleHooks(model)
    private = hooks if mode == "hooks" else model
    optimizer = DPOptimizer(adam or torch.optim.Adam(private.parameters()), **settings)
samples, targets = torch.randn(16, 64), torch.randint(8, (16,))
for step in range(6):
    if step == 3 and mode != "ghost":  # its loss knows the optimizer
        adam = None
        optimizer = DPOptimizer(torch.optim.AdamW(private.parameters()), **settings)
    loss = criterion(private(samples), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} {loss.item()!r}", flush=True)
