# SPDX-License-Identifier: Apache-2.0
"""The bytes that flash_clip needs for one layer and `n` samples, from its shapes. Source: opacus_memprof.clipping.

s is the bytes of an element of the output's gradients g, x the input, T the tokens of a sample (a convolution's output
positions), G its groups, K the positions of its kernel. A weight of p x d elements is G matrices of p/G x d. A
convolution has c = G d / K input channels, so its unfolded input has s n c K T = s n G d T bytes.
"""

from dataclasses import dataclass

from opacus_memprof.analysis.oom.layers import NORMS, Layer
from opacus_memprof.clipping import cost

WORKSPACE_BYTES = 256 * 2**20  # flash_clip's default ceiling on the temporaries of a layer
_INDEX_BYTES = 64  # for each token of an embedding, as in clipping.layers.embedding
_SUM_BYTES = 4  # of an element of norms and sums


@dataclass(frozen=True)
class FlashClip:
    """What flash_clip needs for a layer.

    Attributes:
        layer: the layer.
        in_registers: Gram products are formed in a GPU's registers (Triton); otherwise two tiles are formed in memory.
    """

    layer: Layer
    in_registers: bool

    def kept_bytes(self, n: int) -> int:
        """The bytes that are kept from the layer's backward until its clipped sum is formed."""
        forward = self.layer.forward
        pair = self.layer.scale(forward.input_bytes + forward.output_bytes, n) if self._keeps_pair(n) else 0
        return pair + self.new_bytes(n)

    def shared_bytes(self, n: int) -> int:
        """The part of `kept_bytes` that is also in the previous layer's activations: the input, if it is that layer's
        output."""
        layer, input_bytes = self.layer, self.layer.forward.input_bytes
        is_output = not layer.forward.from_leaf and layer.saved_before < input_bytes
        return layer.scale(input_bytes, n) if is_output and self._keeps_pair(n) else 0

    def new_bytes(self, n: int) -> int:
        """The part of `kept_bytes` that the layer's backward allocates. Not a pair: x is an activation, and g exists in
        backward anyway."""
        forward, module = self.layer.forward, self.layer.module
        wide = max(forward.element_bytes, _SUM_BYTES)
        if module.kind in NORMS:
            return wide * n * self.layer.elements
        weight = 0 if self._keeps_pair(n) else module.weight
        # With a single token the bias' gradient is g itself.
        bias = 0 if forward.tokens == 1 and not self.layer.is_convolution else module.bias
        return n * (forward.element_bytes * weight + wide * bias)

    def norm_temporaries(self, n: int, *, keep: bool = True) -> int:
        """The temporaries of computing per-sample norms. `keep` is False in Opacus' ghost clipping with these norm
        samplers, where nothing is kept."""
        layer, forward, module = self.layer, self.layer.forward, self.layer.module
        if module.kind in NORMS:  # one normalized input; flash_clip sizes its tiles for three
            sample = layer.scale(forward.output_bytes, 1)
            # How many groups GroupNorm has is not known. With one, its kernel would go through all of a sample.
            is_small = sample <= cost.GROUP_NORM_NUMBERS * forward.element_bytes
            if module.kind == "GroupNorm" and self.in_registers and is_small and forward.element_bytes <= _SUM_BYTES:
                return 0
            return min(sample * max(WORKSPACE_BYTES // (3 * sample), 1), sample * n, WORKSPACE_BYTES // 3)
        if module.kind == "Embedding":  # sorted indices, and sums of rows with equal indices
            return min(n * forward.tokens * _INDEX_BYTES + layer.scale(forward.output_bytes, n), WORKSPACE_BYTES)
        if not module.rows:
            return 0
        choice = self._choice(n, keep)
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
            return unfolded + max(copies, min(forward.element_bytes * samples * module.weight, ceiling))
        return unfolded + max(copies, self._gram(samples * module.groups, ceiling))

    def sum_temporaries(self, n: int) -> int:
        """The temporaries of forming the clipped sum, without what is kept and without the sum itself."""
        layer, forward, module = self.layer, self.layer.forward, self.layer.module
        if not self._keeps_pair(n):
            return 0
        if module.kind == "Embedding":  # the scaled copy of g
            return min(layer.scale(forward.output_bytes, n), WORKSPACE_BYTES // 2)
        rows, columns = module.rows // module.groups, module.columns
        token = forward.element_bytes * module.groups * forward.tokens  # bytes of one row or column of a sample
        narrow, wide = sorted((token * rows, token * columns))
        # Low precision is scaled in float32: on a GPU that takes two products, and elsewhere both operands are cast.
        is_low = forward.element_bytes < _SUM_BYTES
        if is_low and not self.in_registers:
            scaled, folded_wide = 2 * (narrow + wide), 0
        else:
            scaled, folded_wide = 4 * narrow if is_low else narrow, wide
        second = _SUM_BYTES * module.weight if is_low and self.in_registers else 0  # of the two products
        if not layer.is_convolution:
            return min(n * scaled, WORKSPACE_BYTES) + second
        # Samples and tokens are folded into one dimension, which copies g and the unfolded input.
        samples, unfolded, input_copies = self._unfold(n, WORKSPACE_BYTES // 2)
        copied = scaled + folded_wide if forward.tokens > 1 else scaled
        most = WORKSPACE_BYTES // 2 if unfolded else WORKSPACE_BYTES
        if module.groups == 1 and samples == n > 1 and n * copied <= most:  # one of them is scaled, too
            return unfolded + max(input_copies, n * copied)
        unit = scaled + folded_wide if is_low else 2 * (narrow + wide)
        folded = max(min(samples, WORKSPACE_BYTES // 2 // unit), 1)
        copies = (folded_wide if is_low else narrow + wide) if folded > 1 else 0
        # The sum over some samples.
        part = max(forward.element_bytes, _SUM_BYTES) * module.weight if folded < n else 0
        return unfolded + max(input_copies, folded * (scaled + copies) + part)

    def _keeps_pair(self, n: int) -> bool:
        kind = self.layer.module.kind
        return kind == "Embedding" or (bool(self.layer.module.rows) and self._choice(n, True).keep == "pair")

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
        """How a convolution's input is unfolded: the number of samples at a time, the bytes of their unfolded input,
        and the bytes of copies of their input.

        All samples are unfolded at once if they fit with what is copied of their input, which padding does; otherwise
        as many as fit with two copies of their padded input; if not even one fits, some of its channels. A 1x1 kernel
        that is applied everywhere unfolds nothing.
        """
        layer, forward, module = self.layer, self.layer.forward, self.layer.module
        if not layer.is_convolution:
            return n, 0, 0
        unfolded = forward.element_bytes * module.groups * module.columns * forward.tokens
        input_bytes = layer.scale(forward.input_bytes, 1)
        if module.kernel_positions == 1 and unfolded == input_bytes:
            return n, 0, 0
        padded = self._padded_bytes(unfolded, input_bytes)
        copies = padded if padded > input_bytes and module.kernel_positions > 1 else 0
        fits = n * (unfolded + copies) <= ceiling
        samples = n if fits else max(min(n, ceiling // (unfolded + 2 * padded)), 1)
        share = min(1.0, ceiling / (samples * unfolded))
        return samples, int(share * samples * unfolded), int(share * samples * copies)

    def _padded_bytes(self, unfolded: int, input_bytes: int) -> int:
        """The bytes of a sample's padded input, for images and kernels as wide as high: with the least padding and
        stride that lead from its size to the output's."""
        forward, module = self.layer.forward, self.layer.module
        channel = unfolded / (module.kernel_positions * forward.tokens)  # bytes of all channels at one position
        dimensions = int(module.kind[4])  # of Conv1d, Conv2d, Conv3d
        outputs, inputs, kernel = (
            round(size ** (1 / dimensions)) for size in (forward.tokens, input_bytes / channel, module.kernel_positions)
        )
        for padding in range(kernel):
            span = inputs + 2 * padding - kernel
            if any(span // stride + 1 == outputs for stride in range(1, inputs + 1)):
                grown: float = ((inputs + 2 * padding) / inputs) ** dimensions
                return round(input_bytes * grown)
        return input_bytes

    def _gram(self, count: int, ceiling: int) -> int:
        """The temporaries of `count` Gram products: two T x T matrices each, as many as fit; or, in registers, a number
        for every tile."""
        tokens = self.layer.forward.tokens
        if tokens == 1:
            return 0
        if self.in_registers and self.layer.forward.element_bytes <= _SUM_BYTES:
            side = 128 if tokens >= 512 else 64 if tokens > 32 else 32
            return _SUM_BYTES * count * (-(-tokens // side)) ** 2
        return min(2 * _SUM_BYTES * count * tokens**2, ceiling)
