# SPDX-License-Identifier: Apache-2.0
"""Second arguments of layers, and code of the user's own around and inside of layers."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm

from tests.exactness.judge import Batch
from tests.exactness.program import Graph, Program, floats, of_shape, ragged_ids, several


# --- a second argument ---
class GatedRMSNorm(nn.Module):
    """As Mamba2's: the input is multiplied by a gate."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, h: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        if gate is not None:
            h = h * functional.silu(gate)
        return self.weight * h * (h.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class GatedLayerNorm(nn.LayerNorm):
    def forward(self, h: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(h if gate is None else h * gate.sigmoid())


class ScaledLinear(nn.Linear):
    def forward(self, x: torch.Tensor, scale: Any = 1.0) -> torch.Tensor:
        return super().forward(x * scale)


class ScaledOutput(nn.Linear):
    def forward(self, x: torch.Tensor, *, scale: Any = 1.0) -> torch.Tensor:
        return super().forward(x) * scale


class ScaledConv(nn.Conv1d):
    def forward(self, x: torch.Tensor, scale: Any = 1.0) -> torch.Tensor:
        return super().forward(x * scale)


class AdaptiveNorm(nn.Module):
    """As in diffusion models: shift and scale from a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(6)), nn.Parameter(torch.zeros(6))

    def forward(self, x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, (6,), self.weight, self.bias) * (1 + scale) + shift


class ResidualNorm(nn.LayerNorm):
    """Adds a residual before it normalizes."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x if residual is None else x + residual)


def _around(layer: Callable[[], nn.Module], call: Callable[..., torch.Tensor]) -> Callable[[], nn.Module]:
    return lambda: Graph(
        lambda m, x: m.last(call(m.layer, m.first(x), m.gate(x))),
        first=nn.Linear(6, 6),
        gate=nn.Linear(6, 6),
        layer=layer(),
        last=nn.Linear(6, 3),
    )


_GATES: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor]]] = {
    "rms_norm": (GatedRMSNorm, lambda layer, h, gate: layer(h, gate)),
    "rms_norm_keyword": (GatedRMSNorm, lambda layer, h, gate: layer(h, gate=gate)),
    "rms_norm_all_keywords": (GatedRMSNorm, lambda layer, h, gate: layer(gate=gate, h=h)),
    "layer_norm": (lambda: GatedLayerNorm(6), lambda layer, h, gate: layer(h, gate)),
    "linear_keyword": (lambda: ScaledLinear(6, 6), lambda layer, h, gate: layer(h, scale=gate)),
    "linear_number": (lambda: ScaledLinear(6, 6), lambda layer, h, gate: layer(h + gate, scale=3.0)),
    "linear_output": (lambda: ScaledOutput(6, 6), lambda layer, h, gate: layer(h, scale=gate)),
    "linear_output_number": (lambda: ScaledOutput(6, 6), lambda layer, h, gate: layer(h + gate, scale=0.3)),
    "conv": (
        lambda: ScaledConv(4, 4, 1),
        lambda layer, h, gate: layer(h, scale=gate) if h.dim() == 3 else layer(h.unsqueeze(0), scale=gate)[0],
    ),
    "adaptive_norm": (AdaptiveNorm, lambda layer, h, gate: layer(h, gate, gate.tanh())),
    "residual": (lambda: ResidualNorm(6), lambda layer, h, gate: layer(h, gate)),
    "first_without": (GatedRMSNorm, lambda layer, h, gate: layer(layer(h), gate)),
}


def _sometimes_gated(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.first(x)
    return m.last(m.layer(h, m.gate(x)) if m.is_gated else m.layer(h + m.gate(x)))


def _gate_it(model: Any, optimizer: Any) -> None:
    for module in model.modules():
        if isinstance(module, Graph):
            module.is_gated = True


# --- hooks and replaced forwards ---
def _chain(change: Callable[[nn.Module], Any], layer: Callable[[], nn.Module] | None = None) -> Callable[[], nn.Module]:
    """Linear, a layer that is changed, and Linear."""

    def build() -> nn.Module:
        made = nn.Linear(6, 6) if layer is None else layer()
        model = nn.Sequential(nn.Linear(6, 6), made, nn.Linear(6, 3))
        change(model[1])
        return model

    return build


def _scale_output(layer: nn.Module) -> None:
    layer.register_forward_hook(lambda module, args, output: 3 * output)


def _gate_output(layer: nn.Module) -> None:
    layer.register_forward_hook(lambda module, args, output: output * args[0].sigmoid())


def _scale_input(layer: nn.Module) -> None:
    layer.register_forward_pre_hook(lambda module, args: (args[0] * 3,))


def _mix_output(layer: nn.Module) -> None:
    layer.register_forward_hook(lambda module, args, output: output - output.mean(0))


def _replace_forward(layer: Any) -> None:
    original = layer.forward
    layer.forward = lambda x: original(x) * 2 + x


def _replace_slightly(layer: Any) -> None:
    original = layer.forward
    layer.forward = lambda x: original(x) * 1.001


def _replace_by_method(layer: Any) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight * 2, self.bias) if self.bias is not None else x @ self.weight

    layer.forward = MethodType(forward, layer)


