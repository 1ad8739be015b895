# SPDX-License-Identifier: Apache-2.0
"""The layers of a model: the bytes that Opacus' hooks need for each, and the structure that their names show.

The bytes are those for `n` samples. s is the bytes of an element of the output's gradients, T the tokens of a sample, p
and d the rows and columns of the weight, w all trained elements.

Source: the samplers of Opacus 1.6 (opacus/grad_sample).
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from opacus_memprof.clipping.cost import accumulated_itemsize
from opacus_memprof.profiles.layer_shapes import CaptureShape, LayerShape

NORMS = ("LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d")

_NUMBER = re.compile(r"(?:^|\.)\d+(?=\.|$)")


def reduction_workspace(outputs: int, rows: int, multiprocessors: int) -> int:
    """Returns the workspace of torch's sum over `rows` rows on a GPU: partial sums of all thread blocks.

    Source: ATen/native/cuda/Reduce.cuh, which launches four outputs per thread, 128 threads per block, 2048 threads per
    multiprocessor and 16 to 256 values per thread.
    """
    width = min(1 << max((outputs // 4).bit_length() - 1, 0), 32)
    values, grid, most = math.ceil(rows * width / 128), math.ceil(outputs / (4 * width)), 16 * multiprocessors
    if values < 256 or grid > most:
        return 0
    blocks = max(min(math.ceil(most / grid), math.ceil(values / 16)), math.ceil(values / 256))
    return 4 * outputs * 4 * width * blocks


@dataclass(frozen=True)
class Layer:
    """A module, its forward pass, and the activations that live from its forward to its backward. Sizes are in bytes.

    Attributes:
        activations: including what operations without parameters around the module have saved.
        largest: the largest block of them.
        residual_gradient: the gradient of a residual stream that lives through the module's backward.
        saved_before: the part of `activations` that was saved before the module's forward began.
        largest_square: the largest block of `saved_before` that can be attention weights, tokens by tokens.
        repeated_forward: what the sampler keeps of a forward that it runs again.
        captured: the part of `activations` that only Opacus' captures keep.
        shared: the part of `saved_before` that the operation before the layer has saved, too, as a ReLU its result.
        operations: see WholeForward.operations; empty if they are not known.
        is_added: its output is added to the residual stream, whose gradient then is that of the output, too.
    """

    name: str
    module: LayerShape
    forward: CaptureShape
    activations: int
    largest: int = 0
    residual_gradient: int = 0
    saved_before: int = 0
    largest_square: int = 0
    repeated_forward: int = 0
    captured: int = 0
    shared: int = 0
    is_added: bool = False
    operations: tuple[tuple[int, int, bool], ...] = ()

    @property
    def elements(self) -> int:
        return self.module.weight + self.module.bias

    @property
    def is_convolution(self) -> bool:
        return self.module.kind.startswith("Conv") and self.module.columns > 0

    @property
    def is_autocast(self) -> bool:
        """Whether autocast casts the layer's input to 16 bits."""
        is_product = bool(self.module.rows) and self.module.kind != "Embedding"
        return is_product and self.forward.input_element_bytes > self.forward.element_bytes

    @property
    def is_repeated(self) -> bool:
        """Whether the module runs more than once in a forward pass, as the Linear layers of a recurrent cell do."""
        return self.forward.calls > 1

    @property
    def sum_bytes(self) -> int:
        """The bytes of flash_clip's clipped sums, which are at least float32."""
        return max(self.module.bytes, accumulated_itemsize(0) * self.elements)

    def input_before(self, n: int) -> int:
        """Returns the bytes of the layer's input, if a preceding operation has made it.

        They are free after the layer's backward.
        """
        size = self.forward.input_bytes
        is_free = not self.forward.from_leaf and self.saved_before >= size > self.shared
        return self.scale(size, n) if is_free else 0

    def largest_gradients(self, on_gpu: bool) -> int:
        """Returns the bytes of the gradients of output and input of the layer's operation that needs the most.

        On a GPU, a softmax also allocates their product. What later operations have saved, which is free by then, is
        taken off, unless it is the layer's input or output: these are counted apart.
        """
        if not self.operations:
            return max(2 * self.largest, 3 * self.largest_square if on_gpu else 0)
        apart = self.input_before(self.forward.samples) + self.output_before()
        return max(
            (3 if is_softmax and on_gpu else 2) * size - max(freed - apart, 0)
            for size, freed, is_softmax in self.operations
        )

    def output_before(self) -> int:
        """Returns the bytes of the layer's activations that are free in its backward: its output, saved by others."""
        return min(self.activations - self.saved_before, self.forward.output_bytes)

    def scale(self, size: int, n: int) -> int:
        """Returns the bytes for `n` samples of a tensor that has `size` bytes for the samples of the forward."""
        return size * n // max(self.forward.samples, 1)

    def without_captures(self) -> "Layer":
        """Returns the layer as flash_clip has it: it keeps inputs as they are computed with, cast by autocast."""
        forward, kept = self.forward, self.activations - self.captured
        if self.is_autocast:
            cast = forward.input_bytes * forward.element_bytes // forward.input_element_bytes
            forward = replace(forward, input_bytes=cast)
        return replace(self, forward=forward, activations=kept, saved_before=min(self.saved_before, kept), captured=0)

    def per_sample_gradients(self, n: int) -> int:
        """Returns the bytes of per-sample gradients: s·n·w."""
        return self.forward.element_bytes * n * self.elements

    def passed_gradients(self, n: int, mean_loss: bool) -> int:
        """Returns the bytes of gradients that pass through the layer in backward.

        These are the gradients of its output, its input and the residual stream. For a mean loss, Opacus' scaled copy
        of the output's gradient is added.
        """
        call = self.forward.largest_call()
        output = self.scale(call.output_bytes, n)
        grad_input = 0 if self.forward.from_leaf else self.scale(call.input_bytes, n)
        return output * (2 if mean_loss and self.module.kind != "frozen" else 1) + grad_input + self.beside_output(n)

    def beside_output(self, n: int) -> int:
        """Returns the bytes of the residual stream's gradient, where it is not that of the output."""
        return 0 if self.is_added else self.scale(self.residual_gradient, n)

    def layout_copies(self, n: int) -> int:
        """Returns the workspace of a convolution's backward, if its library computes in another memory layout.

        It consists of copies of the gradients of output and input, and of the weight. On an H200, cuDNN's workspace was
        equal to that within 1 KiB (benchmarks/virtual_gpu/convolution_workspace.py).
        """
        if not self.forward.layout_copied:
            return 0
        call = self.forward.largest_call()
        gradients = self.scale(call.input_bytes + call.output_bytes, n)
        return gradients + self.forward.element_bytes * self.module.weight

    def bias_sum_workspace(self, n: int, multiprocessors: int, *, by_sample: bool) -> int:
        """Returns the workspace on a GPU of the sum that gives the gradient of a Linear's bias.

        Args:
            n: the number of samples.
            multiprocessors: the number of the GPU's multiprocessors.
            by_sample: whether the sum is over the tokens of each sample; otherwise, as in autograd, over samples too.
        """
        if self.module.kind != "Linear" or not self.module.bias:
            return 0
        rows, tokens = self.module.bias, self.forward.tokens // self.forward.calls
        outputs, summed = (n * rows, tokens) if by_sample else (rows, n * tokens)
        return reduction_workspace(outputs, summed, multiprocessors)

    def sampler(self, n: int, *, copies: bool = True, workspace: int = 0) -> int:
        """Returns the peak of Opacus' grad sampler, including its result.

        That is 2·s·n·w, because the result is copied into zeros; or more if a convolution's unfolded input or the
        normalized copies of a norm are larger. The result of another use of the same weight is added to the first
        one's, which is not part of the peak here.

        Args:
            n: samples.
            copies: False where adopt_grad_samples has removed the copy.
            workspace: of the matrix product that forms the result.
        """
        forward, formed = self.forward, self.per_sample_gradients(n)
        is_added = self.is_repeated or self.module.tied_to
        result = (2 if copies and not is_added else 1) * formed
        if self.module.tied_to:
            formed = forward.element_bytes * n * self.module.rows * self.module.columns
            result += formed
        if self.is_convolution:
            call = forward.largest_call()
            unfolded = forward.element_bytes * n * call.tokens * self.module.columns * self.module.groups
            all_pairs = formed * self.module.groups  # of groups; the diagonal is the result
            results = all_pairs + max(formed if self.module.groups > 1 else 0, workspace)
            inputs = (2 if self.module.kind == "Conv1d" else 1) * self.scale(call.input_bytes, n)  # and padded
            return max(inputs + unfolded, unfolded + results, result)
        if self.module.kind in NORMS:
            return max(2 * self.scale(forward.output_bytes, n), result)
        frozen = forward.element_bytes * n * self.module.frozen
        return frozen + max(formed + workspace + self.scale(self.repeated_forward, n), result)

    def ghost_norms(self, n: int, workspace: int = 0) -> int:
        """Returns the peak of Opacus' norm sampler in ghost clipping.

        A Linear with T > 1 tokens forms T x T matrices of s·n·T² bytes each: two for the weight and one for the bias.
        Layers without a norm sampler form per-sample gradients.
        """
        forward, module = self.forward, self.module
        if not module.norm_sampler:
            return self.sampler(n, workspace=workspace)
        if module.kind == "Embedding":
            return 48 * n * forward.tokens + 2 * self.scale(forward.output_bytes, n)
        squares = 2 * bool(module.weight) + bool(module.bias)
        return forward.element_bytes * n * forward.tokens**2 * squares + workspace if forward.tokens > 1 else 0

    def clipping_casts(self, n: int) -> int:
        """Returns the bytes of per-sample gradients that clipping casts to the parameter's dtype, if that is wider."""
        wide = self.module.bytes // max(self.elements, 1)
        return wide * n * self.module.weight if self.forward.element_bytes < wide else 0


