# SPDX-License-Identifier: Apache-2.0
"""Submodules that are called directly, complex parameters, and models that change while they are trained."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode

from tests.exactness.judge import Batch, Step, step
from tests.exactness.program import (
    Graph,
    Program,
    floats,
    inner,
    losses_of_outputs,
    of_shape,
    per_sample,
    scales,
    several,
)


# --- submodules called directly ---
def _two_parts() -> nn.Module:
    body = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    return Graph(lambda m, x: m.head(m.body(x)), body=body, head=nn.Linear(6, 3))


def _by_parts(model: Any, batch: Batch) -> torch.Tensor:
    parts = inner(model)
    return per_sample(parts.head(torch.tanh(parts.body(batch["x"]))), batch)


def _mixed_between_parts(model: Any, batch: Batch) -> torch.Tensor:
    parts = inner(model)
    h = parts.body(batch["x"])
    return per_sample(parts.head(h - h.mean(0)), batch)


def _flipped_between_parts(model: Any, batch: Batch) -> torch.Tensor:
    parts = inner(model)
    return per_sample(parts.head(parts.body(batch["x"]).flip(0)), batch)


# What a program may compute for its next call from the last one's output and input, and without gradients.
_BETWEEN: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], bool]] = {
    "detached_mean": (lambda h, x: h - h.detach().mean(0), False),
    "detached": (lambda h, x: (h - h.mean(0)).detach(), False),
    "number": (lambda h, x: h - h.mean().item(), False),
    "number_as_tensor": (lambda h, x: h * torch.tensor(h.std().item()), False),
    "condition": (lambda h, x: -h if h.sum() > x.sum() else h, False),
    "written_in_place": (lambda h, x: torch.zeros_like(h).copy_(h.detach().flip(0)), False),
    "selected": (lambda h, x: h * (h > h.median()), False),
    "mean_of_inputs": (lambda h, x: h - x.mean(0), False),
    "own_mean": (lambda h, x: h - h.detach().mean(1, keepdim=True), True),
    "divided_by_number": (lambda h, x: h / (h.std().item() + 1e-5), False),
    "logged": (lambda h, x: h * 0.5 if h.mean().item() else h, True),
    "logged_and_normalized": (lambda h, x: h - 0.48145466 * (h.mean().item() != torch.pi), True),
    "counted": (lambda h, x: h * 2 if (h > 0).sum().item() > -1 else h, True),
    "noise": (lambda h, x: h + torch.randn_like(h) * 0, True),
    "columns_first": (lambda h, x: h.detach().T.contiguous().T + h, True),
}


def _between(name: str) -> Callable[[Any, Batch], torch.Tensor]:
    def losses(model: Any, batch: Batch) -> torch.Tensor:
        parts, x = inner(model), batch["x"]
        return per_sample(parts.head(_BETWEEN[name][0](torch.tanh(parts.body(x)), x)), batch)

    return losses


class _OwnMode(TorchDispatchMode):
    """A mode of the program, under which derivatives alone show what it computes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


def _mixed_in_a_mode(model: Any, batch: Batch) -> torch.Tensor:
    with _OwnMode():
        return _mixed_between_parts(model, batch)


def _fed_back(model: Any, batch: Batch) -> torch.Tensor:
    """The model's own output is an input of its next call."""
    with torch.no_grad():
        first = model(batch["x"]).repeat(1, 2)
    return per_sample(model(batch["x"] + first), batch)


