# SPDX-License-Identifier: Apache-2.0
"""What a whole training step holds at once, for a mode and a number of samples that need not be the run's own.

A step is a row of instants, each a sum of named parts in bytes; its peak is the largest. Source: the order in which
autograd frees and Opacus 1.6 makes tensors (forward, backward layer by layer from the last, clip, noise, update).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from opacus_memprof.analysis.oom.flash import FlashClip
from opacus_memprof.analysis.oom.layers import Layer

SAMPLES = ("hooks", "functorch", "ew")  # the modes that keep per-sample gradients


@dataclass(frozen=True)
class Instant:
    """Bytes by name of the part. They are settled to come, unless seen."""

    phase: str
    module: str
    parts: Mapping[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Step:
    """Bytes throughout.

    Attributes:
        mode: as workload.Workload.mode.
        mean: as there.
        layers: in the order of the forward pass. `samples` is theirs.
        resident: lives all the time: parameters, buffers, whatever else does not grow with the batch.
        trained: of the parameters that are trained; `largest` of the largest layer among them.
        states: of the optimizer, once it has made them. `update`: temporaries of its step.
        tail: after the last layer, of the loss, from forward to backward. `inputs`: the batch.
        keeps_gradients: p.grad lives from one step to the next.
        processors: multiprocessors of the GPU, 0 on the CPU.
        drops_gradients: p.grad is dropped as soon as autograd has made it.
        squares: ghost clipping makes matrices of tokens by tokens.
    """

    mode: str
    mean: bool
    samples: int
    layers: Sequence[Layer]
    resident: int
    trained: int
    largest: int
    states: int
    update: int
    tail: int
    inputs: int
    keeps_gradients: bool
    processors: int = 0
    drops_gradients: bool = False
    squares: bool = True

    @property
    def gpu(self) -> bool:
        return self.processors > 0

    def changed(self, **changes: object) -> "Step":
        return replace(self, **changes)  # type: ignore[arg-type]

    def instants(self, n: int, *, accumulates: bool = False) -> Iterator[Instant]:
        """With n samples at a time. `accumulates`: several physical batches make a logical one, and its sum lives
        through all of them."""
        base = {"resident": self.resident, "optimizer_states": self.states}
        summed = {"summed_gradients": self.trained} if accumulates and self.mode else {}
        if self.mode in ("ghost", "fast"):
            backward = self._two_passes(n)
        elif self.mode == "flash_clip":
            backward = self._flash(n, accumulates=accumulates)
        else:
            backward = self._one_pass(n)
        for instant in backward:
            yield replace(instant, parts={**base, **summed, **instant.parts})
        yield from self._update(n, {**base, "inputs": self._scale(self.inputs, n)})

    def _scale(self, size: int, n: int) -> int:
        return size * n // max(self.samples, 1)

    def _activations(self, n: int) -> int:
        return self._scale(sum(layer.activations for layer in self.layers), n)

    def _gradients_before(self) -> int:
        return self.trained if self.keeps_gradients and not self.drops_gradients else 0

    def _loss(self, n: int, gradients: int) -> Instant:
        """Forward has ended, and backward begins at the loss: the gradient of the last layer's output is made."""
        output = self._scale(self.layers[-1].forward.output_bytes, n) if self.layers else 0
        alive = self._activations(n) + self._scale(self.tail + self.inputs, n)
        return Instant("forward", "", {"activations": alive, "gradients": gradients, "backward_temporaries": output})

    def _one_pass(self, n: int) -> Iterator[Instant]:
        """hooks, functorch, ew, no_op: per-sample gradients pile up while activations go. Without Opacus: neither."""
        private = self.mode not in ("", "other")
        yield self._loss(n, self._gradients_before())
        alive = self._activations(n) + self._scale(self.inputs, n)
        made = samples = 0
        for layer in reversed(self.layers):
            if not self.drops_gradients:
                made += layer.module.bytes
            parts = {"activations": alive, "gradients": max(made, self._gradients_before())}
            parts = {**parts, "per_sample_gradients": samples}
            yield self._node(layer, n, parts)
            if private:
                yield self._bias(layer, n, {**parts, "temp_matrices": layer.gradients(n)})
            yield Instant(
                "backward",
                layer.name,
                {
                    **parts,
                    "backward_temporaries": layer.flowing(n, self.mean and private),
                    "temp_matrices": layer.sampler(n) if private else 0,
                },
            )
            samples += layer.gradients(n) if private else 0
            yield self._between(layer, n, {**parts, "per_sample_gradients": samples})
            alive -= self._scale(layer.activations, n)

    def _between(self, layer: Layer, n: int, parts: Mapping[str, int]) -> Instant:
        """Operations without parameters: the gradients of output and input of the one that saved the most."""
        flowing = 2 * self._scale(layer.largest, n) + self._scale(layer.passing, n)
        return Instant("backward", layer.name, {**parts, "backward_temporaries": flowing})

    def _node(self, layer: Layer, n: int, parts: Mapping[str, int]) -> Instant:
        """The layer's own backward: the gradients of its output and input, and a library's workspace."""
        workspace = 0 if layer.forward.from_leaf else layer.relayout(n)
        if self.mode != "flash_clip":
            workspace = max(workspace, layer.sums(n, self.processors, by_sample=False))
        flowing = layer.flowing(n, False)
        return Instant(
            "backward", layer.name, {**parts, "backward_temporaries": flowing, "library_workspace": workspace}
        )

    def _bias(self, layer: Layer, n: int, parts: Mapping[str, int]) -> Instant:
        """Per-sample gradients of a bias."""
        temporaries = layer.flowing(n, self.mean)
        workspace = layer.sums(n, self.processors, by_sample=True)
        return Instant(
            "backward", layer.name, {**parts, "backward_temporaries": temporaries, "library_workspace": workspace}
        )

    def _two_passes(self, n: int) -> Iterator[Instant]:
        """ghost: what autograd saved survives the pass for the norms, and goes in the one for the gradients."""
        yield self._loss(n, self._gradients_before())
        alive = self._activations(n) + self._scale(self.tail + self.inputs, n)
        made = 0
        for layer in reversed(self.layers):
            made += layer.module.bytes
            norms = layer.ghost(n) if self.mode == "ghost" else layer.sampler(n)
            parts = {"activations": alive, "gradients": max(made, self._gradients_before())}
            if not self.squares:
                norms = FlashClip(layer, fused=self.gpu).norms(n, keep=False)
                yield self._bias(layer, n, parts)
            yield self._node(layer, n, parts)
            yield Instant(
                "backward",
                layer.name,
                {**parts, "backward_temporaries": layer.flowing(n, self.mean), "temp_matrices": norms},
            )
            yield self._between(layer, n, parts)
        for layer in reversed(self.layers):
            node = self._node(layer, n, {"activations": alive, "gradients": self.trained})
            temporaries = node.parts["backward_temporaries"] + layer.module.bytes
            yield Instant("second_backward", layer.name, {**node.parts, "backward_temporaries": temporaries})
            alive -= self._scale(layer.activations, n)

    def _flash(self, n: int, *, accumulates: bool) -> Iterator[Instant]:
        """flash_clip: autograd makes no gradients. Each layer keeps what its clipped sum will need, before its own
        backward; the sums are formed from the first layer to the last, and let go of what was kept."""
        yield self._loss(n, 0)
        alive = self._activations(n) + self._scale(self.inputs, n)
        layers = [(layer, FlashClip(layer, fused=self.gpu)) for layer in self.layers]
        kept = 0
        for layer, clip in reversed(layers):
            parts = {"activations": alive, "per_sample_gradients": kept + clip.made(n)}
            output = layer.of(layer.forward.output_bytes + layer.passing, n)
            temporaries = {**parts, "backward_temporaries": output}
            summing = layer.sums(n, self.processors, by_sample=True)
            yield Instant("backward", layer.name, {**temporaries, "library_workspace": summing})
            yield Instant("backward", layer.name, {**temporaries, "temp_matrices": clip.norms(n)})
            yield self._node(layer, n, parts)
            yield self._between(layer, n, parts)
            kept += clip.kept(n)
            alive -= self._scale(layer.activations, n)
        summed = self.trained if accumulates else 0
        for layer, clip in layers:
            sums = {"summed_gradients": summed + layer.module.bytes, "inputs": self._scale(self.inputs, n)}
            parts = {"per_sample_gradients": kept, **sums}
            yield Instant("clip", layer.name, {**parts, "clipping_temporaries": clip.sums(n)})
            kept -= clip.kept(n)
            summed += 0 if accumulates else layer.module.bytes

    def _update(self, n: int, base: Mapping[str, int]) -> Iterator[Instant]:
        """Clipped sums, noise, and the optimizer's own step. Noise is the largest parameter's twice, zeros and noise,
        and one more while the one before lives."""
        trained = self.trained
        held = sum(layer.gradients(n) for layer in self.layers) if self.mode in SAMPLES else 0
        made = 0 if self.mode == "flash_clip" else trained
        if self.mode:
            parts = {**base, "per_sample_gradients": held, "summed_gradients": trained}
            gradients = 0 if self.drops_gradients else made
            casts = max((layer.cast(n) for layer in self.layers), default=0) if self.mode in SAMPLES else 0
            yield Instant("clip", "", {**parts, "gradients": gradients, "clipping_temporaries": casts})
            noise = 2 * self.largest
            last = trained if self.drops_gradients else made
            yield Instant("noise", "", {**parts, "gradients": last, "noise": noise})
            made = trained if self.mode != "flash_clip" else 0
            yield Instant("optimizer_step", "", {**parts, "gradients": made, "optimizer_temporaries": self.update})
        else:
            yield Instant("optimizer_step", "", {**base, "gradients": trained, "optimizer_temporaries": self.update})