def cell_of(layer: Layer, layers: Sequence[Layer]) -> set[str]:
    """Returns the layers whose per-sample gradients are live when the layer's backward begins.

    These are the layers of the same recurrent cell, whose calls alternate and add to the same gradients, or the
    layer that a tied weight counts for.
    """
    if layer.module.tied_to:
        return {layer.module.tied_to}
    if not layer.is_repeated:
        return set()
    parent = layer.name.rpartition(".")[0]
    return {each.name for each in layers if each.is_repeated and each.name.rpartition(".")[0] == parent}


def adds_outputs(layer: Layer, layers: Sequence[Layer]) -> bool:
    """Returns whether the gradient of the layer's output is also that of another layer in a recurrent cell.

    This is so if the cell adds both outputs. A GRU, with three rows for each hidden feature, does not add all of them.
    """
    cell = sorted(cell_of(layer, layers))
    inside = [each for each in layers if each.name in cell]
    return layer.name in cell[1:] and all(each.module.rows != 3 * each.module.columns for each in inside)


def as_sampled(layers: Sequence[Layer]) -> list[Layer]:
    """Returns the layers; layers that Opacus samples together become one, at the position of the first of them.

    functorch repeats the forward of such a layer. It holds the saved tensors and the gradients until it returns.
    """
    parts: dict[tuple[bool, str], list[Layer]] = {}
    for layer in layers:
        together = layer.module.sampled_in
        name = layer.name if together is None else together
        parts.setdefault((together is not None, name), []).append(layer)
    return [_merge(name, inside) if merges else inside[0] for (merges, name), inside in parts.items()]


