# SPDX-License-Identifier: Apache-2.0
"""Training beside which tensors on two streams come and go, in sizes that leave gaps.

It prints what torch itself has counted.
"""

import argparse
import json

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--blocks", type=int, default=12)
args = parser.parse_args()

model = nn.Linear(512, 512).cuda()
optimizer = torch.optim.Adam(model.parameters())
side = torch.cuda.Stream()
kept = []
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(64, 512, device="cuda")).sum().backward()
    optimizer.step()
    blocks = [torch.empty((21 + 8 * step) * 2**20, dtype=torch.uint8, device="cuda") for _ in range(args.blocks)]
    with torch.cuda.stream(side):
        others = [torch.empty(step * 2**19 + 2**i, dtype=torch.uint8, device="cuda") for i in range(10, 25)]
    kept += blocks[::6]
    kept += others[::3]
    del blocks, others
counted = torch.cuda.memory_stats()
print(json.dumps({name: counted[f"{name}_bytes.all.peak"] for name in ("requested", "reserved")}))
