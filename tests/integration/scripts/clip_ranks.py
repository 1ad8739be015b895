# SPDX-License-Identifier: Apache-2.0
"""flash_clip on several processes, over gloo in float64, against clipping by hand of all ranks' samples in one process.

python clip_ranks.py RANKS GROUP...    runs the groups' cases; each prints the largest difference that it has found.
"""

import contextlib
import copy
import shutil
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.data import DataLoader, TensorDataset

from opacus_memprof.errors import MemprofError
from tests.integration.clipping_by_hand import Batch, by_hand
from tests.integration.flash_clip_models import MODELS as PLAIN_MODELS
from tests.integration.flash_clip_models import Engine, Transformer, criterion


class Tied(Transformer):
    """The head has the embedding's table, and blocks are recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.tokens.weight
        self.norm.weight.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = recompute(block, x, use_reentrant=False)
        logits: torch.Tensor = self.head(self.norm(x)).transpose(1, 2)
        return logits


class ScaledNorm(nn.Module):
    """Of no known type, like the RMSNorm of transformers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


MODELS = {
    **PLAIN_MODELS,
    "tied": (Tied, PLAIN_MODELS["transformer"][1]),
    "recognized": (lambda: Transformer(ScaledNorm), PLAIN_MODELS["transformer"][1]),
    "linear": (lambda: nn.Linear(9, 4), PLAIN_MODELS["mlp"][1]),
}
BOUND, SAMPLES, EXPECTED, LR, MOMENTUM = 0.3, 48, 6, 0.5, 0.9
SIZES = {2: [(3, 2), (0, 4), (1, 0)], 4: [(3, 1, 0, 2), (0, 0, 0, 1), (2, 2, 1, 0)]}


def by_layer(model: nn.Module) -> nn.Module:
    """FSDP2 with every layer for itself, the model with what is left."""
    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            fully_shard(module)
    return fully_shard(model)


def by_block(model: nn.Module, **options: Any) -> nn.Module:
    """FSDP2 of the transformer's blocks, and of the model with what is left."""
    for block in getattr(model, "blocks", []):
        fully_shard(block, **options)
    return fully_shard(model, **options)


def replicated(model: nn.Module) -> nn.Module:
    """FSDP2 on a mesh of two dimensions: two replicas of two shards each."""
    return by_block(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fsdp2": by_layer,
    "fsdp2_blocks": by_block,
    "fsdp2_hybrid": replicated,
    "fsdp2_kept": lambda model: by_block(model, reshard_after_forward=False),
    "fsdp2_mixed": lambda model: by_block(model, mp_policy=MixedPrecisionPolicy(torch.float32, torch.float64)),
    "ddp": DistributedDataParallel,
    "ddp_unused": lambda model: DistributedDataParallel(model, find_unused_parameters=True),
    "dpddp": DifferentiallyPrivateDistributedDataParallel,
}


def build(name: str) -> nn.Module:
    torch.manual_seed(5)
    return MODELS[name][0]().double()


def part(name: str, step: int, rank: int) -> Batch:
    """The samples of a rank in a step."""
    torch.manual_seed(100 * step + rank)
    x, y = MODELS[name][1](max(1, SIZES[dist.get_world_size()][step][rank])).tensors
    size = SIZES[dist.get_world_size()][step][rank]
    return {"x": x[:size], "y": y[:size]}


def together(parts: list[Batch]) -> Batch:
    return {key: torch.cat([each[key] for each in parts]) for key in parts[0]}


def losses(model: nn.Module, batch: Batch) -> torch.Tensor:
    output = model(batch["x"])
    each = nn.functional.cross_entropy(output, batch["y"], reduction="none")
    return each.unsqueeze(-1).flatten(1).mean(1)


class ByHand:
    """One process that trains on all ranks' samples, with clipping by hand."""

    def __init__(self, name: str, noise: float, divisor: float, seed: int = 11) -> None:
        self.model, self.noise, self.divisor = build(name), noise, divisor
        self.generator = torch.Generator().manual_seed(seed)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=MOMENTUM)

    def step(self, batch: Batch) -> None:
        _, total = by_hand(self.model, batch, losses, BOUND)
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                continue
            drawn = torch.normal(0.0, 1.0, parameter.shape, generator=self.generator, dtype=torch.float64)
            parameter.grad = (total[name] + self.noise * BOUND * drawn) / self.divisor
        self.optimizer.step()

    def difference(self, model: nn.Module) -> float:
        """The largest of any parameter on any rank."""
        found = dict(whole(model))
        worst = max(float((p.detach() - found[n]).abs().max()) for n, p in self.model.named_parameters())
        everywhere = torch.tensor(worst, dtype=torch.float64)
        dist.all_reduce(everywhere, dist.ReduceOp.MAX)
        return float(everywhere)


