# SPDX-License-Identifier: Apache-2.0
"""flash_clip on several processes, against clipping by hand, in float64, of all ranks' samples in one process.

python clip_ranks.py BACKEND RANKS NAME...    runs these cases, or groups of them, which are a case's first word; each
prints the largest difference that it has found. The backend is gloo, on the CPU, or nccl, on a GPU for each rank.
"""

import contextlib
import gc
import importlib
import os
import socket
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from opacus_memprof.experiments.training import leave_group
from tests.integration.clipping_by_hand import Batch
from tests.integration.flash_clip_models import Engine, criterion
from tests.integration.scripts.clip_ranks_exact import CASES as EXACT
from tests.integration.scripts.clip_ranks_fsdp2 import checkpoint, llama, shard_noise
from tests.integration.scripts.clip_ranks_refusals import refusals, refusals_fsdp2
from tests.integration.scripts.rank_training import (
    BOUND,
    EXPECTED,
    LR,
    MODELS,
    MOMENTUM,
    SAMPLES,
    WRAPPERS,
    ByHand,
    build,
    device,
    full,
    part,
    private,
    report,
    together,
    whole,
)


# --- cases: each compares parameters after three steps ---
# A proof takes most of a case's time: check="off" leaves it out where another case proves such shards.
def poisson(case: str, wrap: str, name: str, reduction: str = "mean", noise: float = 0.0, **options: Any) -> None:
    """Batches of different sizes, some of them empty."""
    hand = ByHand(name, noise, EXPECTED if reduction == "mean" else 1)
    wrapped = WRAPPERS[wrap](build(name))
    hooks, optimizer, _ = private(wrapped, name, loss_reduction=reduction, noise_multiplier=noise, **options)
    model = hooks if options.get("wrap_model", True) else wrapped
    loss, ranks = criterion(reduction), range(dist.get_world_size())
    for step in range(3):
        batch = part(name, step, dist.get_rank())
        model.eval()
        with torch.no_grad():
            model(batch["x"])
        model.train()
        optimizer.zero_grad()
        own = loss(model(batch["x"]), batch["y"])
        logged = torch.full_like(own.detach(), dist.get_rank() + 1.0) + 0 * own.detach().nan_to_num()
        dist.all_reduce(logged)  # once on each rank, whatever is computed again
        assert logged.item() == sum(rank + 1 for rank in ranks)
        own.backward()
        optimizer.step()
        hand.step(together([part(name, step, rank) for rank in ranks]))
    report(case, hand.difference(model), 1e-5 if "mixed" in wrap else 1e-10)


def rounded(case: str, wrap: str, name: str, dtype: torch.dtype, autocast: bool = False) -> None:
    """Computed in less than float64: the gradients of each step, within the type."""
    hand = ByHand(name, 0.0, EXPECTED, dtype)
    check = "off" if wrap == "dpddp" else "sometimes"
    model, optimizer, _ = private(WRAPPERS[wrap](build(name, dtype)), name, check=check)
    worst = 0.0
    for step in range(3):
        batches = [part(name, step, rank, dtype) for rank in range(dist.get_world_size())]
        batch = batches[dist.get_rank()]
        optimizer.zero_grad()
        with torch.autocast(device().type, torch.bfloat16, enabled=autocast):
            loss = criterion("mean")(model(batch["x"]), batch["y"])
        loss.backward()
        hand.follow(model)
        optimizer.step()
        everyones = together(batches)
        hand.step({key: value.double() if value.is_floating_point() else value for key, value in everyones.items()})
        worst = max(worst, hand.relative_difference(model))
    report(case, worst, 1e-5 if "float32" in case else 8e-2)


