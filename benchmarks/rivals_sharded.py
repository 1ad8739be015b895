# SPDX-License-Identifier: Apache-2.0
"""A bench of models that FSDP2 shards over the processes of torchrun, each of which has a batch of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from distributed import timed
from rivals_bench import RivalBench
from training_modes import prepare

from opacus_memprof.experiments.sharded_run import shard


class ShardedBench(RivalBench):
    """Every visit has a new model: what sharding changes is not undone either."""

    def make_model(self, mode: str) -> None:
        super().make_model(mode)
        self.model = shard(self.model)
        self.optimizer = torch.optim.Adam([p for p in self.model.parameters() if p.requires_grad], lr=1e-5)

    def wrap(self, mode: str) -> tuple[Callable[[], None], Callable[[], None]]:
        self.renew(mode)
        step, _ = prepare(mode, self.model, self.optimizer, self.config.batch * dist.get_world_size())
        return (lambda: step(self.x, self.y)), lambda: None

    def seconds(self, step: Callable[[], None]) -> float:
        return timed(step, self.device)

    def agree(self, goes_on: bool) -> bool:
        everywhere = torch.tensor(int(goes_on), device=self.device)
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
        return bool(everywhere)