def _replace_input(layer: Any) -> None:
    original = layer.forward
    layer.forward = lambda x: original(x.clamp(-0.5, 0.5))


def _backward_hook(layer: nn.Module) -> None:
    layer.register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0] * 0.5,))


def _backward_pre_hook(layer: nn.Module) -> None:
    layer.register_full_backward_pre_hook(lambda module, grad_output: (grad_output[0] * 0.5,))


def _mixing_backward_hook(layer: nn.Module) -> None:
    layer.register_full_backward_hook(lambda module, gi, go: (gi[0] - gi[0].mean(0),))


def _nothing(layer: nn.Module) -> None:
    pass


class ClampingLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).clamp(-0.3, 0.3)


class ClampingInput(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.clamp(-0.3, 0.3))


class ClampingFarAway(nn.Linear):
    """Clamps only what is larger than inputs usually are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).clamp(-20, 20)


class ClampingWeight(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight.clamp(-0.1, 0.1), self.bias)


class StandardizedConv(nn.Conv1d):
    """Weight standardization, as in BiT."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.weight - self.weight.mean((1, 2), keepdim=True)
        return functional.conv1d(x, w / (w.std((1, 2), keepdim=True) + 1e-5), self.bias)


class QuantizedLinear(nn.Linear):
    """A straight-through estimator, as in BitNet."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.weight + (self.weight.sign() * self.weight.abs().mean() - self.weight).detach()
        return functional.linear(x, w, self.bias)


class UnpaddedEmbedding(nn.Embedding):
    """Ignores its padding_idx."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.weight)


class ScaledEmbedding(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 4.0


class ShiftedEmbedding(nn.Embedding):
    """As OPT's positions."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward((ids + 1) % self.num_embeddings)


class DetachedNorm(nn.LayerNorm):
    """Statistics without gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x - x.mean(-1, keepdim=True).detach()) / x.std(-1, keepdim=True).detach()
        return x * self.weight + self.bias


class CenteredNorm(nn.LayerNorm):
    """Gemma's: the weight is an offset from one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, (6,)) * (1 + self.weight) + self.bias


class FrozenLayerOfParameters(nn.Linear):
    """Uses its weight twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.tanh(super().forward(x)))


_HOOKS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "scales_output": (_scale_output, "exact"),
    "gates_output": (_gate_output, "exact"),
    "scales_input": (_scale_input, "exact"),
    "mixes": (_mix_output, "refused"),
    "forward_replaced": (_replace_forward, "exact"),
    "forward_replaced_slightly": (_replace_slightly, "exact"),
    "forward_replaced_by_method": (_replace_by_method, "exact"),
    "forward_replaced_clamps": (_replace_input, "exact"),
    "backward": (_backward_hook, "either"),
    "backward_before": (_backward_pre_hook, "either"),
    "backward_mixes": (_mixing_backward_hook, "refused"),
    "weight_norm": (lambda layer: parametrizations.weight_norm(layer), "exact"),
    "old_weight_norm": (lambda layer: weight_norm(layer), "either"),
    "orthogonal": (lambda layer: parametrizations.orthogonal(layer), "either"),
    "spectral_norm": (lambda layer: parametrizations.spectral_norm(layer), "exact"),
    "old_spectral_norm": (lambda layer: spectral_norm(layer), "either"),
    "own_parametrization": (lambda layer: parametrize.register_parametrization(layer, "weight", nn.Tanh()), "exact"),
}
_SUBCLASSES: dict[str, Callable[[], nn.Module]] = {
    "clamps_output": lambda: ClampingLinear(6, 6),
    "clamps_input": lambda: ClampingInput(6, 6),
    "clamps_far_away": lambda: ClampingFarAway(6, 6),
    "clamps_weight": lambda: ClampingWeight(6, 6),
    "quantized": lambda: QuantizedLinear(6, 6),
    "standardized_conv": lambda: StandardizedConv(4, 4, 3, padding=0),
    "detached_norm": lambda: DetachedNorm(6),
    "centered_norm": lambda: CenteredNorm(6),
    "uses_weight_twice": lambda: FrozenLayerOfParameters(6, 6),
}
_EMBEDDINGS: dict[str, Callable[[], nn.Module]] = {
    "ignores_padding": lambda: UnpaddedEmbedding(11, 6, padding_idx=0),
    "scales": lambda: ScaledEmbedding(11, 6, padding_idx=0),
    "shifts": lambda: ShiftedEmbedding(11, 6),
    "has_padding": lambda: nn.Embedding(11, 6, padding_idx=0),
}


