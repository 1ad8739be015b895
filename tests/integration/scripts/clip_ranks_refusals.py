# SPDX-License-Identifier: Apache-2.0
"""What flash_clip refuses on several ranks, on all of them and in a sentence: cases of clip_ranks.py."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from opacus_memprof.clipping.arguments import ClipRule
from opacus_memprof.errors import MemprofError
from tests.integration.flash_clip_models import criterion
from tests.integration.scripts.rank_training import (
    build,
    by_block,
    device,
    full,
    part,
    private,
    report,
)


def refusals(case: str) -> None:
    """Each on all ranks, in a sentence."""
    rank = dist.get_rank()

    def refused(words: str, act: Callable[[], Any]) -> None:
        with pytest.raises(MemprofError, match=words):
            act()

    def step(model: Any, optimizer: Any, backwards: int = 1, factor: float = 1.0) -> None:
        for _ in range(backwards):
            batch = part("mlp", 0, 0)
            (criterion("mean")(model(batch["x"]), batch["y"]) * factor).backward()
        optimizer.step()

    wrapped = DistributedDataParallel(build("mlp"), static_graph=True)
    refused("static_graph", lambda: private(wrapped, "mlp"))
    refused("static_graph", lambda: private(wrapped, "mlp", grad_sample_mode="auto"))  # no other mode on some ranks
    wrapped = DistributedDataParallel(build("mlp"))
    wrapped.mixed_precision = object()  # what it takes on a GPU alone
    refused("mixed_precision", lambda: private(wrapped, "mlp"))
    alone = [dist.new_group([each]) for each in range(dist.get_world_size())][rank]
    wrapped = DistributedDataParallel(build("mlp"), process_group=alone)
    refused("a process group that is not all ranks", lambda: private(wrapped, "mlp"))
    wrapped = DistributedDataParallel(build("mlp"))
    refused("adaptive", lambda: private(wrapped, "mlp", clipping="adaptive"))
    words = "noise_multiplier is 0.0 on rank 0 and 1.0 on rank 1"
    refused(words, lambda: private(wrapped, "mlp", noise_multiplier=float(rank)))
    other = build("mlp")
    other[0].bias.requires_grad_(rank == 1)
    wrapped = DifferentiallyPrivateDistributedDataParallel(other)
    refused("the number of trained parameters is 2 on rank 0 and 3 on rank 1", lambda: private(wrapped, "mlp"))

    model, optimizer, _ = private(DistributedDataParallel(build("mlp")), "mlp", poisson_sampling=False)
    before = [p.clone() for p in model.parameters()]
    infinite = rank == 1
    words = "not finite" if infinite else "rank 1 could not"
    refused(words, lambda: step(model, optimizer, 1, float("inf") if infinite else 1.0))
    refused("1 backward passes for this step, and another one 2", lambda: step(model, optimizer, 1 + rank % 2))
    words = "without a backward pass" if rank == 0 else "rank 0 could not"
    refused(words, lambda: step(model, optimizer, min(rank, 1)))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    step(model, optimizer)  # and goes on
    assert not torch.equal(next(model.parameters()), before[0])

    inner = build("mlp")
    model, optimizer, _ = private(DistributedDataParallel(inner), "mlp", noise_multiplier=1.0)
    refused_changes(optimizer, refused, lambda: step(model, optimizer))
    step(model, optimizer)
    optimizer.zero_grad()
    inner[0].bias.requires_grad_(rank == 0)
    refused("do not train the same parameters", lambda: step(model, optimizer))

    model, optimizer, _ = private(DistributedDataParallel(build("mlp")), "mlp", noise_multiplier=1.0)
    before = [p.clone() for p in model.parameters()]
    state = torch.get_rng_state if device().type == "cpu" else torch.cuda.get_rng_state
    batch = part("mlp", 0, 0)
    criterion("mean")(model(batch["x"]), batch["y"]).backward()
    generator = state()
    with not_clipped(rank == 1):
        refused("a sample was not clipped" if rank == 1 else "rank 1 could not", optimizer.step)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert torch.equal(state(), generator)  # rank 0 had drawn noise
    step(model, optimizer)
    report(case, 0.0)


def refused_changes(optimizer: Any, refused: Callable[[str, Callable[[], Any]], None], act: Callable[[], Any]) -> None:
    """What a program changes on one rank alone, such as by a scheduler."""
    for name, value in (("max_grad_norm", 0.03), ("noise_multiplier", 0.1), ("expected_batch_size", 1)):
        before = getattr(optimizer, name)
        setattr(optimizer, name, value if dist.get_rank() == 1 else before)
        refused(f"{name} is .* on a rank, and .* on another one", act)
        setattr(optimizer, name, before)


def not_clipped(fails: bool) -> AbstractContextManager[Any]:
    """Plants an error in the clip factors."""

    def factors(rule: ClipRule, norms: torch.Tensor) -> torch.Tensor:
        return 1e3 * rule.bound / norms

    return mock.patch.object(ClipRule, "factors", factors) if fails else nullcontext()


class Mixed(nn.Module):
    """A layer whose arguments may differ, and a parameter outside of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(9, 4)
        self.scale = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
        output: torch.Tensor = self.linear(x) * self.scale
        return output if shift is None else output + shift


