# SPDX-License-Identifier: Apache-2.0
"""Two ranks over gloo that train a model in DDP and under FSDP2, and write what was proved into own directories."""

import socket
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import opacus_memprof
from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments.training import leave_group


def train(wrap: str) -> opacus_memprof.PrivacyEngine:
    """Takes two steps, and a third one that rank 1 refuses."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    model = DistributedDataParallel(model) if wrap == "ddp" else fully_shard(model)
    data = TensorDataset(torch.randn(8, 5), torch.randint(3, (8,)))
    engine = opacus_memprof.PrivacyEngine()
    private, optimizer, _ = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode="flash_clip",
    )
    for step in range(3):
        x, y = data[:4]
        if step == 2 and dist.get_rank() == 1:
            x[0] = float("nan")
        optimizer.zero_grad()
        nn.functional.cross_entropy(private(x), y).backward()
        try:
            optimizer.step()
        except MemprofError:
            assert step == 2
    return engine


def run(rank: int, port: int, directory: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    engines = {wrap: train(wrap) for wrap in ("ddp", "fsdp2")}
    leave_group()
    for wrap, engine in engines.items():
        engine.save_privacy_check(Path(directory) / wrap / f"rank_{rank}" / "privacy_check.json")


def main() -> None:
    """Imports once, and forks the ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(run, (port, sys.argv[1]), nprocs=2, start_method="fork")


if __name__ == "__main__":
    main()
