# SPDX-License-Identifier: Apache-2.0
"""A few steps of DP-SGD on a small network (--mode vanilla: of plain Adam), and then the end that --end names.

It knows of no profiler.
"""

import argparse
import os
import sys
import time

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="hooks")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--context")
    parser.add_argument("--end", default="return")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    loader = DataLoader(
        TensorDataset(torch.randn(8 * args.steps, 16), torch.randint(4, (8 * args.steps,))),
        batch_size=8,
        num_workers=args.workers,
        multiprocessing_context=args.context,
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    if args.mode != "vanilla":
        model, optimizer, *criteria, loader = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            grad_sample_mode=args.mode,
        )
        criterion = criteria[0] if criteria else criterion
    for step, (features, labels) in enumerate(loader):
        optimizer.zero_grad()
        loss = criterion(model(features), labels)
        loss.backward()
        optimizer.step()
        print(f"step {step} {loss.item()!r}", flush=True)
    end(args.end)


def end(how: str) -> None:
    if how == "raise":
        raise ValueError("no more data")
    if how == "exit_3":
        sys.exit(3)
    if how == "exit_text":
        sys.exit("gave up")
    if how == "os_exit":
        os._exit(5)
    if how == "memory":
        try:
            torch.empty(2**60, dtype=torch.uint8)
        except RuntimeError as error:
            raise SystemExit(7) from error
    if how.startswith("wait"):
        time.sleep(60 if how == "wait" else 1)


if __name__ == "__main__":
    main()
