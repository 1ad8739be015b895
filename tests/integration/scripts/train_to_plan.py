# SPDX-License-Identifier: Apache-2.0
"""Steps of plain training whose batch has 16 MiB a sample, and 32 MiB in --mode double; all else is small."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=1)
parser.add_argument("--mode", default="single")
parser.add_argument("--steps", type=int, default=2)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


model = Scale().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
width = 2**22 if args.mode == "single" else 2**23
batch = torch.empty(args.batch_size, width, device="cuda")
for _ in range(args.steps):
    optimizer.zero_grad()
    model(batch[:, :8]).sum().backward()
    optimizer.step()
