# SPDX-License-Identifier: Apache-2.0
"""Random numbers in the forward, and checkpoints, around layers and inside of modules that are repeated."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torchvision.ops import StochasticDepth

from tests.exactness.judge import Batch
from tests.exactness.program import Graph, Program, of_shape, per_sample

Body = Callable[["Block", torch.Tensor], torch.Tensor]


class Block(nn.Module):
    """A module with a parameter of its own, which is therefore repeated for each sample, around a layer."""

    def __init__(self, body: Body, **members: Any) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((6,), 0.7))
        self.lin = nn.Linear(6, 6)
        self.body = body
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(self, x)


def _blocks(body: Body, **members: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        made = [Block(body, **{name: make() for name, make in members.items()}) for _ in range(2)]
        return nn.Sequential(nn.Linear(6, 6), *made, nn.Linear(6, 3))

    return build


def _shared_blocks(body: Body, **members: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """One block, twice."""

    def build() -> nn.Module:
        block = Block(body, **{name: make() for name, make in members.items()})
        return nn.Sequential(nn.Linear(6, 6), block, block, nn.Linear(6, 3))

    return build


def _scaled(m: Block, x: torch.Tensor) -> torch.Tensor:
    return m.gamma * torch.tanh(m.lin(x))


def _dropped(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.drop(m.gamma * torch.tanh(m.lin(x)))


def _dropped_before(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.gamma * torch.tanh(m.lin(m.drop(x)))


def _python_skips(share: float) -> Body:
    return lambda m, x: torch.zeros_like(x) if random.random() < share else _scaled(m, x)


def _numpy_skips(share: float) -> Body:
    return lambda m, x: torch.zeros_like(x) if np.random.rand() < share else _scaled(m, x)


def _torch_skips(share: float) -> Body:
    return lambda m, x: torch.zeros_like(x) if float(torch.rand(())) < share else _scaled(m, x)


def _python_scales(m: Block, x: torch.Tensor) -> torch.Tensor:
    return random.uniform(0.5, 2.0) * _scaled(m, x)


def _numpy_mask(m: Block, x: torch.Tensor) -> torch.Tensor:
    mask = torch.from_numpy(np.random.rand(len(x)) < 0.8).to(x.dtype)
    return _scaled(m, x) * mask.view(-1, *[1] * (x.dim() - 1))


def _noisy(m: Block, x: torch.Tensor) -> torch.Tensor:
    return _scaled(m, x + 0.1 * torch.randn_like(x))


def _gumbel(m: Block, x: torch.Tensor) -> torch.Tensor:
    return x * functional.gumbel_softmax(_scaled(m, x), dim=-1)


def _permuted(m: Block, x: torch.Tensor) -> torch.Tensor:
    """Features, not samples."""
    return _scaled(m, x[..., torch.randperm(x.shape[-1])])


def _shuffled(m: Block, x: torch.Tensor) -> torch.Tensor:
    """Samples, as in mixup."""
    return _scaled(m, 0.7 * x + 0.3 * x[torch.randperm(len(x))])


def _checkpointed(reentrant: bool, body: Body) -> Body:
    return lambda m, x: checkpoint(partial(body, m), x, use_reentrant=reentrant)


def _outside(reentrant: bool, of_block: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.first(x)
        for block in m.blocks:
            h = checkpoint(block, h, use_reentrant=reentrant)
        return m.last(h)

    return lambda: Graph(
        forward, first=nn.Linear(6, 6), blocks=nn.ModuleList(of_block() for _ in range(2)), last=nn.Linear(6, 3)
    )


def _around_the_model(reentrant: bool, share: float) -> Callable[[Any, Batch], torch.Tensor]:
    """Outputs from a checkpoint of the private model, of which each sample gets a share of the batch's mean."""

    def losses(model: Any, batch: Batch) -> torch.Tensor:
        h = checkpoint(model, batch["x"].clone().requires_grad_(), use_reentrant=reentrant)
        return per_sample(h + share * h.mean(0), batch)

    return losses


def _mlp() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 6))


def _by_batch(share: float) -> Callable[[], nn.Module]:
    return lambda: StochasticDepth(share, "batch")


def _by_row(share: float) -> Callable[[], nn.Module]:
    return lambda: StochasticDepth(share, "row")


