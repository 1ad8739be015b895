# SPDX-License-Identifier: Apache-2.0
"""Bytes that flash_clip takes for one layer and `n` samples, from its shapes alone. Source: opacus_memprof.clipping,
read line by line.

s is the bytes of an element of the output's gradients g, x the input, T the tokens of a sample (a convolution's output
positions), G its groups, K the positions of its kernel. A weight of p x d elements is G matrices of p/G x d; a
convolution has c = G d / K input channels, so that its unfolded input is s n c K T = s n G d T bytes.
"""

from dataclasses import dataclass

from opacus_memprof.analysis.oom.layers import NORMS, Layer
from opacus_memprof.clipping import cost

CEILING = 256 * 2**20  # flash_clip's own, on the temporaries of a layer
_SUM = 4  # bytes of an element of norms and sums


@dataclass(frozen=True)
class FlashClip:
    """Of `layer`. `fused`: Gram products are formed in a GPU's registers; elsewhere two tiles of them in memory."""

    layer: Layer
    fused: bool

    def kept(self, n: int) -> int:
        """From the layer's backward until its clipped sum is formed."""
        forward = self.layer.forward
        pair = self.layer.of(forward.input_bytes + forward.output_bytes, n) if self._keeps_pair(n) else 0
        return pair + self.made(n)

    def made(self, n: int) -> int:
        """What of that is new in the layer's backward: of a pair, x is an activation and g flows anyway."""
        forward, module = self.layer.forward, self.layer.module
        wide = max(forward.width, _SUM)
        if module.kind in NORMS:
            return wide * n * self.layer.elements
        weight = 0 if self._keeps_pair(n) else module.weight
        bias = 0 if forward.tokens == 1 and not self.layer.convolves else module.bias  # of a single token it is g
        return n * (forward.width * weight + wide * bias)

    def norms(self, n: int, *, keep: bool = True) -> int:
        """Temporaries of the per-sample norms. Without `keep` (Opacus' ghost clipping with these norm samplers)
        nothing outlives them."""
        layer, forward, module = self.layer, self.layer.forward, self.layer.module
        if module.kind in NORMS:  # one normalised input, of which three are reckoned with
            sample = layer.of(forward.output_bytes, 1)
            return min(sample * max(CEILING // (3 * sample), 1), sample * n, CEILING // 3)
        if module.kind == "Embedding":  # of the indices, sorted; and the rows of equal ones added up
            return min(n * forward.tokens * _INDEX + layer.of(forward.output_bytes, n), CEILING)
        if not module.rows:
            return 0
        choice = self._choice(n, keep)
        if keep and choice.keep == "gradient":
            samples, unfolded, copies = self._unfold(n, CEILING)
            part = forward.width * samples * module.weight if samples < n else 0  # which joins those of all samples,
            first = unfolded + max(copies - forward.width * n * module.weight, part)  # made with the first part
            return max(first, (unfolded + copies) * min(n - samples, samples) // samples)
        ceiling = CEILING // 2 if layer.convolves else CEILING  # one half for what is unfolded
        samples, unfolded, copies = self._unfold(n, ceiling)
        if choice.norm == "gradient":
            return unfolded + max(copies, min(forward.width * samples * module.weight, ceiling))
        return unfolded + max(copies, self._gram(samples * module.groups, ceiling))

    def sums(self, n: int) -> int:
        """Temporaries of the clipped sum, besides what is kept and the sum."""
        layer, forward, module = self.layer, self.layer.forward, self.layer.module
        if not self._keeps_pair(n):
            return 0
        if module.kind == "Embedding":  # g, scaled
            return min(layer.of(forward.output_bytes, n), CEILING // 2)
        rows, columns = module.rows // module.groups, module.columns
        token = forward.width * module.groups * forward.tokens  # bytes of one row or column of a sample
        scaled = token * min(rows, columns)
        if not layer.convolves:
            return min(n * scaled, CEILING)
        # Samples and tokens become one dimension, which neither g nor the unfolded input has next to each other.
        samples, unfolded, made = self._unfold(n, CEILING // 2)
        folded = max(min(samples, CEILING // 2 // (2 * token * (rows + columns))), 1)
        copies = token * (rows + columns) if folded > 1 else 0
        part = forward.width * module.weight if folded < n else 0  # of some samples, before it joins the others'
        return unfolded + max(made, folded * (scaled + copies) + part)

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
            forward.width,
            pair_elements=self.layer.of(forward.input_bytes + forward.output_bytes, n) // forward.width,
            keep=keep,
        )

    def _unfold(self, n: int, ceiling: int) -> tuple[int, int, int]:
        """Samples that are unfolded at a time, the bytes of their unfolded input, and what making it takes besides: as
        many as fit with two copies of their input, and where not even one does, some of its channels. torch's im2col
        makes a result of the input's size before it knows better. A kernel of one position unfolds nothing."""
        layer, forward, module = self.layer, self.layer.forward, self.layer.module
        if not layer.convolves:
            return n, 0, 0
        unfolded = forward.width * module.groups * module.columns * forward.tokens
        given = layer.of(forward.input_bytes, 1)
        samples = max(min(n, ceiling // (unfolded + 2 * given)), 1)
        if module.taps == 1:  # a view, unless strided or padded
            return samples, 0 if unfolded == given else samples * unfolded, 0
        share = min(samples * unfolded, ceiling) / (samples * unfolded)
        return samples, int(share * samples * unfolded), int(share * samples * given)

    def _gram(self, count: int, ceiling: int) -> int:
        """Of `count` products: two matrices of T x T each, as many as fit at a time; or a number for every tile."""
        tokens = self.layer.forward.tokens
        if tokens == 1:
            return 0
        if self.fused and self.layer.forward.width <= _SUM:
            side = 128 if tokens >= 512 else 64 if tokens > 32 else 32
            return _SUM * count * (-(-tokens // side)) ** 2
        return min(2 * _SUM * count * tokens**2, ceiling)


_INDEX = 64  # bytes for each token, as reckoned there
