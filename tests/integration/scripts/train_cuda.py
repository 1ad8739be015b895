# SPDX-License-Identifier: Apache-2.0
"""Steps of DP-SGD on `cuda`, of a network whose sizes --width and --batch say, and then the end that --end names.

It prints what torch itself has counted, and knows of no profiler.
"""

import argparse
import json
import sys

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--end", default="return")
    args = parser.parse_args()

    model = nn.Sequential(nn.Linear(16, args.width), nn.ReLU(), nn.Linear(args.width, args.width)).to("cuda")
    data = TensorDataset(torch.randn(2 * args.batch, 16), torch.randint(args.width, (2 * args.batch,)))
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
        data_loader=DataLoader(data, batch_size=args.batch, num_workers=args.workers),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    for features, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(features.cuda()), labels.cuda()).backward()
        optimizer.step()
    counted = torch.cuda.memory_stats()
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    print(
        json.dumps(
            {
                "requested": counted["requested_bytes.all.peak"],
                "reserved": counted["reserved_bytes.all.peak"],
                "devices": [[device.name, device.total_memory] for device in devices],
            }
        ),
        flush=True,
    )
    if args.end == "raise":
        raise ValueError("no more data")
    if args.end == "exit_3":
        sys.exit(3)


if __name__ == "__main__":
    main()
