# SPDX-License-Identifier: Apache-2.0
"""A bench of models that FSDP2 shards over the processes of torchrun, each of which has a batch of its own.

It imports nothing of the package that has to be compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from opacus.utils.fsdp_utils import FSDP2Wrapper
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks.clipping.rivals_bench import RivalBench
from benchmarks.clipping.training_modes import adapt, prepare


def shard(mode: str, model: nn.Module) -> nn.Module:
    """Shards the model as a mode needs it.

    For ghost_fsdp every layer by itself, as Opacus requires; otherwise by blocks, as is usual.
    """
    return FSDP2Wrapper(model) if mode == "ghost_fsdp" else fully_shard(_shard_blocks(model))


def _shard_blocks(module: nn.Module) -> nn.Module:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            for block in child:
                fully_shard(block)
        elif any(True for _ in child.parameters(recurse=False)):
            fully_shard(child)
        else:
            _shard_blocks(child)
    return module


class ShardedBench(RivalBench):
    """Every visit has a new model: what sharding changes is not undone either.

    Only its shards ever have memory, and get random numbers.
    """

    def make_model(self, mode: str) -> None:
        with torch.device("meta"):
            model = adapt(mode, self.config.build().to(self.config.dtype)).train()
        self.model = shard(mode, model)
        self.model._apply(lambda t: torch.empty_like(t, device=self.device) if t.is_meta else t.to(self.device))
        torch.manual_seed(dist.get_rank())
        with torch.no_grad():
            for parameter in self.model.parameters():
                part = parameter.to_local()  # type: ignore[operator]
                part.normal_(0, 0.02) if parameter.dim() > 1 else part.fill_(1)  # a normalization's weights
        self.optimizer = torch.optim.Adam([p for p in self.model.parameters() if p.requires_grad], lr=1e-5)

    def wrap(self, mode: str) -> tuple[Callable[[], None], Callable[[], None]]:
        self.renew(mode)
        step, _ = prepare(mode, self.model, self.optimizer, self.config.batch * dist.get_world_size())
        return (lambda: step(self.x, self.y)), lambda: None

    def visit(self, mode: str) -> dict[str, Any]:
        """The first rank's that failed, or that of the rank with the highest peak. Times are the slowest rank's."""
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, super().visit(mode))
        found = [each for each in everyones if each is not None]  # a rank that is played alone has no others
        failed = [each for each in found if "failed" in each]
        return failed[0] if failed else max(found, key=lambda each: each["peak_bytes"] or 0)

    def seconds(self, step: Callable[[], None]) -> float:
        """The slowest rank's."""
        self.synchronize()
        dist.barrier()
        longest = torch.tensor(super().seconds(step), dtype=torch.float64, device=self.device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        return float(longest)

    def agree(self, goes_on: bool) -> bool:
        everywhere = torch.tensor(int(goes_on), device=self.device)
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
        return bool(everywhere)