def sampled(case: str, wrap: str, name: str, physical: int | None = None) -> None:
    """The batches of the loader that make_private returns; split, in different numbers of parts on the ranks."""
    expected = 2 * dist.get_world_size()
    hand = ByHand(name, 0.0, expected)
    model, optimizer, loader = private(WRAPPERS[wrap](build(name)), name, expected, check="off")
    logical: Batch | None = None
    sizes, parts = [], 0
    torch.manual_seed(22 + dist.get_rank())
    with contextlib.ExitStack() as stack:
        if physical is not None:
            manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer)
            loader = stack.enter_context(manager)
        for x, y in ((x.to(device()), y.to(device())) for x, y in loader):
            criterion("mean")(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            logical = together([*([] if logical is None else [logical]), {"x": x, "y": y}])
            parts += 1
            if optimizer._is_last_step_skipped:
                continue
            everyones: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyones, {key: value.cpu() for key, value in logical.items()})
            hand.step({key: value.to(device()) for key, value in together(everyones).items()})
            sizes.append(len(logical["x"]))
            logical = None
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, sizes)
    assert {len(each) for each in seen} == {SAMPLES // expected}, seen
    assert any(0 in each for each in seen), seen  # without samples
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, parts)
    assert physical is None or len(set(counts)) > 1, counts
    report(case, hand.difference(model))


def accumulated(case: str, wrap: str, name: str) -> None:
    """Two backward passes for each step, the first without synchronization."""
    hand = ByHand(name, 0.0, 2 * EXPECTED)
    wrapped = WRAPPERS[wrap](build(name))
    model, optimizer, _ = private(wrapped, name, poisson_sampling=False)
    for first in (0, 1):
        optimizer.zero_grad()
        for step in (first, first + 1):
            batch = part(name, step, dist.get_rank())
            if isinstance(wrapped, FSDPModule):
                wrapped.set_requires_gradient_sync(step != first)
            quiet = wrapped.no_sync() if step == first and hasattr(wrapped, "no_sync") else contextlib.nullcontext()
            with quiet:
                criterion("mean")(model(batch["x"]), batch["y"]).backward()
        optimizer.step()
        ranks = range(dist.get_world_size())
        hand.step(together([part(name, step, rank) for step in (first, first + 1) for rank in ranks]))
    report(case, hand.difference(model))


def frozen_later(case: str, wrap: str, name: str) -> None:
    """A parameter is frozen in the second step, and trained again in the third."""
    hand = ByHand(name, 0.0, EXPECTED)
    wrapped = WRAPPERS[wrap](build(name))
    model, optimizer, _ = private(wrapped, name, poisson_sampling=False)
    for step in range(3):
        for net in (wrapped, hand.model):
            next(net.parameters()).requires_grad_(step != 1)
        optimizer.zero_grad()
        hand.optimizer.zero_grad()
        batch = part(name, step, dist.get_rank())
        criterion("mean")(model(batch["x"]), batch["y"]).backward()
        optimizer.step()
        hand.step(together([part(name, step, rank) for rank in range(dist.get_world_size())]))
    report(case, hand.difference(model))


def in_parts(case: str, wrap: str, name: str) -> None:
    """Two physical batches for each step, as BatchMemoryManager splits them, as many on every rank."""
    hand = ByHand(name, 0.0, EXPECTED)
    model, optimizer, _ = private(WRAPPERS[wrap](build(name)), name, check="off")
    ranks = range(dist.get_world_size())
    for first in (0, 1):
        for step in (first, first + 1):
            batch = part(name, step, dist.get_rank())
            optimizer.signal_skip_step(step == first)
            criterion("mean")(model(batch["x"]), batch["y"]).backward()
            optimizer.step()
            optimizer.zero_grad()
        hand.step(together([part(name, step, rank) for step in (first, first + 1) for rank in ranks]))
    report(case, hand.difference(model))


def per_layer(case: str, wrap: str, name: str) -> None:
    """A bound for each parameter: against hooks mode, in one process."""
    bounds = [0.05 * (i + 1) for i, _ in enumerate(build(name).parameters())]
    options = {"clipping": "per_layer", "max_grad_norm": bounds, "check": "off"}
    model, optimizer, _ = private(WRAPPERS[wrap](build(name)), name, **options)
    torch.manual_seed(1)
    expected = build(name)
    reference, alone, _ = Engine().make_private(
        module=expected,
        optimizer=torch.optim.SGD(expected.parameters(), lr=LR, momentum=MOMENTUM),
        data_loader=DataLoader(MODELS[name][1](SAMPLES), batch_size=EXPECTED),
        noise_multiplier=0.0,
        max_grad_norm=bounds,
        clipping="per_layer",
        grad_sample_mode="hooks",
    )
    for step in range(3):
        parts = [part(name, step, rank) for rank in range(dist.get_world_size())]
        for net, optim, batch in ((model, optimizer, parts[dist.get_rank()]), (reference, alone, together(parts))):
            optim.zero_grad()
            criterion("mean")(net(batch["x"]), batch["y"]).backward()
            optim.step()
    found = dict(whole(model))
    report(case, max(float((p - found[n]).abs().max()) for n, p in whole(reference)))