def _merge(name: str, layers: Sequence[Layer]) -> Layer:
    first, last = layers[0], layers[-1]
    module = replace(
        first.module,
        kind="functorch",
        bytes=sum(layer.module.bytes for layer in layers),
        weight=sum(layer.elements for layer in layers),
        bias=0,
        rows=0,
        columns=0,
        frozen=sum(layer.module.frozen for layer in layers),
        norm_sampler=False,
        tied_to="",
        sampled_in=None,
    )
    return Layer(
        name,
        module,
        replace(first.forward, output_bytes=last.forward.output_bytes // last.forward.calls, calls=1),
        sum(layer.activations for layer in layers),
        largest=max(layer.largest for layer in layers),
        residual_gradient=max(layer.residual_gradient for layer in layers),
        saved_before=first.saved_before,
        repeated_forward=2 * sum(layer.activations for layer in layers),
    )


@dataclass(frozen=True)
class RepeatedUnit:
    """A numbered part of the model, such as `encoder.layers.0`, that has the same modules as another one.

    Attributes:
        prefix: its name.
        signature: (name inside of the unit, class, rows, columns) of each module. Equal units have equal signatures.
    """

    prefix: str
    signature: tuple[tuple[str, str, int, int], ...]


def unit_prefix(name: str) -> str:
    """Returns the name up to its first number: `encoder.layers.0` of `encoder.layers.0.linear1`. Empty without one."""
    match = _NUMBER.search(name)
    return name[: match.end()] if match else ""


def repeated_units(modules: Mapping[str, LayerShape]) -> dict[str, RepeatedUnit]:
    """Returns the units that equal another one, by prefix."""
    parts: dict[str, list[tuple[str, str, int, int]]] = {}
    for name, module in modules.items():
        if prefix := unit_prefix(name):
            parts.setdefault(prefix, []).append((name[len(prefix) :], module.kind, module.rows, module.columns))
    units = {prefix: RepeatedUnit(prefix, tuple(inside)) for prefix, inside in parts.items()}
    signatures = [unit.signature for unit in units.values()]
    return {prefix: unit for prefix, unit in units.items() if signatures.count(unit.signature) > 1}


def releasing_layers(modules: Iterable[str], order: Sequence[str]) -> dict[str, str]:
    """Returns, for each module, the layer whose backward releases the module's activations.

    That is the module itself, if it is a layer. Otherwise it is one of the layers that share the longest part of its
    name: the next one by number, which uses its output, or else the last one. Modules without one are left out.

    Args:
        modules: names of modules that have activations.
        order: the names of layers, in forward order.
    """
    layers = {module: module if module in order else _nearest(module, order) for module in modules if module}
    return {module: layer for module, layer in layers.items() if layer}


def _nearest(module: str, order: Sequence[str]) -> str:
    parts, names = module.split("."), [name.split(".") for name in order]
    pairs = [zip(parts, name, strict=False) for name in names]
    shared = [sum(1 for _ in takewhile(lambda parts: parts[0] == parts[1], pair)) for pair in pairs]
    longest = max(shared, default=0)

    def number(name: list[str]) -> int:
        return int(name[longest]) if len(name) > longest and name[longest].isdigit() else -1

    nearest = [name for name, length in zip(names, shared, strict=True) if length == longest]
    later = [name for name in nearest if number(name) > number(parts) >= 0]
    return ".".join(later[0] if later else nearest[-1] if longest else [])


def distribute_missing(layers: Sequence[Layer], missing: int, reached: str) -> list[Layer]:
    """Adds activations that have been released already to layers, in proportion to their inputs and outputs.

    Args:
        layers: in forward order.
        missing: bytes of these activations.
        reached: the layer whose backward was running; only later layers have released activations. Empty: all have.
    """
    names = [layer.name for layer in layers]
    live = names.index(reached) + 1 if reached in names[:-1] else 0
    weights = [max(layer.forward.input_bytes + layer.forward.output_bytes - layer.activations, 1) for layer in layers]
    weights[:live] = [0] * live
    total = sum(weights)
    return [
        replace(layer, activations=layer.activations + missing * weight // total)
        for layer, weight in zip(layers, weights, strict=True)
    ]


def with_residual_gradients(
    layers: Sequence[Layer], largest_blocks: Mapping[str, int], units: Mapping[str, RepeatedUnit]
) -> list[Layer]:
    """Returns the layers, with the gradients of residual streams that live through their backward.

    A container adds its branches to its input if its own operations save a block of the size of its first layer's
    input. The gradient of its output then lives until the gradients of the branches have been added to it.

    Args:
        layers: in forward order.
        largest_blocks: the largest activation of each module, including containers.
        units: containers whose activations are live show what all units of the same signature do.
    """
    gradients: dict[str, int] = {}
    for container, size in largest_blocks.items():
        inside = [layer for layer in layers if container and layer.name.startswith(f"{container}.")]
        if inside and inside[0].forward.input_bytes == size:
            gradients |= {layer.name: max(size, gradients.get(layer.name, 0)) for layer in inside}
    in_units: dict[tuple[object, str], int] = {}
    for layer in layers:
        if key := _place_in_unit(layer.name, units):
            in_units[key] = max(in_units.get(key, 0), gradients.get(layer.name, 0))
    result = []
    for layer in layers:
        in_unit = in_units.get(_place_in_unit(layer.name, units) or (None, ""), 0)
        result.append(replace(layer, residual_gradient=gradients.get(layer.name) or in_unit))
    return result


def _place_in_unit(name: str, units: Mapping[str, RepeatedUnit]) -> tuple[object, str] | None:
    """Returns the unit's signature, and the name inside of the unit."""
    prefix = unit_prefix(name)
    return (units[prefix].signature, name[len(prefix) :]) if prefix in units else None