def refusals_fsdp2(case: str) -> None:
    """Each on all ranks, in a sentence."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def refused(words: str, act: Callable[[], Any]) -> None:
        with pytest.raises(MemprofError, match=words):
            act()

    def backward(model: Any, factor: float = 1.0, **arguments: Any) -> None:
        batch = part("mlp", 0, 0)
        (criterion("mean")(model(batch["x"], **arguments), batch["y"]) * factor).backward()

    refused("runs backward twice", lambda: private(by_block(build("mlp")), "mlp", flash_clip_passes=2))
    refused("adaptive", lambda: private(by_block(build("mlp")), "mlp", clipping="adaptive"))
    refused("FSDP1", lambda: private(FullyShardedDataParallel(build("mlp"), device_id=device()), "mlp"))
    part_only = build("mlp")
    fully_shard(part_only[0])
    refused("parts of the model are sharded", lambda: private(part_only, "mlp"))
    ignoring = build("mlp")
    refused(
        "leave it out of ignored_params",
        lambda: private(fully_shard(ignoring, ignored_params={ignoring[0].bias}), "mlp"),
    )
    trained = Mixed().to(device(), torch.float64)
    trained.scale.requires_grad_(True)
    refused("need its forward repeated", lambda: private(by_block(trained), "mlp"))
    mesh = init_device_mesh(device().type, (world,), mesh_dim_names=("tp",))
    parallel = parallelize_module(build("mlp"), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    refused("as in tensor or context parallelism", lambda: private(parallel, "mlp"))
    refused("as in tensor or context parallelism", lambda: private(parallel, "mlp", grad_sample_mode="auto"))
    if world == 4:
        both = init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))
        parallel = parallelize_module(build("mlp"), both["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        refused("as in tensor or context parallelism", lambda: private(by_block(parallel, mesh=both["dp"]), "mlp"))
        refused("over 2 of 4 ranks", lambda: private(by_block(build("mlp"), mesh=both["dp"]), "mlp"))

    model, optimizer, _ = private(by_block(build("mlp")), "mlp")
    before = [full(p).clone() for p in model.parameters()]
    backward(model, float("inf") if rank == 1 else 1.0)
    refused("not finite" if rank == 1 else "rank 1 could not", optimizer.step)
    backward(model)
    optimizer.signal_skip_step(rank == 0)
    refused("different numbers of parts", optimizer.step)
    with not_clipped(rank == 1):
        backward(model)
        # The sum of a shard is of all ranks' samples.
        refused("a sample was not clipped|rank . could not", optimizer.step)
    assert all(torch.equal(full(p), q) for p, q in zip(model.parameters(), before, strict=True))

    inner = build("mlp")
    model, optimizer, _ = private(by_block(inner), "mlp", noise_multiplier=1.0)
    refused_changes(optimizer, refused, lambda: (backward(model), optimizer.step()))
    inner[0].bias.requires_grad_(rank == 0)
    refused("the ranks train different parameters", lambda: backward(model))

    model, optimizer, _ = private(by_block(Mixed().to(device(), torch.float64)), "mlp")
    shift = {"shift": torch.ones(3, 4, dtype=torch.float64, device=device())} if rank == 0 else {}
    refused("different kinds of arguments", lambda: backward(model, **shift))

    sequence = part("transformer", 0, 0)["x"][:, :4]
    model, _, _ = private(by_block(build("transformer")), "transformer")
    mesh = init_device_mesh(device().type, (world,), mesh_dim_names=("cp",))
    with context_parallel(mesh, buffers=[sequence], buffer_seq_dims=[1]):
        refused("context parallelism", lambda: model(sequence))
    report(case, 0.0)