def sensitivity(case: str, wrap: str, name: str) -> None:
    """No sample, on whatever rank, changes the sum by more than the bound; one that is clipped does so by the bound."""
    batch = part(name, 0, 0)
    batch["x"] *= 50
    rank, found = dist.get_rank(), []
    for left_out in (None, (0, 0), (0, 1), (1, 0)):
        keep = [n for n in range(3 if rank == 0 else 1) if (rank, n) != left_out]
        model, optimizer, _ = private(WRAPPERS[wrap](build(name)), name, loss_reduction="sum", check="off")
        criterion("sum")(model(batch["x"][keep]), batch["y"][keep]).backward()
        optimizer.step()
        found.append(torch.cat([full(p.grad).flatten() for p in model.parameters()]))
    changes = [float((other - found[0]).norm()) for other in found[1:]]
    assert all(change <= BOUND * (1 + 1e-9) for change in changes), changes
    report(case, abs(max(changes) / BOUND - 1) * 1e-6)


def buffers(case: str) -> None:
    """Buffers are rank 0's after a step, as with DDP; and DDP is as it was after cleanup."""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(9, 4)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1 + dist.get_rank()
            result: torch.Tensor = self.linear(x)
            return result

    wrapped = DistributedDataParallel(Counter().to(device(), torch.float64))
    model, optimizer, _ = private(wrapped, "mlp")
    batch = part("mlp", 0, 0)
    criterion("mean")(model(batch["x"]), batch["y"]).backward()
    optimizer.step()
    assert float(wrapped.module.seen) == 1
    optimizer.zero_grad()
    model.cleanup()
    (wrapped(batch["x"]).sum() * (1 + dist.get_rank())).backward()
    gradients: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gradients, wrapped.module.linear.bias.grad.cpu())
    assert all(torch.equal(each, gradients[0]) for each in gradients)  # DDP has averaged them again
    report(case, 0.0)


def one_by_one(case: str, wrap: str, name: str) -> None:
    """As poisson, where every sum is too large to be sent together with others."""
    with mock.patch("opacus_memprof.clipping.optimizers.fsdp._SMALL", 0):
        poisson(case, wrap, name, check="off")