def _subclass(name: str) -> Callable[[], nn.Module]:
    width = 4 if name == "standardized_conv" else 6
    return lambda: nn.Sequential(nn.Linear(6, 6), _SUBCLASSES[name](), nn.Linear(width, 3))


class _UnitRows(torch.autograd.Function):
    """Gives each row a gradient of norm one: it is not linear, and does not mix."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g / g.norm(dim=-1, keepdim=True).clamp(min=1e-9)


def _with_tensor_hook(hook: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], nn.Module]:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.first(x)
        h.register_hook(hook)
        return m.last(torch.tanh(h))

    return lambda: Graph(forward, first=nn.Linear(6, 6), last=nn.Linear(6, 3))


def _hook_later(model: Any, optimizer: Any) -> None:
    for module in model.modules():
        if isinstance(module, nn.Sequential):
            _scale_output(module[1])


def _hook_gradient(model: Any, optimizer: Any) -> None:
    next(model.parameters()).register_hook(lambda gradient: 3 * gradient)


def _hooked_gradient() -> nn.Module:
    model = _chain(_nothing)()
    _hook_gradient(model, None)
    return model


def _replace_later(model: Any, optimizer: Any) -> None:
    for module in model.modules():
        if isinstance(module, nn.Sequential):
            _replace_forward(module[1])


def _mix_later(model: Any, optimizer: Any) -> None:
    for module in model.modules():
        if isinstance(module, nn.Sequential):
            _mix_output(module[1])


def _grows() -> Batch:
    batch = floats(5, 4, 6)
    batch["x"][1:3] *= 200
    return batch


_GROWING = several(lambda: floats(5, 4, 6), _grows)
_IDS = several(*[lambda: ragged_ids((5, 2, 4, 1))] * 2)
PROGRAMS = [
    *(Program(f"gate_{name}", _around(*parts), of_shape(5, 4, 6, count=2), "exact") for name, parts in _GATES.items()),
    *(
        Program(f"gate_{name}_two_passes", _around(*_GATES[name]), of_shape(5, 4, 6), "exact", settings={"passes": 2})
        for name in ("rms_norm", "linear_keyword")
    ),
    *(
        Program(
            f"gate_{name}_unchecked",
            _around(*_GATES[name]),
            of_shape(5, 4, 6, count=2),
            "exact",
            settings={"module_options": {"check": "off"}},
        )
        for name in ("rms_norm", "linear_keyword")
    ),
    Program(
        "gate_later",
        lambda: Graph(
            _sometimes_gated,
            first=nn.Linear(6, 6),
            gate=nn.Linear(6, 6),
            layer=GatedRMSNorm(),
            last=nn.Linear(6, 3),
            is_gated=False,
        ),
        of_shape(5, 4, 6, count=3, change=_gate_it),
        "exact",
    ),
    *(
        Program(f"hook_{name}", _chain(change), of_shape(5, 4, 6, count=2), allowed)
        for name, (change, allowed) in _HOOKS.items()
    ),
    *(
        Program(f"hook_on_tensor_{name}", _with_tensor_hook(hook), of_shape(5, 4, 6, count=2), allowed)
        for name, hook, allowed in (
            ("scales", lambda g: 3 * g, "exact"),
            ("clamps", lambda g: g.clamp(-0.01, 0.01), "exact"),
            ("mixes", lambda g: g - g.mean(0), "refused"),
        )
    ),
    Program(
        "hook_by_function_of_unit_rows",
        lambda: Graph(lambda m, x: m.last(_UnitRows.apply(m.first(x))), first=nn.Linear(6, 6), last=nn.Linear(6, 3)),
        of_shape(5, 4, 6, count=2),
        "exact",
    ),
    Program(
        "hook_spectral_norm_of_a_convolution",
        lambda: nn.Sequential(parametrizations.spectral_norm(nn.Conv1d(4, 3, 2)), nn.Flatten(), nn.Linear(15, 2)),
        of_shape(5, 4, 6, count=3),
        "exact",
    ),
    Program("hook_on_gradient", _hooked_gradient, of_shape(5, 4, 6, count=2), "refused"),
    Program("hook_on_gradient_later", _chain(_nothing), of_shape(5, 4, 6, count=3, change=_hook_gradient), "refused"),
    Program("hook_later", _chain(_nothing), of_shape(5, 4, 6, count=3, change=_hook_later), "exact"),
    Program("hook_replaced_later", _chain(_nothing), of_shape(5, 4, 6, count=3, change=_replace_later), "exact"),
    Program("hook_mixes_later", _chain(_nothing), of_shape(5, 4, 6, count=3, change=_mix_later), "refused"),
    *(Program(f"subclass_{name}", _subclass(name), _GROWING, "exact") for name in _SUBCLASSES),
    *(
        Program(f"subclass_embedding_{name}", lambda make=make: nn.Sequential(make(), nn.Linear(6, 3)), _IDS, "exact")
        for name, make in _EMBEDDINGS.items()
    ),
]