def whole(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        yield name.replace("_module.", "").removeprefix("module."), full(parameter.detach())


def private(wrapped: nn.Module, name: str, batch: int = EXPECTED, **options: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(1)
    data = MODELS[name][1](SAMPLES)
    rank = dist.get_rank()
    arguments = {"noise_multiplier": 0.0, "max_grad_norm": BOUND, "grad_sample_mode": "flash_clip", **options}
    made: tuple[Any, Any, Any] = Engine().make_private(
        module=wrapped,
        optimizer=torch.optim.SGD(wrapped.parameters(), lr=LR, momentum=MOMENTUM),
        data_loader=DataLoader(data, batch_size=batch),
        noise_generator=torch.Generator().manual_seed(11 + rank),
        **arguments,
    )
    return made


def report(case: str, difference: float, tolerance: float = 1e-10) -> None:
    assert difference < tolerance, (case, difference)
    if dist.get_rank() == 0:
        print(f"{case} {difference:.1e}", flush=True)


# --- cases: each compares parameters after three steps ---
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
        loss(model(batch["x"]), batch["y"]).backward()
        optimizer.step()
        hand.step(together([part(name, step, rank) for rank in ranks]))
    report(case, hand.difference(model), 1e-5 if "mixed" in wrap else 1e-10)


def sampled(case: str, wrap: str, name: str, physical: int | None = None) -> None:
    """The batches of the loader that make_private returns; split, in different numbers of parts on the ranks."""
    expected = 2 * dist.get_world_size()
    hand = ByHand(name, 0.0, expected)
    model, optimizer, loader = private(WRAPPERS[wrap](build(name)), name, expected)
    logical: Batch | None = None
    sizes, parts = [], 0
    torch.manual_seed(22 + dist.get_rank())
    with contextlib.ExitStack() as stack:
        if physical is not None:
            manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer)
            loader = stack.enter_context(manager)
        for x, y in loader:
            criterion("mean")(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            logical = together([*([] if logical is None else [logical]), {"x": x, "y": y}])
            parts += 1
            if optimizer._is_last_step_skipped:
                continue
            everyones: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyones, logical)
            hand.step(together(everyones))
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
            quiet = wrapped.no_sync() if step == first and hasattr(wrapped, "no_sync") else contextlib.nullcontext()
            with quiet:
                criterion("mean")(model(batch["x"]), batch["y"]).backward()
        optimizer.step()
        ranks = range(dist.get_world_size())
        hand.step(together([part(name, step, rank) for step in (first, first + 1) for rank in ranks]))
    report(case, hand.difference(model))


def per_layer(case: str, wrap: str, name: str) -> None:
    """A bound for each parameter: against hooks mode, in one process."""
    bounds = [0.05 * (i + 1) for i, _ in enumerate(build(name).parameters())]
    model, optimizer, _ = private(WRAPPERS[wrap](build(name)), name, clipping="per_layer", max_grad_norm=bounds)
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
        model, optimizer, _ = private(WRAPPERS[wrap](build(name)), name, loss_reduction="sum")
        criterion("sum")(model(batch["x"][keep]), batch["y"][keep]).backward()
        optimizer.step()
        found.append(torch.cat([full(p.grad).flatten() for p in model.parameters()]))
    changes = [float((other - found[0]).norm()) for other in found[1:]]
    assert all(change <= BOUND * (1 + 1e-9) for change in changes), changes
    report(case, abs(max(changes) / BOUND - 1) * 1e-6)


def full(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


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
    report(case, 0.0)


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
    refused("FSDP1", lambda: private(FullyShardedDataParallel(build("mlp"), device_id=torch.device("cpu")), "mlp"))
    part_only = build("mlp")
    fully_shard(part_only[0])
    refused("parts of the model are sharded", lambda: private(part_only, "mlp"))
    ignoring = build("mlp")
    refused(
        "leave it out of ignored_params",
        lambda: private(fully_shard(ignoring, ignored_params={ignoring[0].bias}), "mlp"),
    )
    trained = Mixed().double()
    trained.scale.requires_grad_(True)
    refused("need its forward repeated", lambda: private(by_block(trained), "mlp"))
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    parallel = parallelize_module(build("mlp"), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    refused("as in tensor or context parallelism", lambda: private(parallel, "mlp"))
    refused("as in tensor or context parallelism", lambda: private(parallel, "mlp", grad_sample_mode="auto"))
    if world == 4:
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
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
    assert all(torch.equal(full(p), q) for p, q in zip(model.parameters(), before, strict=True))

    model, optimizer, _ = private(by_block(Mixed().double()), "mlp")
    shift = {"shift": torch.ones(3, 4, dtype=torch.float64)} if rank == 0 else {}
    refused("different kinds of arguments", lambda: backward(model, **shift))

    sequence = part("transformer", 0, 0)["x"][:, :4]
    model, _, _ = private(by_block(build("transformer")), "transformer")
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    with context_parallel(mesh, buffers=[sequence], buffer_seq_dims=[1]):
        refused("context parallelism", lambda: model(sequence))
    report(case, 0.0)


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

    wrapped = DistributedDataParallel(Counter().double())
    model, optimizer, _ = private(wrapped, "mlp")
    batch = part("mlp", 0, 0)
    criterion("mean")(model(batch["x"]), batch["y"]).backward()
    optimizer.step()
    assert float(wrapped.module.seen) == 1
    optimizer.zero_grad()
    model.cleanup()
    (wrapped(batch["x"]).sum() * (1 + dist.get_rank())).backward()
    gradients: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gradients, wrapped.module.linear.bias.grad)
    assert all(torch.equal(each, gradients[0]) for each in gradients)  # DDP has averaged them again
    report(case, 0.0)


def shard_noise(case: str, wrap: str) -> None:
    """Noise alone: as strong as in one process, drawn at each shard's shape, and not alike in two shards although all
    ranks give the same generator; replicas have the same."""
    torch.manual_seed(5)
    wrapped = WRAPPERS[wrap](nn.Sequential(nn.Linear(300, 301), nn.Linear(301, 4)).double())
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(3)
    with mock.patch.object(torch, "normal", side_effect=torch.normal) as normal:
        data = TensorDataset(torch.zeros(SAMPLES, 300, dtype=torch.float64), torch.zeros(SAMPLES))
        model, optimizer, _ = Engine().make_private(
            module=wrapped,
            optimizer=torch.optim.SGD(wrapped.parameters(), lr=1.0),
            data_loader=DataLoader(data, batch_size=EXPECTED),
            noise_multiplier=2.0,
            max_grad_norm=BOUND,
            noise_generator=generator,
            grad_sample_mode="flash_clip",
        )
        (model(torch.ones(2, 300, dtype=torch.float64)) * 0).sum().backward()
        optimizer.step()
    drawn = [tuple(call.kwargs["size"]) for call in normal.call_args_list]
    shapes = [tuple(p.to_local().shape) for p in model.parameters()]
    replica = dist.get_rank() // 2 if wrap == "fsdp2_hybrid" else 0
    assert drawn == ([] if replica else shapes), (drawn, shapes)
    gradient = full(next(model.parameters()).grad)
    std = 2.0 * BOUND / EXPECTED
    assert abs(float(gradient.std()) / std - 1) < 0.02  # of 90 300 numbers: 8 standard errors
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, gradient)
    assert all(torch.equal(each, gradient) for each in everyones)
    shards = gradient.chunk(2 if wrap == "fsdp2_hybrid" else dist.get_world_size())
    rows = len(shards[-1])
    correlation = float((shards[0][:rows] * shards[-1]).mean()) / std**2
    assert abs(correlation) < 5 / (rows * 300) ** 0.5, correlation
    report(case, 0.0)


def llama(case: str) -> None:
    """A model of transformers, block by block."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=31, num_hidden_layers=2, **sizes)).double().train()
    alone = copy.deepcopy(model)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    rank, world = dist.get_rank(), dist.get_world_size()
    ids = torch.randint(0, 31, (2 * world, 7))

    def of_samples(model: nn.Module, batch: Batch) -> torch.Tensor:
        logits = model(input_ids=batch["x"], use_cache=False).logits
        return nn.functional.cross_entropy(logits.mT, batch["x"], reduction="none").mean(1)

    module, optimizer, _ = private(model, "mlp", loss_reduction="sum")
    of_samples(module, {"x": ids[2 * rank : 2 * rank + 2]}).sum().backward()
    optimizer.step()
    _, expected = by_hand(alone, {"x": ids}, of_samples, BOUND)
    report(case, max(float((full(p.grad) - expected[n]).abs().max()) for n, p in model.named_parameters()))


def checkpoint(case: str) -> None:
    """Training that is saved, and loaded into a new model and optimizer, goes on as if nothing had been."""
    directory = [tempfile.mkdtemp()]
    dist.broadcast_object_list(directory, 0)

    def step(model: Any, optimizer: Any, number: int) -> None:
        batch = part("transformer", number, dist.get_rank())
        optimizer.zero_grad()
        criterion("mean")(model(batch["x"]), batch["y"]).backward()
        optimizer.step()

    def state(wrapped: nn.Module, optimizer: Any) -> dict[str, Any]:
        model, states = get_state_dict(wrapped, optimizer.original_optimizer)
        return {"model": model, "optimizer": states}

    hand = ByHand("transformer", 0.0, EXPECTED)
    wrapped = by_block(build("transformer"))
    model, optimizer, _ = private(wrapped, "transformer")
    for number in (0, 1):
        step(model, optimizer, number)
    torch.distributed.checkpoint.save(state(wrapped, optimizer), checkpoint_id=directory[0])
    again = build("transformer")
    nn.init.zeros_(again.head.weight)
    again = by_layer(again)  # sharded in another way
    other, resumed, _ = private(again, "transformer")
    loaded = state(again, resumed)
    torch.distributed.checkpoint.load(loaded, checkpoint_id=directory[0])
    set_state_dict(
        again,
        resumed.original_optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )
    step(other, resumed, 2)
    for number in range(3):
        hand.step(together([part("transformer", number, rank) for rank in range(dist.get_world_size())]))
    report(case, hand.difference(other))
    if dist.get_rank() == 0:
        shutil.rmtree(directory[0])


CASES: dict[str, Callable[[str], None]] = {
    **{f"{wrap} poisson {name}": lambda case, w=wrap, n=name: poisson(case, w, n)
       for wrap in ("ddp", "dpddp") for name in ("transformer", "convnet")},
    "ddp two passes": lambda case: poisson(case, "ddp", "transformer", flash_clip_passes=2),
    "ddp sum": lambda case: poisson(case, "ddp", "mlp", "sum"),
    "ddp unused": lambda case: poisson(case, "ddp_unused", "mlp"),
    "ddp noise": lambda case: poisson(case, "ddp", "transformer", noise=1.0),
    "dpddp noise": lambda case: poisson(case, "dpddp", "mlp", noise=1.0),
    "ddp sampled": lambda case: sampled(case, "ddp", "mlp"),
    "ddp memory manager": lambda case: sampled(case, "ddp", "mlp", 2),
    "ddp accumulated": lambda case: accumulated(case, "ddp", "mlp"),
    "dpddp accumulated": lambda case: accumulated(case, "dpddp", "mlp"),
    "ddp per layer": lambda case: per_layer(case, "ddp", "mlp"),
    "ddp sensitivity": lambda case: sensitivity(case, "ddp", "mlp"),
    "ddp refusals": refusals,
    "ddp buffers": buffers,
    "fsdp2 transformer": lambda case: poisson(case, "fsdp2", "transformer"),
    "fsdp2 blocks": lambda case: poisson(case, "fsdp2_blocks", "transformer_rms_norm"),
    "fsdp2 convnet": lambda case: poisson(case, "fsdp2", "convnet"),
    "fsdp2 sum": lambda case: poisson(case, "fsdp2_blocks", "mlp", "sum"),
    "fsdp2 sampled": lambda case: sampled(case, "fsdp2", "mlp"),
    "fsdp2 accumulated": lambda case: accumulated(case, "fsdp2_blocks", "mlp"),
    "fsdp2 per layer": lambda case: per_layer(case, "fsdp2", "mlp"),
    "fsdp2 sensitivity": lambda case: sensitivity(case, "fsdp2", "mlp"),
    "fsdp2 tied": lambda case: poisson(case, "fsdp2_blocks", "tied"),
    "fsdp2 recognized": lambda case: poisson(case, "fsdp2", "recognized"),
    "fsdp2 one layer": lambda case: poisson(case, "fsdp2_blocks", "linear"),
    "fsdp2 kept": lambda case: poisson(case, "fsdp2_kept", "transformer"),
    "fsdp2 mixed": lambda case: poisson(case, "fsdp2_mixed", "transformer"),
    "fsdp2 noise": lambda case: shard_noise(case, "fsdp2"),
    "fsdp2 unwrapped": lambda case: poisson(case, "fsdp2_blocks", "transformer", wrap_model=False),
    "fsdp2 llama": llama,
    "fsdp2 checkpoint": checkpoint,
    "fsdp2 refusals": refusals_fsdp2,
    "fsdp2_hybrid noise": lambda case: shard_noise(case, "fsdp2_hybrid"),
    "fsdp2_hybrid transformer": lambda case: poisson(case, "fsdp2_hybrid", "transformer"),
}  # fmt: skip


def run(rank: int, world: int, port: int, groups: list[str]) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    for case, act in CASES.items():
        if case.split()[0] in groups:
            act(case)
    dist.destroy_process_group()


def main() -> None:
    """Imports once, and forks the ranks."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(
        run, (int(sys.argv[1]), port, sys.argv[2:]), int(sys.argv[1]), start_method="fork"
    )


if __name__ == "__main__":
    main()