CASES: dict[str, Callable[[str], None]] = {
    **{f"{wrap} poisson {name}": lambda case, w=wrap, n=name: poisson(case, w, n)
       for wrap in ("ddp", "dpddp") for name in ("transformer", "convnet")},
    "ddp two passes": lambda case: poisson(case, "ddp", "transformer", flash_clip_passes=2),
    "ddp sum": lambda case: poisson(case, "ddp", "mlp", "sum"),
    "ddp unused": lambda case: poisson(case, "ddp_unused", "mlp"),
    "ddp noise": lambda case: poisson(case, "ddp", "transformer", noise=1.0, check="off"),
    "dpddp noise": lambda case: poisson(case, "dpddp", "mlp", noise=1.0, check="off"),
    "ddp sampled": lambda case: sampled(case, "ddp", "mlp"),
    "ddp memory manager": lambda case: sampled(case, "ddp", "mlp", 2),
    "ddp accumulated": lambda case: accumulated(case, "ddp", "mlp"),
    "dpddp accumulated": lambda case: accumulated(case, "dpddp", "mlp"),
    "ddp frozen later": lambda case: frozen_later(case, "ddp", "mlp"),
    "dpddp frozen later": lambda case: frozen_later(case, "dpddp", "mlp"),
    "ddp per layer": lambda case: per_layer(case, "ddp", "mlp"),
    "ddp sensitivity": lambda case: sensitivity(case, "ddp", "mlp"),
    **{f"{wrap} float32 {name}": lambda case, w=wrap, n=name: rounded(case, w, n, torch.float32)
       for wrap in ("ddp", "dpddp") for name in ("transformer", "convnet")},
    **{f"{wrap} bfloat16 {name}": lambda case, w=wrap, n=name: rounded(case, w, n, torch.bfloat16)
       for wrap in ("ddp", "dpddp") for name in ("transformer", "convnet")},
    "ddp autocast": lambda case: rounded(case, "ddp", "transformer", torch.float32, autocast=True),
    "ddp refusals": refusals,
    "ddp buffers": buffers,
    "fsdp2 transformer": lambda case: poisson(case, "fsdp2", "transformer"),
    "fsdp2 blocks": lambda case: poisson(case, "fsdp2_blocks", "transformer_rms_norm"),
    "fsdp2 convnet": lambda case: poisson(case, "fsdp2", "convnet"),
    "fsdp2 sums one by one": lambda case: one_by_one(case, "fsdp2_blocks", "transformer"),
    "fsdp2 sum": lambda case: poisson(case, "fsdp2_blocks", "mlp", "sum", check="off"),
    "fsdp2 sampled": lambda case: sampled(case, "fsdp2", "mlp"),
    "fsdp2 accumulated": lambda case: accumulated(case, "fsdp2_blocks", "mlp"),
    "fsdp2 in parts": lambda case: in_parts(case, "fsdp2_blocks", "mlp"),
    "fsdp2 columns": lambda case: poisson(case, "fsdp2_columns", "transformer"),
    "fsdp2 compiled": lambda case: poisson(case, "fsdp2_compiled", "transformer"),
    "fsdp2 frozen later": lambda case: frozen_later(case, "fsdp2", "mlp"),
    "fsdp2_hybrid frozen later": lambda case: frozen_later(case, "fsdp2_hybrid", "mlp"),
    "fsdp2 per layer": lambda case: per_layer(case, "fsdp2", "mlp"),
    "fsdp2 sensitivity": lambda case: sensitivity(case, "fsdp2", "mlp"),
    "fsdp2 tied": lambda case: poisson(case, "fsdp2_blocks", "tied"),
    "fsdp2 recognized": lambda case: poisson(case, "fsdp2", "recognized"),
    "fsdp2 one layer": lambda case: poisson(case, "fsdp2_blocks", "linear"),
    "fsdp2 kept": lambda case: poisson(case, "fsdp2_kept", "transformer"),
    "fsdp2 offload": lambda case: poisson(case, "fsdp2_offload", "transformer"),
    "fsdp2 mixed": lambda case: poisson(case, "fsdp2_mixed", "transformer"),
    "fsdp2 float32": lambda case: rounded(case, "fsdp2", "convnet", torch.float32),
    "fsdp2 bfloat16": lambda case: rounded(case, "fsdp2_bf16", "transformer", torch.float32),
    "fsdp2 noise": lambda case: shard_noise(case, "fsdp2"),
    "fsdp2 unwrapped": lambda case: poisson(case, "fsdp2_blocks", "transformer", wrap_model=False),
    "fsdp2 llama": llama,
    "fsdp2 adapters": lambda case: llama(case, adapted=True),
    "fsdp2 checkpoint": checkpoint,
    "fsdp2 refusals": refusals_fsdp2,
    "fsdp2_hybrid noise": lambda case: shard_noise(case, "fsdp2_hybrid"),
    "fsdp2_hybrid transformer": lambda case: poisson(case, "fsdp2_hybrid", "transformer"),
    **EXACT,
}  # fmt: skip


def run(rank: int, backend: str, world: int, port: int, groups: list[str]) -> None:
    # Before there are other threads: after a fork torch makes its pool of threads anew, which two may not do at once.
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
        torch.backends.cudnn.allow_tf32 = False
    address = f"tcp://127.0.0.1:{port}"
    # Ranks that wait for one another fail, so that the test of it ends.
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=world, timeout=timedelta(minutes=2))
    for case, act in CASES.items():
        if case in groups or case.split()[0] in groups:
            act(case)
    leave_group()
    sys.stdout.flush()
    os._exit(0)  # on a busy machine gloo's threads outlive the group, and crash while Python ends


def main() -> None:
    """Imports once, also what torch imports late, and forks the ranks."""
    warnings.simplefilter("ignore")
    for late in ("torch._dynamo", "transformers.models.llama.modeling_llama"):
        importlib.import_module(late)
    gc.freeze()  # no rank's collection looks through all that was imported
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    _, backend, ranks, *groups = sys.argv
    torch.multiprocessing.start_processes(run, (backend, int(ranks), port, groups), int(ranks), start_method="fork")


if __name__ == "__main__":
    main()
