# SPDX-License-Identifier: Apache-2.0
"""A few steps of DP-SGD on each of several processes: on the CPU over gloo, or on GPUs over NCCL.

It knows of no profiler.
"""

import argparse
import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.utils.fsdp_utils import FSDP2Wrapper
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from opacus_memprof.clipping import FlashClipEngineMixin
from opacus_memprof.experiments.training import leave_group

FEATURES, WIDTH, CLASSES, BATCH = 64, 256, 8, 16


class FlashClipEngine(FlashClipEngineMixin, PrivacyEngine):
    """Opacus' engine with one mode more."""


def in_bf16(model: nn.Module) -> nn.Module:
    return FSDP2Wrapper(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def offloaded(model: nn.Module) -> nn.Module:
    """FSDP2 keeps shards, gradients and optimizer states on the CPU. Opacus' wrapper has no argument for it."""
    for module in model:
        if isinstance(module, nn.Linear):
            fully_shard(module, offload_policy=CPUOffloadPolicy())
    return fully_shard(model, offload_policy=CPUOffloadPolicy())


WRAPPERS = {
    "ddp": DistributedDataParallel,
    "dpddp": DifferentiallyPrivateDistributedDataParallel,
    "fsdp2": FSDP2Wrapper,
    "fsdp2_bf16": in_bf16,
    "fsdp2_offload": offloaded,
}


def model() -> nn.Module:
    torch.manual_seed(0)
    hidden = (nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
    return nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES))


def train(wrap: str, mode: str, clipping: str, device: torch.device, steps: int, kill: int | None) -> None:
    rank = dist.get_rank()
    wrapped = WRAPPERS[wrap](model().to(device))
    generator = torch.Generator().manual_seed(rank)
    data = TensorDataset(
        torch.randn(BATCH * steps, FEATURES, generator=generator),
        torch.randint(CLASSES, (BATCH * steps,), generator=generator),
    )
    parameters = list(wrapped.parameters())
    engine = FlashClipEngine() if mode == "flash_clip" else PrivacyEngine()
    private, optimizer, *criterion, loader = engine.make_private(
        module=wrapped,
        optimizer=torch.optim.Adam(parameters, lr=1e-2),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=BATCH),
        noise_multiplier=0.5,
        max_grad_norm=1.0 if clipping == "flat" else [1.0] * len(parameters),
        poisson_sampling=False,
        grad_sample_mode=mode,
        clipping=clipping,
        **({"check": "off"} if mode == "flash_clip" else {}),  # memory is that of the steps alone
    )
    compute_loss = criterion[0] if criterion else nn.CrossEntropyLoss()
    for step, (features, labels) in enumerate(loader):
        if step == steps - 1 and rank == kill:
            time.sleep(1)  # a kill may lose the last milliseconds
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss = compute_loss(private(features.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        print(f"rank {rank} {wrap} {mode} {clipping} step {step} {loss.item()!r}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ways", nargs="+", help="wrapper/mode/clipping, one after the other")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--kill", type=int, help="the rank that dies of SIGKILL before its last step")
    parser.add_argument("--timeout", type=float, default=600, help="seconds after which a collective has failed")
    args = parser.parse_args()
    timeout = timedelta(seconds=args.timeout)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, timeout=timeout)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", timeout=timeout)
    for way in args.ways:
        train(*way.split("/"), device, args.steps, args.kill)
    leave_group()


if __name__ == "__main__":
    main()
