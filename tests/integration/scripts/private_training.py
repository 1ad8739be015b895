# SPDX-License-Identifier: Apache-2.0
"""The model, the data and the loops that private_loops.py and private_loops_wrong.py share."""

import warnings
from typing import Any

import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_memprof import PrivacyEngine

warnings.simplefilter("ignore")
torch.manual_seed(0)
BATCH = 8


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Linear(8, 4)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        result: torch.Tensor = self.head(self.dropout(hidden)) * scale
        return result


def data(batch: int = BATCH) -> DataLoader[Any]:
    x = torch.randn(64, 3, 6, 6) * torch.logspace(-1, 1, 64).view(-1, 1, 1, 1)
    return DataLoader(TensorDataset(x, torch.randint(0, 4, (64,))), batch_size=batch)


def private(mode: str = "hooks", model: nn.Module | None = None, **options: Any) -> tuple[Any, Any, Any, Any]:
    """Model, optimizer, criterion and loader from make_private."""
    model = model or Net()
    options = {"noise_multiplier": 1.0, "max_grad_norm": 2.0, "poisson_sampling": False} | options
    criterion: Any = nn.CrossEntropyLoss()
    made = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        data_loader=options.pop("data_loader", None) or data(),
        grad_sample_mode=mode,
        **({"criterion": criterion} if mode == "ghost" else {}),
        **options,
    )
    return made[0], made[1], made[2] if mode == "ghost" else criterion, made[-1]


def train(model: Any, optimizer: Any, criterion: Any, loader: Any, every: int = 1, after: Any = None) -> None:
    for i, (x, y) in enumerate(loader):
        criterion(model(x), y).backward()
        if (i + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()
            if after is not None:
                after(i)
    print("trained to the end")


def memory_manager(mode: str) -> None:
    model, optimizer, criterion, loader = private(mode, poisson_sampling=True)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer) as parts:
        train(model, optimizer, criterion, parts)