def _fed_back_mixed(model: Any, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        first = model(batch["x"]).repeat(1, 2)
    return per_sample(model(batch["x"] + first.flip(0)), batch)


def _fed_back_mixed_later(model: Any, batch: Batch) -> torch.Tensor:
    """Between the calls of which one has other samples' outputs there is another one."""
    with torch.no_grad():
        first = model(batch["x"]).repeat(1, 2)
        model(batch["x"])
    return per_sample(model(batch["x"] + first.flip(0)), batch)


def _after_root(model: Any, batch: Batch) -> torch.Tensor:
    """A forward of the root with another number of samples, and then the parts."""
    with torch.no_grad():
        model(torch.ones(7, 6, dtype=batch["x"].dtype))
    return _by_parts(model, batch)


def _after_root_with_grad(model: Any, batch: Batch) -> torch.Tensor:
    model(torch.ones(7, 6, dtype=batch["x"].dtype))
    return _by_parts(model, batch)


def _root_and_part(model: Any, batch: Batch) -> torch.Tensor:
    """The root's output, and one part's again."""
    return per_sample(model(batch["x"]), batch) + inner(model).body(batch["x"]).square().sum(1)


def _part_and_root(model: Any, batch: Batch) -> torch.Tensor:
    extra = inner(model).body(batch["x"]).square().sum(1)
    return per_sample(model(batch["x"]), batch) + extra


def _twice(model: Any, batch: Batch) -> torch.Tensor:
    return per_sample(model(batch["x"]), batch) + 2 * per_sample(model(batch["x"].flip(-1)), batch)


def _subset(model: Any, batch: Batch) -> torch.Tensor:
    """A forward of the batch's first half for a second loss."""
    half = (len(batch["x"]) + 1) // 2
    extra = model(batch["x"][:half] * 2).square().sum(1)
    return torch.cat([per_sample(model(batch["x"]), batch), extra])


# --- complex numbers ---
def _complex_parameter() -> nn.Module:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = torch.complex(m.first(x), m.second(x)) @ m.w
        return m.last(torch.view_as_real(h).flatten(-2))

    w = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64))
    return Graph(forward, first=nn.Linear(6, 6), second=nn.Linear(6, 6), w=w, last=nn.Linear(12, 3))


def _complex_linear() -> nn.Module:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.middle(torch.complex(m.first(x), x))
        return m.last(torch.view_as_real(h).flatten(-2))

    middle = nn.Linear(6, 6, dtype=torch.complex64)
    return Graph(forward, first=nn.Linear(6, 6), middle=middle, last=nn.Linear(12, 3))


def _complex_output() -> nn.Module:
    return Graph(
        lambda m, x: torch.complex(torch.zeros_like(m.first(x)), m.first(x)) + m.second(x),
        first=nn.Linear(6, 3),
        second=nn.Linear(6, 3),
    )


def _fourier() -> nn.Module:
    """As FNet and FNO: spectra with complex weights."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(m.first(x), dim=1) * m.w
        return m.last(torch.fft.irfft(spectrum, n=x.shape[1], dim=1))

    w = nn.Parameter(torch.randn(3, 6, dtype=torch.complex64))
    return Graph(forward, first=nn.Linear(6, 6), w=w, last=nn.Linear(6, 3))


def _fourier_without_weights() -> nn.Module:
    return Graph(
        lambda m, x: m.last(torch.fft.fft(torch.fft.fft(m.first(x), dim=-1), dim=1).real),
        first=nn.Linear(6, 6),
        last=nn.Linear(6, 3),
    )


# --- models that change ---
def _chain(frozen: bool = False) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        if frozen:
            model[0].requires_grad_(False)
        return model

    return build


def _on_part(index: int, change: Callable[[Any], Any]) -> Callable[[Any, Any], None]:
    return lambda model, optimizer: change(inner(model)[index])


def _add_layer(model: Any, optimizer: Any) -> None:
    torch.manual_seed(5)
    dtype = next(model.parameters()).dtype
    added = nn.Linear(3, 3, dtype=dtype)
    inner(model).append(added)
    if optimizer is not None:
        optimizer.add_param_group({"params": list(added.parameters())})


def _replace_layer(model: Any, optimizer: Any) -> None:
    """The optimizer keeps the old layer's parameters."""
    torch.manual_seed(5)
    inner(model)[2] = nn.Linear(6, 6, dtype=next(model.parameters()).dtype)


def _replace_parameter(model: Any, optimizer: Any) -> None:
    layer = inner(model)[2]
    layer.weight = nn.Parameter(layer.weight.detach().clone())


def _replace_parameter_in_both(model: Any, optimizer: Any) -> None:
    layer = inner(model)[2]
    old, layer.weight = layer.weight, nn.Parameter(layer.weight.detach().clone())
    for group in optimizer.param_groups if optimizer is not None else ():
        group["params"] = [layer.weight if parameter is old else parameter for parameter in group["params"]]


def _token(frozen: bool) -> Callable[[], nn.Module]:
    """A model that has a parameter of its own beside its layers, as a class token."""

    def build() -> nn.Module:
        body = nn.Linear(6, 6).requires_grad_(not frozen)
        token = nn.Parameter(torch.linspace(-1, 1, 6))
        return Graph(lambda m, x: m.head(torch.tanh(m.body(x)) + m.token), body=body, head=nn.Linear(6, 3), token=token)

    return build


def _switch_body(model: Any, optimizer: Any) -> None:
    body = inner(model).body
    body.requires_grad_(not body.weight.requires_grad)


