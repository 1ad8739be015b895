# SPDX-License-Identifier: Apache-2.0
"""Trains a model by preferences, beside a reference model whose calls record graphs. Its argument is the mode."""

import copy
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_memprof import PrivacyEngine


def score(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = model(x)
    return output.log_softmax(-1)[:, 0]


def main() -> None:
    layers = [module for _ in range(6) for module in (nn.Linear(1024, 1024), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(1024, 100)).cuda()
    reference = copy.deepcopy(model)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.Adam(model.parameters()),
        data_loader=DataLoader(TensorDataset(torch.zeros(48, 2, 1024)), batch_size=16),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=sys.argv[1],
        **({"check": "off"} if sys.argv[1] == "flash_clip" else {}),  # the first step would prove privacy
    )
    for (pairs,) in loader:
        chosen, rejected = pairs.cuda().unbind(1)
        gains = score(model, chosen) - score(model, rejected)
        gains_of_reference = score(reference, chosen) - score(reference, rejected)
        loss = -nn.functional.logsigmoid(gains - gains_of_reference).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