_RANDOM = {"is_random": True}
_SEEDS = (0, 1, 2)
_STEPS = of_shape(5, 4, 6, count=6)
_DRAWS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "depth_row_0.05": (_blocks(_dropped, drop=_by_row(0.05)), "exact"),
    "depth_row_0.1": (_blocks(_dropped, drop=_by_row(0.1)), "exact"),
    "depth_row_0.5": (_blocks(_dropped, drop=_by_row(0.5)), "exact"),
    "depth_batch_0.1": (_blocks(_dropped, drop=_by_batch(0.1)), "exact"),
    "depth_batch_0.5": (_blocks(_dropped, drop=_by_batch(0.5)), "exact"),
    "dropout_0.01": (_blocks(_dropped, drop=lambda: nn.Dropout(0.01)), "exact"),
    "dropout_0.5": (_blocks(_dropped, drop=lambda: nn.Dropout(0.5)), "exact"),
    "dropout_before": (_blocks(_dropped_before, drop=lambda: nn.Dropout(0.02)), "exact"),
    "dropout_in_shared": (_shared_blocks(_dropped, drop=lambda: nn.Dropout(0.1)), "exact"),
    "python_skips_0.05": (_blocks(_python_skips(0.05)), "either"),
    "python_skips_0.5": (_blocks(_python_skips(0.5)), "either"),
    "numpy_skips_0.05": (_blocks(_numpy_skips(0.05)), "either"),
    "torch_skips_0.05": (_blocks(_torch_skips(0.05)), "either"),
    "torch_skips_0.5": (_blocks(_torch_skips(0.5)), "either"),
    "python_scales": (_blocks(_python_scales), "either"),
    "numpy_mask": (_blocks(_numpy_mask), "either"),
    "noise": (_blocks(_noisy), "exact"),
    "gumbel": (_blocks(_gumbel), "exact"),
    "permuted_features": (_blocks(_permuted), "either"),
}
# The same as another draw, with another probability or by another generator.
_NIGHTLY = ("depth_row_0.1", "depth_row_0.5", "depth_batch_0.5", "dropout_before", "python_scales")
_NIGHTLY += ("python_skips_0.5", "torch_skips_0.5", "torch_skips_0.05", "numpy_skips_0.05", "numpy_mask", "noise")


def _plain_dropout() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 6), StochasticDepth(0.3, "row"), nn.Linear(6, 3)
    )


def _by_size(draw: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], nn.Module]:
    """What is drawn hides that the output depends on the number of samples."""
    return lambda: Graph(lambda m, x: m.last(draw(m.first(x))), first=nn.Linear(6, 6), last=nn.Linear(6, 3))


def _by_chance(h: torch.Tensor, drawn: Any) -> torch.Tensor:
    """Mixes the samples if the number is 1. The operations are the same if it is 0."""
    return h - float(drawn) * h.mean(0)


