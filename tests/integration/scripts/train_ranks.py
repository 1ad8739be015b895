# SPDX-License-Identifier: Apache-2.0
"""A few steps of DP-SGD on each of several processes, over gloo on the CPU. It knows of no profiler."""

import argparse
import os
import signal

import torch
import torch.distributed as dist
from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.utils.fsdp_utils import FSDP2Wrapper
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

FEATURES, WIDTH, CLASSES, BATCH = 64, 256, 8, 16


WRAPPERS = {
    "ddp": DistributedDataParallel,
    "dpddp": DifferentiallyPrivateDistributedDataParallel,
    "fsdp2": FSDP2Wrapper,
}


def model() -> nn.Module:
    torch.manual_seed(0)
    hidden = (nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
    return nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES))


def train(wrap: str, mode: str, clipping: str, steps: int, kill: int | None) -> None:
    rank = dist.get_rank()
    wrapped = WRAPPERS[wrap](model())
    generator = torch.Generator().manual_seed(rank)
    data = TensorDataset(
        torch.randn(BATCH * steps, FEATURES, generator=generator),
        torch.randint(CLASSES, (BATCH * steps,), generator=generator),
    )
    parameters = list(wrapped.parameters())
    private, optimizer, *criterion, loader = PrivacyEngine().make_private(
        module=wrapped,
        optimizer=torch.optim.Adam(parameters, lr=1e-2),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=BATCH),
        noise_multiplier=0.5,
        max_grad_norm=1.0 if clipping == "flat" else [1.0] * len(parameters),
        poisson_sampling=False,
        grad_sample_mode=mode,
        clipping=clipping,
    )
    compute_loss = criterion[0] if criterion else nn.CrossEntropyLoss()
    for step, (features, labels) in enumerate(loader):
        if step == steps - 1 and rank == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss = compute_loss(private(features), labels)
        loss.backward()
        optimizer.step()
        print(f"rank {rank} {wrap} {mode} {clipping} step {step} {loss.item()!r}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ways", nargs="+", help="wrapper/mode/clipping, one after the other")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--kill", type=int, help="the rank that dies of SIGKILL before its last step")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    for way in args.ways:
        train(*way.split("/"), args.steps, args.kill)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
