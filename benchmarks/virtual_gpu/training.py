# SPDX-License-Identifier: Apache-2.0
"""How a case of benchmarks/virtual_gpu/peaks.py is trained: an ordinary loop around each of Opacus' modes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.fsdp_utils import FSDP2Wrapper
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.virtual_gpu.cases import Case
from benchmarks.virtual_gpu.models import MeanCrossEntropy, checkpoint_blocks, named
from opacus_memprof import PrivacyEngine, Session

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ADAPTIVE = {
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 10.0,
    "min_clipbound": 0.01,
    "unclipped_num_std": 1.0,
}


def train(case: Case, device: torch.device, session: Session) -> None:
    """Trains the case's steps. Model and batches come from seeds, on the CPU."""
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = case.tf32, case.benchmark
    module = named(case.model).build().train()
    if case.checkpoint:
        checkpoint_blocks(module, reentrant=case.checkpoint == "reentrant")
    if case.channels_last:
        module = module.to(
            memory_format=channels_last(next(module.parameters()))
        )  # a network's first is a convolution's
    module = wrap(case, module.to(device, TYPES.get(case.pure)))
    loader = batches(case)
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer: Any = make_optimizer(case, parameters)
    criterion: Any = MeanCrossEntropy()
    if case.mode == "vanilla":
        if case.compiled:
            module = torch.compile(module)  # type: ignore[assignment]
        session.attach(module, optimizer)
    else:
        bound = [1.0] * len(parameters) if case.clipping == "per_layer" else 1.0
        module, optimizer, *criteria, loader = PrivacyEngine().make_private(
            module=module,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=bound,
            clipping=case.clipping,
            poisson_sampling=case.poisson,
            grad_sample_mode=case.mode,
            **({"check": "off"} if case.mode == "flash_clip" else {}),  # a virtual GPU proves nothing
            **(ADAPTIVE if case.clipping == "adaptive" else {}),
        )
        criterion = criteria[0] if criteria else criterion
    if case.graph:
        train_by_graph(case, module, optimizer, criterion, loader, device)
    else:
        train_by_steps(case, module, optimizer, criterion, loader, device)


def train_by_steps(
    case: Case, module: nn.Module, optimizer: Any, criterion: Any, loader: Any, device: torch.device
) -> None:
    scaler = torch.amp.GradScaler(enabled=case.autocast == "fp16")
    with physical_batches(case, loader, optimizer) as loaded:
        for number, (inputs, targets) in enumerate(loaded):
            inputs, targets = moved(case, inputs, device), targets.to(device, non_blocking=True)
            with autocast(case):
                loss = criterion(module(inputs), targets)
            scaler.scale(loss).backward() if scaler.is_enabled() else loss.backward()
            if (number + 1) % case.accumulate:
                continue
            scaler.step(optimizer) if scaler.is_enabled() else optimizer.step()
            scaler.update()
            optimizer.zero_grad()
            float(loss.item())


def train_by_graph(
    case: Case, module: nn.Module, optimizer: Any, criterion: Any, loader: Any, device: torch.device
) -> None:
    """Three steps on a stream of their own, then one that is captured, then its replays."""
    inputs, targets = (tensor.to(device) for tensor in next(iter(loader)))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        criterion(module(inputs), targets).backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        step()
    for x, y in loader:
        inputs.copy_(x)
        targets.copy_(y)
        graph.replay()


def wrap(case: Case, module: nn.Module) -> nn.Module:
    if case.wrap == "ddp" and case.mode == "vanilla":
        return DistributedDataParallel(module)
    if case.wrap == "ddp":
        wrapped: nn.Module = DifferentiallyPrivateDistributedDataParallel(module)
        return wrapped
    if case.wrap == "fsdp2" and case.mode == "vanilla":
        for block in module.blocks:  # type: ignore[union-attr]
            fully_shard(block)  # type: ignore[arg-type]
        fully_shard(module)
    elif case.wrap == "fsdp2":
        module = FSDP2Wrapper(module)
    return module


def make_optimizer(case: Case, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if case.optimizer in ("sgd", "momentum"):
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9 if case.optimizer == "momentum" else 0.0)
    options = {"fused": {"fused": True}, "single": {"foreach": False}}.get(case.optimizer, {})
    return torch.optim.AdamW(parameters, lr=1e-4, capturable=case.graph, **options)


def batches(case: Case) -> DataLoader[Any]:
    """One epoch is the whole training. Poisson sampling draws from the loader's own generator, on the CPU."""
    inputs, targets = named(case.model).data(case.batch * case.steps * case.accumulate)
    return DataLoader(
        TensorDataset(inputs, targets),
        batch_size=case.batch,
        generator=torch.Generator().manual_seed(1),
        num_workers=case.workers,
        pin_memory=case.workers > 0,
    )


@contextmanager
def physical_batches(case: Case, loader: Any, optimizer: Any) -> Iterator[Any]:
    if not case.physical:
        yield loader
        return
    manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=case.physical, optimizer=optimizer)
    with manager as loaded:
        yield loaded


def moved(case: Case, inputs: torch.Tensor, device: torch.device) -> torch.Tensor:
    if case.channels_last:
        inputs = inputs.to(device, memory_format=channels_last(inputs))
    return inputs.to(device, TYPES.get(case.pure), non_blocking=True)


def channels_last(tensor: torch.Tensor) -> torch.memory_format:
    return torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d


def autocast(case: Case) -> AbstractContextManager[Any]:
    return torch.autocast("cuda", TYPES[case.autocast]) if case.autocast else nullcontext()