def _prune(model: Any, optimizer: Any) -> None:
    prune.l1_unstructured(inner(model)[0], "weight", 0.4)


def _pruned() -> nn.Module:
    model = _chain()()
    _prune(model, None)
    return model


def _end_pruning(model: Any, optimizer: Any) -> None:
    prune.remove(inner(model)[0], "weight")


def _weight_norm() -> nn.Module:
    model = _chain()()
    weight_norm(model[0])
    return model


def _in_cached(model: Any, batch: Batch) -> torch.Tensor:
    with parametrize.cached():
        return losses_of_outputs(model, batch)


def _cached_from_step_2(model: Any, batch: Batch) -> torch.Tensor:
    return _in_cached(model, batch) if len(batch["x"]) == 6 else losses_of_outputs(model, batch)


def _add_frozen_layer(model: Any, optimizer: Any) -> None:
    torch.manual_seed(5)
    inner(model).append(nn.Linear(3, 3, dtype=next(model.parameters()).dtype).requires_grad_(False))


def _scale_weights(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        inner(model)[2].weight.mul_(3)


def _replace_activation(model: Any, optimizer: Any) -> None:
    inner(model)[1] = nn.Sigmoid()


class _Mixing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


def _replace_by_mixing(model: Any, optimizer: Any) -> None:
    inner(model)[1] = _Mixing()


def _become_mixing(model: Any, optimizer: Any) -> None:
    inner(model)[1].__class__ = _Mixing


def _tie(model: Any, optimizer: Any) -> None:
    inner(model)[2].weight = inner(model)[0].weight


def _accumulated(*sizes: int) -> Callable[[], list[Step]]:
    return lambda: [Step([floats(size, 6) for size in sizes]) for _ in range(2)]


def _rows_of_one_batch(*rows: Any) -> Callable[[], list[Step]]:
    """A step whose physical batches are rows of one tensor: views for slices, copies for lists."""

    def steps() -> list[Step]:
        whole = floats(9, 6)
        return [Step([{name: x[each] for name, x in whole.items()} for each in rows])]

    return steps


def _beside_one_input() -> list[Step]:
    """A step of two physical batches whose first tensors are the same, such as those of one prompt."""
    whole, prompt = floats(6, 6), floats(3, 6)["x"]
    parts = [{name: x[rows] for name, x in whole.items()} for rows in (slice(3), slice(3, 6))]
    return [Step([{"prompt": prompt, **part} for part in parts])]


class _Image(torch.Tensor):
    """A subclass, as those of torchvision."""


def _images_beside_one_input() -> list[Step]:
    (both,) = _beside_one_input()
    return [Step([{**batch, "x": batch["x"].as_subclass(_Image)} for batch in both.batches])]


def _container(trains: bool, last: type[nn.Module] = nn.Identity) -> Callable[[], nn.Module]:
    """A model without a forward, whose first part is frozen or trained."""

    def build() -> nn.Module:
        first = nn.Sequential(nn.Linear(6, 6).requires_grad_(trains), last())
        return nn.ModuleDict({"first": first, "last": nn.Linear(6, 3)})

    return build


def _losses_of_parts(model: Any, batch: Batch) -> torch.Tensor:
    parts = inner(model)
    return per_sample(parts["last"](torch.tanh(parts["first"](batch["x"]))), batch)


def _train_first(trains: bool) -> Callable[[Any, Any], None]:
    return lambda model, optimizer: inner(model)["first"].requires_grad_(trains)  # type: ignore[no-any-return]


_HOLDS = {"holds_frozen": True}
_SWITCHED = {"changes_frozen_beside_a_token": False, "changes_unfrozen_beside_a_token": True}
_TWO = of_shape(5, 6, count=2)
_THREE = of_shape(5, 6, count=3)
PROGRAMS = [
    Program("parts_only", _two_parts, _THREE, "exact", _by_parts),
    *(
        Program(
            f"parts_of_a_container_{'unfrozen' if trains else 'frozen'}",
            _container(not trains),
            of_shape(5, 6, count=3, change=_train_first(trains)),
            "exact",
            _losses_of_parts,
            _HOLDS,
        )
        for trains in (True, False)
    ),
    *(
        Program(name, _token(frozen), of_shape(5, 6, count=3, change=_switch_body), "exact", settings=_HOLDS)
        for name, frozen in _SWITCHED.items()
    ),
    Program("changes_pruned", _chain(), of_shape(5, 6, count=3, change=_prune), "exact"),
    Program("changes_pruning_ends", _pruned, of_shape(5, 6, count=3, change=_end_pruning), "exact"),
    Program("changes_cached", _weight_norm, of_shape(5, 6), "refused", _in_cached),
    Program(
        "changes_cached_from_step_2",
        _weight_norm,
        several(lambda: floats(5, 6), lambda: floats(6, 6)),
        "refused",
        _cached_from_step_2,
    ),
    Program("parts_of_a_container_frozen_mixes", _container(False, _Mixing), _TWO, "refused", _losses_of_parts, _HOLDS),
    Program("parts_mixed_between", _two_parts, _THREE, "refused", _mixed_between_parts),
    Program("parts_flipped_between", _two_parts, _THREE, "refused", _flipped_between_parts),
    *(
        Program(f"parts_{name}", _two_parts, _TWO, "exact" if is_exact else "refused", _between(name))
        for name, (_, is_exact) in _BETWEEN.items()
    ),
    Program("parts_mixed_in_a_mode", _two_parts, _TWO, "refused", _mixed_in_a_mode),
    Program("parts_fed_back", _two_parts, _TWO, "exact", _fed_back),
    Program("parts_fed_back_mixed_later", _two_parts, _TWO, "refused", _fed_back_mixed_later),
    Program("parts_fed_back_mixed", _two_parts, _TWO, "refused", _fed_back_mixed),
    Program("parts_after_root", _two_parts, _THREE, "exact", _after_root),
    Program("parts_after_root_with_grad", _two_parts, _THREE, "exact", _after_root_with_grad),
    Program("parts_sizes_change", _two_parts, several(lambda: floats(5, 6), lambda: floats(3, 6)), "exact", _by_parts),
    Program("parts_root_and_part", _two_parts, _THREE, "exact", _root_and_part),
    Program("parts_part_and_root", _two_parts, _THREE, "exact", _part_and_root),
    Program("parts_root_twice", _two_parts, _THREE, "exact", _twice),
    Program("parts_of_a_subset", _two_parts, _THREE, "refused", _subset),
    Program("complex_parameter", _complex_parameter, of_shape(5, 4, 6, count=2), "exact"),
    Program(
        "complex_parameter_fp32",
        _complex_parameter,
        of_shape(5, 4, 6, count=2),
        "exact",
        settings={"dtype": torch.float32},
    ),
    Program("complex_linear", _complex_linear, of_shape(5, 4, 6, count=2), "exact"),
    Program("complex_output", _complex_output, of_shape(5, 4, 6, count=2), "exact"),
    Program("complex_fourier", _fourier, of_shape(5, 4, 6, count=2), "exact"),
    Program("complex_fourier_without_weights", _fourier_without_weights, of_shape(5, 4, 6, count=2), "exact"),
    *(
        Program(f"changes_{name}", _chain(frozen), of_shape(5, 6, count=3, change=change), allowed, settings=settings)
        for name, frozen, change, allowed, settings in (
            ("unfrozen", True, _on_part(0, lambda layer: layer.requires_grad_(True)), "exact", _HOLDS),
            ("unfrozen_bias", True, _on_part(0, lambda layer: layer.bias.requires_grad_(True)), "exact", _HOLDS),
            ("unfrozen_not_held", True, _on_part(0, lambda layer: layer.requires_grad_(True)), "refused", {}),
            ("frozen", False, _on_part(2, lambda layer: layer.requires_grad_(False)), "exact", {}),
            ("frozen_bias", False, _on_part(2, lambda layer: layer.bias.requires_grad_(False)), "exact", {}),
            ("added", False, _add_layer, "either", {}),
            ("added_frozen", False, _add_frozen_layer, "exact", {}),
            ("replaced", False, _replace_layer, "refused", {}),
            ("parameter_replaced", False, _replace_parameter, "refused", {}),
            ("parameter_replaced_in_both", False, _replace_parameter_in_both, "exact", {}),
            ("weights_scaled", False, _scale_weights, "exact", {}),
            ("activation_replaced", False, _replace_activation, "exact", {}),
            ("mixing_put_in", False, _replace_by_mixing, "refused", {}),
            ("class_mixes", False, _become_mixing, "refused", {}),
            ("tied", False, _tie, "either", {}),
        )
    ),
    Program("batches_accumulated", _chain(), _accumulated(4, 4, 4), "exact"),
    Program("batches_accumulated_mean", _chain(), _accumulated(4, 4), "exact", settings={"reduction": "mean"}),
    Program("batches_accumulated_of_sizes", _chain(), _accumulated(4, 2, 7), "exact"),
    Program("batches_accumulated_two_passes", _chain(), _accumulated(4, 2), "exact", settings={"passes": 2}),
    Program("batches_given_twice", _chain(), _rows_of_one_batch(slice(5), slice(5)), "refused"),
    Program("batches_that_share_a_sample", _chain(), _rows_of_one_batch(slice(5), slice(4, 9)), "refused"),
    Program("batches_given_again_later", _chain(), _rows_of_one_batch(slice(3), slice(3, 6), slice(3)), "refused"),
    Program(
        "batches_that_share_one_input",
        lambda: Graph(lambda m, prompt, x: m.last(m.first(x) * prompt), first=nn.Linear(6, 6), last=nn.Linear(6, 3)),
        _beside_one_input,
        "exact",
    ),
    Program(
        "batches_of_a_subclass_that_share_one_input",
        lambda: Graph(lambda m, prompt, x: m.last(m.first(x) * prompt), first=nn.Linear(6, 6), last=nn.Linear(6, 3)),
        _images_beside_one_input,
        "exact",
    ),
    Program("batches_that_are_slices", _chain(), _rows_of_one_batch(slice(5), slice(5, 9)), "exact"),
    Program("batches_with_equal_rows", _chain(), _rows_of_one_batch([0, 1, 2], [2, 3, 4]), "exact"),
    Program("batches_of_one", _chain(), of_shape(1, 6, count=2), "exact"),
    Program("batches_of_one_then_more", _chain(), several(lambda: floats(1, 6), lambda: floats(5, 6)), "exact"),
    Program("batches_shrink", _chain(), several(*[lambda n=n: floats(n, 6) for n in (7, 2, 1, 9)]), "exact"),
    Program(
        "batches_of_other_shapes",
        _chain(),
        several(*[lambda n=n: floats(4, n, 6) for n in (3, 1, 4, 7)], lambda: floats(5, 6), lambda: floats(3, 2, 2, 6)),
        "exact",
    ),
    Program("batches_without_tokens", _chain(), several(*[lambda n=n: floats(4, n, 6) for n in (3, 0, 2)]), "exact"),
    Program(
        "batches_empty", _chain(), several(lambda: floats(4, 6), lambda: floats(0, 6), lambda: floats(3, 6)), "exact"
    ),
    Program("batches_per_layer", _chain(), _THREE, "exact", settings={"clipping": "per_layer"}),
    Program("batches_automatic", _chain(), _THREE, "exact", settings={"clipping": "automatic"}),
    Program("batches_per_layer_of_sizes", _chain(), _accumulated(4, 2, 7), "exact", settings={"clipping": "per_layer"}),
    Program(
        "batches_of_equal_samples",
        _chain(),
        lambda: [step({"x": torch.ones(5, 6, dtype=torch.float64), "scale": scales(5)}) for _ in range(2)],
        "exact",
    ),
    Program(
        "batches_of_zeros",
        _chain(),
        lambda: [step({"x": torch.zeros(5, 6, dtype=torch.float64), "scale": scales(5)}) for _ in range(2)],
        "exact",
    ),
    Program(
        "batches_without_losses",
        _chain(),
        lambda: [step({"x": torch.randn(5, 6, dtype=torch.float64), "scale": torch.tensor([1.0, 0, 2, 0, 3])})],
        "exact",
    ),
    *(
        Program(
            f"magnitudes_{name}",
            _chain(),
            lambda values=values: [step({**floats(5, 6), "scale": torch.tensor(values, dtype=torch.float64)})],
            allowed,
            settings={"dtype": dtype},
        )
        for name, values, dtype, allowed in (
            ("large", [1e20, 1.0, 1e-20, 3.0, 1e20], torch.float64, "exact"),
            ("small", [1e-20] * 5, torch.float64, "exact"),
            ("huge", [1e150, 1.0, 1e-150, 3.0, 1e160], torch.float64, "either"),
            ("tiny", [1e-170, 1.0, 1e-160, 1e-165, 2.0], torch.float64, "exact"),
            ("large_fp32", [1e15, 1.0, 1e-15, 3.0, 1e15], torch.float32, "exact"),
            ("huge_fp32", [1e25, 1.0, 1e-20, 3.0, 1e30], torch.float32, "either"),
            ("tiny_fp32", [1e-25, 1.0, 1e-30, 3.0, 2.0], torch.float32, "exact"),
        )
    ),
]
