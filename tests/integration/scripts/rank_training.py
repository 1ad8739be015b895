# SPDX-License-Identifier: Apache-2.0
"""What the cases of clip_ranks.py train.

Has the models, the ways to spread them over ranks, each rank's batches, and one process that clips all by hand.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.data import DataLoader

from tests.integration.clipping_by_hand import Batch, by_hand
from tests.integration.flash_clip_models import MODELS as PLAIN_MODELS
from tests.integration.flash_clip_models import Engine, Transformer


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
    return by_block(model, mesh=init_device_mesh(device().type, (2, 2), mesh_dim_names=("replicate", "shard")))


def by_columns(model: nn.Module) -> nn.Module:
    """FSDP2 with shards that are columns, of matrices that have as many on every rank."""
    return by_block(model, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 and p.shape[1] % 4 == 0 else None)


def compiled(model: nn.Module) -> nn.Module:
    """FSDP2 of blocks that torch.compile runs."""
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend="aot_eager")
    return by_block(model)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fsdp2": by_layer,
    "fsdp2_blocks": by_block,
    "fsdp2_columns": by_columns,
    "fsdp2_compiled": compiled,
    "fsdp2_hybrid": replicated,
    "fsdp2_kept": lambda model: by_block(model, reshard_after_forward=False),
    "fsdp2_mixed": lambda model: by_block(model, mp_policy=MixedPrecisionPolicy(torch.float32, torch.float64)),
    "fsdp2_offload": lambda model: by_block(model.cpu(), offload_policy=CPUOffloadPolicy(device().type == "cuda")),
    "fsdp2_bf16": lambda model: by_block(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    "ddp": DistributedDataParallel,
    "ddp_unused": lambda model: DistributedDataParallel(model, find_unused_parameters=True),
    "dpddp": DifferentiallyPrivateDistributedDataParallel,
}


def device() -> torch.device:
    """Where this rank computes: NCCL's on a GPU of its own."""
    return torch.device("cuda", dist.get_rank()) if dist.get_backend() == "nccl" else torch.device("cpu")


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(5)
    return MODELS[name][0]().to(device(), dtype)


def part(name: str, step: int, rank: int, dtype: torch.dtype = torch.float64) -> Batch:
    """The samples of a rank in a step."""
    torch.manual_seed(100 * step + rank)
    x, y = MODELS[name][1](max(1, SIZES[dist.get_world_size()][step][rank])).tensors
    size = SIZES[dist.get_world_size()][step][rank]
    return {"x": x[:size].to(device(), dtype if x.is_floating_point() else None), "y": y[:size].to(device())}


def together(parts: list[Batch]) -> Batch:
    return {key: torch.cat([each[key] for each in parts]) for key in parts[0]}


def losses(model: nn.Module, batch: Batch) -> torch.Tensor:
    output = model(batch["x"])
    each = nn.functional.cross_entropy(output, batch["y"], reduction="none")
    return each.unsqueeze(-1).flatten(1).mean(1)


class ByHand:
    """One process that trains on all ranks' samples in float64, with clipping by hand.

    Its parameters begin as those of ``dtype``.
    """

    def __init__(self, name: str, noise: float, divisor: float, dtype: torch.dtype = torch.float64) -> None:
        self.model, self.noise, self.divisor = build(name, dtype).double(), noise, divisor
        self.generator = torch.Generator(device()).manual_seed(11)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=MOMENTUM)

    def step(self, batch: Batch) -> None:
        _, total = by_hand(self.model, batch, losses, BOUND)
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                continue
            drawn = torch.normal(
                0.0, 1.0, parameter.shape, generator=self.generator, dtype=torch.float64, device=parameter.device
            )
            parameter.grad = (total[name] + self.noise * BOUND * drawn) / self.divisor
        self.optimizer.step()

    def difference(self, model: nn.Module) -> float:
        """The largest of any parameter on any rank."""
        found = dict(whole(model))
        return everywhere(max(float((p.detach() - found[n]).abs().max()) for n, p in self.model.named_parameters()))

    def relative_difference(self, model: nn.Module) -> float:
        """The norm of all gradients' differences, relative to that of the gradients; the largest of any rank."""
        found = {n: full(p.grad) for n, p in named(model)}
        off = [(p.grad - found[n]).norm() for n, p in self.model.named_parameters()]
        return everywhere(
            float(torch.stack(off).norm() / torch.stack([p.grad.norm() for p in self.model.parameters()]).norm())
        )

    def follow(self, model: nn.Module) -> None:
        """Goes on from the ranks' parameters."""
        self.model.load_state_dict(dict(whole(model)))


def everywhere(number: float) -> float:
    """The largest of the ranks' numbers."""
    largest = torch.tensor(number, dtype=torch.float64, device=device())
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in model.named_parameters():
        yield name.replace("_module.", "").removeprefix("module."), parameter


def whole(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in named(model):
        yield name, full(parameter.detach())


def private(wrapped: nn.Module, name: str, batch: int = EXPECTED, **options: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(1)
    data = MODELS[name][1](SAMPLES)
    rank = dist.get_rank()
    arguments = {"noise_multiplier": 0.0, "max_grad_norm": BOUND, "grad_sample_mode": "flash_clip", **options}
    made: tuple[Any, Any, Any] = Engine().make_private(
        module=wrapped,
        optimizer=torch.optim.SGD(wrapped.parameters(), lr=LR, momentum=MOMENTUM),
        data_loader=DataLoader(data, batch_size=batch),
        noise_generator=torch.Generator(device()).manual_seed(11 + rank),
        **arguments,
    )
    return made


def report(case: str, difference: float, tolerance: float = 1e-10) -> None:
    assert difference < tolerance, (case, difference)
    if dist.get_rank() == 0:
        print(f"{case} {difference:.1e}", flush=True)


def full(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to(device()).full_tensor() if hasattr(gradient, "full_tensor") else gradient