def _seeded_by_size(h: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(len(h))
    return functional.dropout(h)


def _left_out(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Leaves out whole blocks, as LayerDrop does; dropout before that draws as many numbers as there are samples."""
    h = m.first(x)
    for block in m.blocks:
        if float(torch.rand([])) >= 0.4:
            h = h + functional.dropout(checkpoint(block, h, use_reentrant=m.reentrant), 0.2)
    return m.last(h)


def _left_out_decoder(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Leaves out what alone uses the encoder's output."""
    h = m.encoder(x)
    return m.last(x + m.decoder(h) if float(torch.rand([])) < 0.5 else x)


def _with_layer_drop(reentrant: bool) -> Callable[[], nn.Module]:
    return lambda: Graph(
        _left_out,
        first=nn.Linear(6, 6),
        blocks=nn.ModuleList(_mlp() for _ in range(2)),
        last=nn.Linear(6, 3),
        reentrant=reentrant,
    )


def _encoder_and_decoder() -> nn.Module:
    return Graph(_left_out_decoder, encoder=nn.Linear(6, 4), decoder=nn.Linear(4, 6), last=nn.Linear(6, 3))


PROGRAMS = [
    *(
        Program(
            f"chance_layers_left_out_{name}",
            build,
            of_shape(5, 6, count=3),
            "exact",
            settings=_RANDOM,
            seeds=(2, 3),
            nightly=name == "not_reentrant",  # checkpoint_around_not_reentrant has such checkpoints
        )
        for name, build in (
            ("reentrant", _with_layer_drop(True)),
            ("not_reentrant", _with_layer_drop(False)),
            ("with_their_inputs", _encoder_and_decoder),
        )
    ),
    *(
        Program(f"chance_by_size_{name}", _by_size(draw), of_shape(5, 6, count=2), allowed, settings=_RANDOM)
        for name, draw, allowed in (
            ("dropout", lambda h: functional.dropout(h) / len(h), "refused"),
            ("uniform", lambda h: h * torch.rand(6, dtype=h.dtype) / len(h), "refused"),
            ("normal", lambda h: h * torch.randn(len(h), 1, dtype=h.dtype) / len(h), "refused"),
            ("seed", _seeded_by_size, "refused"),
            ("python", lambda h: h * random.uniform(0.5, 2) / len(h), "refused"),
            ("numpy", lambda h: h * torch.from_numpy(np.random.rand(len(h), 1)) / len(h), "refused"),
            ("not_numpy", lambda h: h * torch.from_numpy(np.random.rand(h.shape[1], len(h))).T, "exact"),
            ("not_until_small", lambda h: h * next(v for v in iter(random.random, None) if v < 0.3), "exact"),
            ("not", lambda h: functional.dropout(h) * torch.rand(len(h), 1, dtype=h.dtype), "exact"),
            ("not_gumbel", lambda h: functional.gumbel_softmax(h), "exact"),
        )
    ),
    *(
        Program(f"chance_mixes_{name}", _by_size(draw), of_shape(5, 6), "refused", settings=_RANDOM)
        for name, draw in (
            ("seldom", lambda h: h - (torch.rand(()) < 0.001) * h.mean(0)),
            ("mostly_not", lambda h: h - (torch.randn(()) > 3) * h.mean(0)),
            ("python", lambda h: _by_chance(h, random.random() > 0.999)),
            ("numpy", lambda h: _by_chance(h, np.random.uniform() < 0.001)),
        )
    ),
    *(
        Program(f"chance_{name}", build, _STEPS, allowed, settings=_RANDOM, seeds=_SEEDS, nightly=name in _NIGHTLY)
        for name, (build, allowed) in _DRAWS.items()
    ),
    Program("chance_shuffled_samples", _blocks(_shuffled), _STEPS, "refused", settings=_RANDOM),
    *(
        Program(
            f"chance_{name}_scales_output",
            lambda draw=draw: Graph(
                lambda m, x: m.last(torch.tanh(m.first(x))) * draw(0.5, 2.0),
                first=nn.Linear(6, 6),
                last=nn.Linear(6, 3),
            ),
            of_shape(5, 6, count=3),
            "exact",
            settings=_RANDOM,
        )
        for name, draw in (("python", random.uniform), ("numpy", np.random.uniform))
    ),
    Program("chance_plain_dropout", _plain_dropout, _STEPS, "exact", settings=_RANDOM),
    Program("chance_plain_dropout_two_passes", _plain_dropout, _STEPS, "exact", settings={**_RANDOM, "passes": 2}),
    Program(
        "chance_lstm_dropout",
        lambda: Graph(
            lambda m, x: m.last(m.cell(x)[0]),
            cell=nn.LSTM(6, 6, num_layers=2, dropout=0.3, batch_first=True),
            last=nn.Linear(6, 3),
        ),
        of_shape(5, 4, 6, count=3),
        "exact",
        settings=_RANDOM,
    ),
    Program(
        "chance_attention_dropout",
        lambda: Graph(
            lambda m, x: m.last(m.attend(x, x, x, need_weights=False)[0]),
            attend=nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=True),
            last=nn.Linear(6, 3),
        ),
        of_shape(5, 4, 6, count=3),
        "exact",
        settings=_RANDOM,
    ),
    *(
        Program(
            f"checkpoint_inside_{'reentrant' if reentrant else 'not_reentrant'}_{name}",
            _blocks(_checkpointed(reentrant, body), **members),
            of_shape(5, 4, 6, count=3),
            "exact",
            settings=_RANDOM,
        )
        for reentrant in (True, False)
        for name, body, members in (
            ("plain", _scaled, {}),
            ("dropout", _dropped, {"drop": lambda: nn.Dropout(0.2)}),
        )
    ),
    *(
        Program(
            f"checkpoint_around_{'reentrant' if reentrant else 'not_reentrant'}_{name}",
            _outside(reentrant, of_block),
            of_shape(5, 4, 6, count=3),
            "exact",
            settings={**_RANDOM, "passes": passes},
        )
        for reentrant in (True, False)
        for name, of_block, passes in (
            ("layers", _mlp, 1),
            ("repeated", lambda: Block(_scaled), 1),
            ("random_repeated", lambda: Block(_dropped, drop=nn.Dropout(0.2)), 1),
        )
    ),
    *(
        Program(
            f"checkpoint_around_the_model_{name}_{'reentrant' if reentrant else 'not_reentrant'}",
            lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)),
            of_shape(5, 6, count=3),
            allowed,
            _around_the_model(reentrant, share),
        )
        for reentrant in (True, False)
        for name, share, allowed in (("clean", 0.0, "exact"), ("mixing", 0.1, "refused"))
    ),
    Program("checkpoint_around_two_passes", _outside(False, _mlp), _STEPS, "either", settings={**_RANDOM, "passes": 2}),
]
