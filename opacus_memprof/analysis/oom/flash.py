# SPDX-License-Identifier: Apache-2.0
"""The bytes that flash_clip needs for one layer and `n` samples, from its shapes and the rules of clipping.cost.

s is the bytes of an element of the output's gradients g, x the input, T the tokens of a sample (a convolution's output
positions), G its groups, K the positions of its kernel. A weight of p x d elements is G matrices of p/G x d. A
convolution has c = G d / K input channels, so its unfolded input has s n c K T = s n G d T bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from opacus_memprof.analysis.oom.layers import NORMS, Layer
from opacus_memprof.clipping import cost

REPEATED = ("Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")
"""Layers without a rule of their own: their forward is repeated, and their per-sample gradients are kept."""

WORKSPACE_BYTES = int(cost.DEFAULT_WORKSPACE_MB * 2**20)


@dataclass(frozen=True)
class FlashClip:
    """The memory that flash_clip needs for a layer.

    Attributes:
        layer: the layer.
        in_registers: Gram products are formed in a GPU's registers (Triton); otherwise two tiles are formed in memory.
    """

    layer: Layer
    in_registers: bool

    def kept_bytes(self, n: int) -> int:
        """Returns the bytes that are kept from the layer's backward until its clipped sum is formed."""
        return self._pair_bytes(n) + self.new_bytes(n)

    def kept_calls(self, n: int) -> int:
        """Returns how many of the layer's calls keep their pair (input, gradient of the output).

        If a layer runs several times, its pairs become per-sample gradients whenever they are larger than these. The
        pairs of the last calls can remain.
        """
        calls = self.layer.forward.calls
        if calls == 1 or not self.layer.module.rows or self.layer.module.kind == "Embedding":
            return calls if self.keeps_pair(n) else 0
        return calls % (self._calls_until_formed() + 1)

    def _calls_until_formed(self) -> int:
        """Returns the largest number of calls whose pairs are not larger than per-sample gradients."""
        forward = self.layer.forward
        pair = self.layer.scale(forward.input_bytes + forward.output_bytes, 1) // forward.calls
        return self.layer.module.rows * self.layer.module.columns * forward.element_bytes // max(pair, 1)

    def _pair_bytes(self, n: int) -> int:
        """Returns the bytes of the kept pairs. A single call's input can be a view, such as of the last token."""
        forward = self.layer.forward
        input_bytes = forward.input_bytes if forward.calls > 1 else max(forward.input_bytes, forward.viewed_bytes)
        return self.layer.scale(input_bytes + forward.output_bytes, n) * self.kept_calls(n) // forward.calls

    def shared_bytes(self, n: int) -> int:
        """Returns the part of `kept_bytes` that is also in the previous layer's activations.

        That is the input, if it is the previous layer's output.
        """
        layer, input_bytes = self.layer, self.layer.forward.input_bytes
        is_output = not layer.forward.from_leaf and layer.saved_before < input_bytes
        return layer.scale(input_bytes, n) if is_output and self.keeps_pair(n) else 0

    def new_bytes(self, n: int) -> int:
        """Returns the part of `kept_bytes` that the layer's backward allocates.

        A pair is not part of it: x is an activation, and g exists in backward anyway.
        """
        forward, module = self.layer.forward, self.layer.module
        wide = cost.accumulated_itemsize(forward.element_bytes)
        if module.kind in NORMS:
            return wide * n * self.layer.elements
        weight = 0 if self.keeps_pair(n) else module.weight
        # With a single token the bias' gradient is g itself.
        bias = 0 if forward.tokens == 1 and not self.layer.is_convolution else module.bias
        return n * (forward.element_bytes * weight + wide * bias)

    def norm_temporaries(self, n: int, *, keep: bool = True) -> int:
        """Returns the bytes of temporaries that per-sample norms need.

        Args:
            n: the number of samples.
            keep: whether the layer keeps tensors; False for Opacus' ghost clipping with these norm samplers.
        """
        layer, forward, module = self.layer, self.layer.forward, self.layer.module
        if module.kind in NORMS:
            return self._normalized(n)
        if module.kind == "Embedding":
            return self._embedding_norms(n)
        if module.kind in REPEATED:
            moved = layer.scale(forward.input_bytes + forward.output_bytes, 1) // forward.calls
            samples = max(cost.fit(WORKSPACE_BYTES, 4 * moved + module.bytes, n), 1)
            return samples * moved + (samples * forward.element_bytes * module.weight if samples < n else 0)
        if layer.repeated_forward:
            sample = 4 * layer.scale(forward.input_bytes + forward.output_bytes, 1) + module.bytes
            return layer.scale(layer.repeated_forward, max(cost.fit(WORKSPACE_BYTES, sample, n), 1))
        if not module.rows:
            return 0
        choice = self._choice(n, keep)
        weight = cost.accumulated_itemsize(forward.element_bytes) * module.weight  # a gradient that is not kept
        if keep and choice.keep == "gradient":
            samples, unfolded, copies = self._unfold(n, WORKSPACE_BYTES)
            # The gradients of some samples, which are copied into those of all samples. These are allocated with the
            # first part, after its copies have been freed.
            part = forward.element_bytes * samples * module.weight if samples < n else 0
            first = unfolded + max(copies - forward.element_bytes * n * module.weight, part)
            return max(first, (unfolded + copies) * min(n - samples, samples) // samples)
        ceiling = WORKSPACE_BYTES // 2 if layer.is_convolution else WORKSPACE_BYTES  # half of it is for unfolding
        samples, unfolded, copies = self._unfold(n, ceiling)
        if choice.norm == "gradient":
            return unfolded + max(copies, min(samples * weight, ceiling))
        width = module.rows // module.groups + module.columns
        batch, tokens = samples * module.groups, forward.tokens
        is_gpu = self.in_registers
        gram = cost.gram_bytes(batch, tokens, width, forward.element_bytes, ceiling, in_registers=is_gpu)
        return unfolded + max(copies, gram)

    def forms_gradients(self, n: int, *, keep: bool = True) -> bool:
        """Returns whether matrix products form the weight's per-sample gradients. Arguments: see norm_temporaries."""
        if self.layer.repeated_forward or self.layer.module.kind in REPEATED:
            return True
        return bool(self.layer.module.rows) and self._choice(n, keep).norm == "gradient"

    def first_formed(self, n: int) -> tuple[int, int]:
        """Returns after how many calls in backward a layer's pairs become per-sample gradients, and the bytes of these.

        (0, 0) if that does not happen before all calls are known.
        """
        module, calls = self.layer.module, self.layer.forward.calls
        if calls == 1 or not module.rows or module.kind == "Embedding" or self._calls_until_formed() >= calls:
            return 0, 0
        return self._calls_until_formed() + 1, self.layer.forward.element_bytes * n * module.weight

    def merged_norm_temporaries(self, n: int) -> int:
        """Returns the bytes of temporaries for the norms of a layer that runs several times.

        The pairs of its calls are concatenated, for as many samples at a time as fit into half of the workspace.
        Of convolutions, whose tokens are not merged, the gradients of each call are formed and added.
        """
        calls = self.kept_calls(n)
        if calls < self.layer.forward.calls or self.layer.is_convolution:  # the sum is a copy of both its terms
            formed = self.layer.module.weight * cost.accumulated_itemsize(self.layer.forward.element_bytes)
            return 3 * formed * max(cost.fit(WORKSPACE_BYTES, 2 * formed, n), 1) if calls else 0
        pair = self._pair_bytes(1)
        samples = max(cost.fit(WORKSPACE_BYTES // 2, pair, n), 1)
        return samples * pair + self.norm_temporaries(samples) if pair else 0

    def multiplies_merged(self, n: int) -> bool:
        """Returns whether matrix products find the norms of a layer that runs several times."""
        forward, is_convolution = self.layer.forward, self.layer.is_convolution
        if not self.layer.module.rows or self.layer.module.kind == "Embedding":
            return False
        if self.kept_calls(n) < forward.calls or is_convolution:  # the gradient of one token is an outer product
            return bool(self.kept_calls(n)) and (is_convolution or forward.tokens > forward.calls)
        return not self.in_registers or self._choice(n, False).norm == "gradient"

    def _normalized(self, n: int) -> int:
        """Returns the temporaries of a norm's gradients, of as many samples as fit.

        These are the normalized input and, if it has another dtype than the output, its cast and their product.
        """
        forward, kind = self.layer.forward, self.layer.module.kind
        sample = self.layer.scale(forward.output_bytes, 1)
        numbers = sample // forward.element_bytes
        # The number of GroupNorm's groups is not known. One is the worst case: its kernel then reads a whole sample.
        if kind == "GroupNorm" and self.in_registers and cost.has_group_norm_kernel(numbers, 1):
            return 0
        features = self.layer.module.weight
        if kind in ("LayerNorm", "RMSNorm") and self.in_registers and forward.element_bytes <= 4 and features:
            of_kernel = cost.token_norm_bytes(n, numbers // features, features, has_mean=kind == "LayerNorm")
            if of_kernel is not None and of_kernel <= WORKSPACE_BYTES:
                return of_kernel
        unit = cost.norm_bytes(numbers, forward.element_bytes)
        samples = cost.fit(WORKSPACE_BYTES, unit, n)
        copies = 1 if forward.input_element_bytes in (0, forward.element_bytes) else 3
        return copies * (samples * sample if samples else WORKSPACE_BYTES * sample // unit)

    def _embedding_norms(self, n: int) -> int:
        """Returns the temporaries of an embedding's norms: sorted indices, and sums over equal indices."""
        forward = self.layer.forward
        tokens, itemsize = forward.tokens, forward.element_bytes
        width = self.layer.scale(forward.output_bytes, 1) // (tokens * itemsize)
        summed = 8 if self.in_registers and tokens > 1 else cost.accumulated_itemsize(itemsize)
        sample = cost.embedding_sample_bytes(tokens, width, itemsize, summed)
        workspace = WORKSPACE_BYTES
        if summed > itemsize and self.in_registers:
            workspace = cost.embedding_workspace(n, tokens, width, itemsize, sample, workspace)
        return min(n * sample, workspace)

    def sum_temporaries(self, n: int) -> int:
        """Returns the temporaries of forming the clipped sum, without what is kept and without the sum itself."""
        layer, forward, module = self.layer, self.layer.forward, self.layer.module
        if not self.keeps_pair(n):
            return 0
        if module.kind == "Embedding":  # the scaled copy of g
            return min(layer.scale(forward.output_bytes, n), WORKSPACE_BYTES // 2)
        rows, columns = module.rows // module.groups, module.columns
        itemsize = forward.element_bytes
        token = itemsize * module.groups * forward.tokens  # bytes of one row or column of a sample
        wide = token * max(rows, columns)
        is_low = itemsize < cost.accumulated_itemsize(itemsize)
        splits = is_low and self.in_registers
        scaled = token * cost.copied_numbers(rows, columns, itemsize, folds=True, splits=splits)
        second = cost.accumulated_itemsize(itemsize) * module.weight if splits else 0  # of the two products
        if not layer.is_convolution:
            return min(n * scaled, WORKSPACE_BYTES) + second
        # Samples and tokens are folded into one dimension, which copies g and the unfolded input.
        samples, unfolded, input_copies = self._unfold(n, WORKSPACE_BYTES // 2)
        folded_wide = wide if splits or not is_low else 0
        copied = scaled + folded_wide if forward.tokens > 1 else scaled
        most = WORKSPACE_BYTES // 2 if unfolded else WORKSPACE_BYTES
        if module.groups == 1 and samples == n > 1 and n * copied <= most:  # one of them is scaled, too
            return unfolded + max(input_copies, n * copied) + second
        unit = token * cost.copied_numbers(rows, columns, itemsize, folds=False, splits=splits)
        folded = max(cost.fit(WORKSPACE_BYTES // 2, unit, samples), 1)
        copies = (folded_wide if is_low else token * (rows + columns)) if folded > 1 else 0
        # The sum over some samples.
        part = cost.accumulated_itemsize(itemsize) * module.weight if folded < n else 0
        return unfolded + max(input_copies, folded * (scaled + copies) + part) + second

    def keeps_pair(self, n: int) -> bool:
        """Returns whether the layer keeps its input and its output's gradient instead of per-sample gradients."""
        module, calls = self.layer.module, self.layer.forward.calls
        if module.kind in REPEATED:
            return False
        if calls > 1 and module.rows and module.kind != "Embedding":
            return calls <= self._calls_until_formed()
        return module.kind == "Embedding" or (bool(module.rows) and self._choice(n, True).keep == "pair")

    def _choice(self, n: int, keep: bool) -> cost.Choice:
        forward, module = self.layer.forward, self.layer.module
        return cost.choose(
            n * module.groups,
            forward.tokens,
            module.rows // module.groups,
            module.columns,
            forward.element_bytes,
            pair_elements=self.layer.scale(forward.input_bytes + forward.output_bytes, n) // forward.element_bytes,
            keep=keep,
        )

    def _unfold(self, n: int, ceiling: int) -> tuple[int, int, int]:
        """Returns how many samples a convolution unfolds at a time, and the bytes that this needs.

        Returns:
            The number of samples, the bytes of their unfolded input, and the bytes of copies of their input. If the
            layer runs several times, the inputs of all its calls are unfolded.
        """
        layer, forward, module = self.layer, self.layer.forward, self.layer.module
        if not layer.is_convolution:
            return n, 0, 0
        channels, taps, itemsize = (
            module.columns // module.kernel_positions,
            module.kernel_positions,
            forward.element_bytes,
        )
        calls = forward.calls
        # positions of the input
        size = layer.scale(forward.input_bytes, 1) // (itemsize * channels * module.groups * calls)
        padded = self._padded(size)
        unfolding = cost.Unfolding(
            samples=n,
            groups=module.groups,
            channels=channels,
            taps=taps,
            tokens=forward.tokens // calls,
            padded=padded,
            copied=padded if padded > size and taps > 1 else 0,
            itemsize=itemsize,
            is_view=taps == 1 and forward.tokens == size * calls,
        )
        if unfolding.is_view:
            return n, 0, 0
        samples, groups, channels = n, module.groups, unfolding.channels
        if not unfolding.fits(ceiling // calls):
            samples, groups, channels = unfolding.part(ceiling // calls)
        unit = itemsize * samples * groups * max(channels, 1)
        return samples, unit * taps * forward.tokens, unit * unfolding.copied * calls

    def _padded(self, size: int) -> int:
        """Returns the number of positions of a padded input, for square images and kernels.

        The padding and the stride are the smallest that lead from the input's size to the output's.

        Args:
            size: the number of positions before padding.
        """
        module = self.layer.module
        dimensions = int(module.kind[-2])  # of Conv1d, ConvTranspose2d, ...
        outputs, inputs, kernel = (
            round(positions ** (1 / dimensions))
            for positions in (self.layer.forward.tokens // self.layer.forward.calls, size, module.kernel_positions)
        )
        for padding in range(kernel):
            span = inputs + 2 * padding - kernel
            if any(span // stride + 1 == outputs for stride in range(1, inputs + 1)):
                return int((inputs + 2 * padding) ** dimensions)
        return size


def with_repeated_forward(layer: Layer, layers: Sequence[Layer]) -> Layer:
    """Returns the layer with the tensors that flash_clip keeps of its repeated forward, if it has no rule for it.

    If it contains other layers, these do not save their inputs, because their weights need no gradients.
    """
    inside = [each for each in layers if each.name.startswith(f"{layer.name}." if layer.name else "")]
    inside = [each for each in inside if each is not layer]
    if not inside and layer.module.sampled_in == layer.name and layer.module.kind not in REPEATED:
        return replace(layer, repeated_forward=layer.activations + layer.largest_gradients(on_gpu=False))
    if not inside:
        return layer
    inputs = sum(min(each.forward.input_bytes, each.activations) for each in inside if each.module.rows)
    passed = max(each.passed_gradients(each.forward.samples, False) for each in inside)
    kept = sum(each.activations for each in inside) - inputs + layer.activations
    return replace(layer, repeated_forward=max(kept, 0) + passed)


def first_formed(cell: Sequence[tuple[Layer, FlashClip]], n: int, samples: int) -> dict[str, int]:
    """Returns the parts of the instant in which the pairs of a recurrent cell first become per-sample gradients.

    The layers of a cell get there at the same call, one after the other, and the last one adds the gradients of two
    calls in a third tensor, beside the gradients of the outputs.

    Args:
        cell: the layers of the cell, in forward order.
        n: the number of samples.
        samples: the number of samples that the layers' activations are for.

    Returns:
        Bytes by name of the part, or nothing if the pairs are not formed in the middle of the cell's backward.
        `activations` are tensors that the calls before have released.
    """
    formed = [clip.first_formed(n) for _, clip in cell]
    if not all(calls for calls, _ in formed):
        return {}
    last, (calls, most) = cell[-1][0], max(formed, key=lambda each: each[1])
    released = sum(layer.activations for layer, _ in cell) * calls // last.forward.calls
    return {
        "activations": released * n // max(samples, 1),
        "per_sample_gradients": sum(size for _, size in formed),
        "temp_matrices": 2 * most,
        "backprop_copies": last.scale(last.forward.output_bytes, n) * calls // last.forward.calls,
        # The gradient of the cell's outputs, which are its next calls' inputs, is live until the first call's.
        "backward_temporaries": last.passed_gradients(n, False) + last.scale(last.forward.input_bytes, n),
    }
