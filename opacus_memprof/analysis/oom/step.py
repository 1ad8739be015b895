# SPDX-License-Identifier: Apache-2.0
"""A model of the memory of a whole training step, for any mode and any number of samples.

A step is a sequence of instants, each a sum of named parts in bytes; its peak is the largest. Source: the order in
which autograd frees and Opacus 1.6 allocates tensors (forward, backward layer by layer from the last, clip, noise,
update).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from opacus_memprof.analysis.oom.flash import FlashClip, first_formed, with_repeated_forward
from opacus_memprof.analysis.oom.layers import Layer, adds_outputs, as_sampled, cell_of
from opacus_memprof.clipping.cost import draws_in_place

PER_SAMPLE_MODES = ("hooks", "functorch", "ew")  # the modes that keep per-sample gradients
# Samples from which torch's expanded weights unfold a convolution's input; fewer are the groups of one convolution.
# Source: torch/nn/utils/_expanded_weights/conv_utils.py, THRESHOLD.
_UNFOLDED_FROM = 32
_OPACUS_SAMPLERS = ("hooks", "functorch", "ghost", "fast")


@dataclass(frozen=True)
class Instant:
    """A predicted instant: bytes by name of the part. `is_loss`: a backward pass of the loss, before that of layers."""

    phase: str
    module: str
    parts: Mapping[str, int]
    is_loss: bool = False

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Step:
    """A training step. Sizes are in bytes.

    Attributes:
        mode: see TrainingShapes.
        mean_loss: see TrainingShapes.
        samples: of the batch that the sizes are for.
        layers: in forward order.
        resident: parameters, buffers and all else that lives through all steps.
        others: the part of it that are gradients and optimizer states of other models, by category.
        made: what the program computes of each batch outside of the model, or by other models.
        unused_graphs: the part of it that no backward pass frees, and that lives until the next step has made its own.
        made_workspace: what else is live at the peak of making it, as a library's workspace.
        trained: the parameters that are trained.
        largest: those of the largest layer.
        states: the optimizer's states, once they exist.
        update: temporaries of the optimizer's step.
        loss: activations of the loss, from forward to backward.
        inputs: the batch.
        keeps_gradients: p.grad lives from one step to the next.
        clears_late: zero_grad comes after the forward pass, in which what the step before has left is live.
        output: the model's output, which a variable of the program keeps alive through the step.
        carried: what the variable keeps through the next forward pass, with a cache of keys and values.
        logits: the same, if nothing is known of the variable.
        tail: activations after the last layer, as of a frozen head, from forward to the beginning of backward.
        largest_in_tail: the largest block of them, in whose backward the gradients of output and input are as large.
        forward_peak: the most bytes of activations and temporaries in the forward pass; 0 if it is not known.
        product_peak: the same while a matrix product runs, which can need cuBLAS' workspace.
        multiprocessors: of the GPU; 0 on the CPU.
        workspace: cuBLAS' workspace, if it is not allocated yet.
        is_guessed: the activations of repeated units are guessed, because none has been seen as a whole.
        drops_gradients: p.grad is dropped as soon as autograd has accumulated it.
        forms_squares: ghost clipping forms T x T matrices of tokens by tokens.
        copies_samples: what a grad sampler returns is copied.
        recomputed: by layer, the activations that a checkpoint has recomputed and no backward has used yet.
        passes: forward passes before each backward pass, as of a siamese network. Activations are those of all of them.
    """

    mode: str
    mean_loss: bool
    samples: int
    layers: Sequence[Layer]
    resident: int
    trained: int
    largest: int
    states: int
    update: int
    loss: int
    inputs: int
    keeps_gradients: bool
    clears_late: bool = False
    others: Mapping[str, int] = field(default_factory=dict)
    made: int = 0
    unused_graphs: int = 0
    made_workspace: int = 0
    output: int = 0
    carried: int = 0
    logits: int = 0
    tail: int = 0
    largest_in_tail: int = 0
    forward_peak: int = 0
    product_peak: int = 0
    multiprocessors: int = 0
    workspace: int = 0
    is_guessed: bool = False
    drops_gradients: bool = False
    forms_squares: bool = True
    copies_samples: bool = True
    recomputed: Mapping[str, int] = field(default_factory=dict)
    passes: int = 1

    @property
    def on_gpu(self) -> bool:
        return self.multiprocessors > 0

    def with_changes(self, **changes: object) -> "Step":
        """Returns the step with other values of these attributes."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def in_mode(self, mode: str) -> "Step":
        """Returns the step in another mode, in which the program then trains its other private models, too."""
        freed = 0 if mode in PER_SAMPLE_MODES else self.others.get("per_sample_gradients", 0)
        if mode == "flash_clip":  # p.grad is a view of a clipped sum
            freed += min(self.others.get("summed_gradients", 0), self.others.get("gradients", 0))
        keeps = self.keeps_gradients and mode != "flash_clip"
        return replace(self, mode=mode, keeps_gradients=keeps, resident=self.resident - freed)

    def instants(self, n: int, *, accumulates: bool = False) -> Iterator[Instant]:
        """Yields the instants of the step with a physical batch of `n` samples.

        Args:
            n: the number of samples.
            accumulates: whether the batch is part of a logical batch, whose clipped sums are live in all parts.
        """
        if self.mode in _OPACUS_SAMPLERS and any(layer.module.sampled_in is not None for layer in self.layers):
            yield from replace(self, layers=as_sampled(self.layers)).instants(n, accumulates=accumulates)
            return
        base = {"resident": self.resident, "optimizer_states": self.states, "output": self._scale(self.output, n)}
        base["unattributed"] = self._scale(self.made, n)
        summed = {"summed_gradients": self.trained} if accumulates and self.mode else {}
        if self.unused_graphs:
            yield Instant("idle", "", {**summed, **self.in_call(n)})
        if self.mode in ("ghost", "fast"):
            backward = self._two_passes(n)
        elif self.mode == "flash_clip":
            step = replace(self, layers=[layer.without_captures() for layer in self.layers])
            backward = step._flash_clip(n, accumulates=accumulates)
        else:
            backward = self._one_pass(n)
        yield Instant("forward", "", {**base, **summed, **self._forward(n)})
        if self.clears_late:
            live = self._activations(n) + self._scale(self.tail + self.loss + self.inputs, n)
            left = {**summed, **self.left_in_forward(n)}
            yield Instant("forward", "", {**base, "activations": live, **left})
            # While the last product makes its output, a variable still has that of the step before.
            live = self._activations(n) + self._scale(self.logits + self.inputs, n)
            workspace = self._product_workspace(self.layers[-1])
            yield Instant("forward", "", {**base, "activations": live, "library_workspace": workspace, **left})
        for instant in backward:
            again = self._scale(self.recomputed.get(instant.module, 0), n) if "backward" in instant.phase else 0
            parts = {"recomputed_activations": again} if again else {}
            yield replace(instant, parts={**base, **summed, **instant.parts, **parts})
        yield from self._update(n, {**base, "inputs": self._scale(self.inputs, n)})

    def largest_block(self, n: int) -> int:
        """Returns the bytes of the largest block that a step with n samples allocates, as far as it is known."""
        sizes = [self._scale(max(layer.largest, layer.forward.output_bytes), n) for layer in self.layers]
        if self.mode in PER_SAMPLE_MODES:
            sizes += [layer.per_sample_gradients(n) for layer in self.layers]
        elif self.mode == "ghost":
            sizes += [layer.ghost_norms(n) for layer in self.layers]
        return max(sizes, default=0)

    def _scale(self, size: int, n: int) -> int:
        return size * n // max(self.samples, 1)

    def _activations(self, n: int) -> int:
        return self._scale(sum(layer.activations for layer in self.layers), n)

    def _kept_gradients(self) -> int:
        """Returns the bytes of p.grad from the step before."""
        return self.trained if self.keeps_gradients and not self.drops_gradients else 0

    def _forward(self, n: int) -> dict[str, int]:
        """Returns the parts of the forward pass' peak with n samples, in bytes."""
        captured = sum(layer.captured for layer in self.layers) if self.mode == "flash_clip" else 0
        live = self._scale(max(self.forward_peak - captured, 0) + self.inputs, n)
        workspace = 0
        if self.product_peak > captured:
            in_product = self._scale(self.product_peak - captured + self.inputs, n)
            live, workspace = max((live, 0), (in_product, self.workspace), key=sum)
        return {
            "activations": live,
            "output": self._scale(self.carried, n),
            "library_workspace": workspace,
            **self.left_in_forward(n),
        }

    def in_call(self, n: int) -> dict[str, int]:
        """Returns what lives when the call of another model ends, with the graph of the call before."""
        return {
            "resident": self.resident,
            "optimizer_states": self.states,
            **self.left_in_forward(n),
            "inputs": self._scale(2 * self.inputs, n),
            "unattributed": self._scale(self.made + self.unused_graphs, n),
            "library_workspace": self._scale(self.made_workspace, n),
        }

    def left_in_forward(self, n: int) -> dict[str, int]:
        """Returns what the step before has left, and lives in the forward pass."""
        return self._left_by_update(n) if self.clears_late else {"gradients": self._kept_gradients()}

    def _left_by_update(self, n: int) -> dict[str, int]:
        """Returns what lives from an update to the next zero_grad."""
        if not self.mode:
            return {"gradients": self.trained}
        summed = self._summed()
        is_view = self.mode == "flash_clip" and summed == self.trained  # flash_clip's p.grad, of summed_grad
        samples = self.mode in PER_SAMPLE_MODES
        return {
            "per_sample_gradients": sum(layer.per_sample_gradients(n) for layer in self.layers) if samples else 0,
            "summed_gradients": summed,
            "gradients": 0 if is_view else self.trained,
        }

    def _loss_backward(self, n: int, gradients: int) -> Instant:
        """Returns the beginning of backward: the computation of the gradient of the last layer's output.

        It is computed from the gradient of the tensors that the loss has saved. For cross entropy, these are log-
        probabilities, as many as the output has elements. Of an output in 16 bits, they are float32 or do not count;
        under autocast, the loss casts the output itself, and its gradient is in 16 bits again.
        """
        output = self.logits
        wide = output * 4 // self.layers[-1].forward.element_bytes if self.layers else 0
        output = wide if wide <= self.loss else output
        is_cast = any(layer.is_autocast for layer in self.layers)
        temporaries = self._scale(output if is_cast else output + min(self.loss, output), n)
        live = self._activations(n) + self._scale(self.tail + self.loss + self.inputs, n)
        # The loss may be computed by another model that is trained.
        workspace = self.workspace if self.others.get("optimizer_states") else 0
        in_tail = self._scale(2 * self.largest_in_tail, n)
        if in_tail > temporaries + workspace:
            temporaries, workspace = in_tail, 0
        parts = {"activations": live, "gradients": gradients, "backward_temporaries": temporaries}
        parts |= {"library_workspace": workspace}
        return Instant("backward", "", parts, is_loss=True)

    def _one_pass(self, n: int) -> Iterator[Instant]:
        """Yields the backward of a mode with one pass: hooks, functorch, ew, no_op, or a model without Opacus.

        Per-sample gradients accumulate while activations are released.
        """
        private = self.mode not in ("", "other")
        yield self._loss_backward(n, self._kept_gradients())
        live = self._activations(n) + self._scale(self.inputs, n)
        gradients = per_sample_gradients = 0
        begun: set[str] = set()
        for layer in [*reversed(self.layers)] * self.passes:  # the latest pass has its backward first
            copies = self.copies_samples and layer.name not in begun
            if private:
                begun |= cell_of(layer, self.layers)
                per_sample_gradients = self._samples_of(begun, n)
            if not self.drops_gradients:
                gradients = min(gradients + layer.module.bytes, self.trained)
            own = live - self._released_before(layer, n)
            parts = {"activations": own, "gradients": max(gradients, self._kept_gradients())}
            parts = {**parts, "per_sample_gradients": per_sample_gradients}
            # A gradient is added to one that exists when it has been formed.
            formed = layer.module.bytes if self._kept_gradients() and not private else 0
            yield self._layer_backward(layer, n, {**parts, "gradients": parts["gradients"] + formed})
            if private:
                yield self._bias_gradients(layer, n, {**parts, "temp_matrices": layer.per_sample_gradients(n)})
            yield Instant(
                "backward",
                layer.name,
                {
                    **parts,
                    "backward_temporaries": layer.passed_gradients(n, self.mean_loss and private),
                    "temp_matrices": self._sampler(layer, n, copies) if private else 0,
                },
            )
            if private:
                begun.add(layer.name)
                per_sample_gradients = self._samples_of(begun, n)
            after = {**parts, "activations": own - layer.input_before(n), "per_sample_gradients": per_sample_gradients}
            yield self._backward_before(layer, n, after)
            live -= self._scale(layer.activations, n) // self.passes

    def _released_before(self, layer: Layer, n: int) -> int:
        return self._scale(layer.output_before(), n)

    def _product_workspace(self, layer: Layer) -> int:
        """Returns the size of cuBLAS' workspace while the matrix products of a layer's backward run."""
        multiplies = layer.module.rows or layer.repeated_forward
        return self.workspace if multiplies and layer.module.kind != "Embedding" else 0

    def _sampler(self, layer: Layer, n: int, copies: bool) -> int:
        return layer.sampler(n, copies=copies, workspace=self._product_workspace(layer))

    def _samples_of(self, names: set[str], n: int) -> int:
        return sum(layer.per_sample_gradients(n) for layer in self.layers if layer.name in names)

    def _backward_before(self, layer: Layer, n: int, parts: Mapping[str, int]) -> Instant:
        """Returns the backward of operations without parameters before a layer.

        In the first of two passes, nothing is freed.
        """
        if self.mode in ("ghost", "fast"):
            layer = replace(layer, operations=())
        temporaries = self._scale(layer.largest_gradients(self.on_gpu) + layer.residual_gradient, n)
        return Instant("backward", layer.name, {**parts, "backward_temporaries": temporaries})

    def _layer_backward(self, layer: Layer, n: int, parts: Mapping[str, int]) -> Instant:
        """Returns a layer's backward in autograd: the gradients of its output and input, and a library's workspace."""
        workspace = 0 if layer.forward.from_leaf else layer.layout_copies(n)
        if self.mode != "flash_clip":
            workspace = max(workspace, layer.bias_sum_workspace(n, self.multiprocessors, by_sample=False))
        if not layer.is_convolution:
            workspace = max(workspace, self._product_workspace(layer))
        temporaries = layer.passed_gradients(n, False)
        return Instant(
            "backward", layer.name, {**parts, "backward_temporaries": temporaries, "library_workspace": workspace}
        )

    def _bias_gradients(self, layer: Layer, n: int, parts: Mapping[str, int]) -> Instant:
        """Returns the computation of a bias' per-sample gradients."""
        temporaries = layer.passed_gradients(n, self.mean_loss)
        workspace = layer.bias_sum_workspace(n, self.multiprocessors, by_sample=True)
        return Instant(
            "backward", layer.name, {**parts, "backward_temporaries": temporaries, "library_workspace": workspace}
        )

    def _two_passes(self, n: int) -> Iterator[Instant]:
        """Yields the two backward passes of ghost clipping.

        Activations survive the first pass, which computes norms, and are released in the second, which computes
        gradients.
        """
        yield self._loss_backward(n, self._kept_gradients())
        live = self._activations(n) + self._scale(self.tail + self.loss + self.inputs, n)
        gradients = 0
        for layer in reversed(self.layers):
            gradients += layer.module.bytes
            workspace = self._product_workspace(layer)
            norms = (
                layer.ghost_norms(n, workspace)
                if self.mode == "ghost"
                else self._sampler(layer, n, self.copies_samples)
            )
            norms += self._samples_of(cell_of(layer, self.layers), n)
            parts = {"activations": live, "gradients": max(gradients, self._kept_gradients())}
            if not self.forms_squares:
                clip = FlashClip(layer, in_registers=self.on_gpu)
                forms = clip.forms_gradients(n, keep=False)
                norms = clip.norm_temporaries(n, keep=False) + (workspace if forms else 0)
                yield self._bias_gradients(layer, n, parts)
            yield self._layer_backward(layer, n, parts)
            yield Instant(
                "backward",
                layer.name,
                {
                    **parts,
                    "backward_temporaries": layer.passed_gradients(n, self.mean_loss),
                    "temp_matrices": norms,
                },
            )
            yield self._backward_before(layer, n, parts)
        for layer in reversed(self.layers):
            instant = self._layer_backward(layer, n, {"activations": live, "gradients": self.trained})
            temporaries = instant.parts["backward_temporaries"] + layer.module.bytes
            yield Instant("second_backward", layer.name, {**instant.parts, "backward_temporaries": temporaries})
            live -= self._scale(layer.activations, n)

    def _flash_clip(self, n: int, *, accumulates: bool) -> Iterator[Instant]:
        """Yields the backward and the clipping of flash_clip.

        Autograd forms no gradients. Before its own backward, each layer keeps the tensors that its clipped sum needs.
        The sums are formed from the first layer to the last, and release these tensors.
        """
        yield self._loss_backward(n, 0)
        live = self._activations(n) + self._scale(self.inputs, n)
        calls = [replace(layer, forward=layer.forward.repeated(self.passes)) for layer in self.layers]
        layers = [
            (layer, FlashClip(with_repeated_forward(layer, self.layers), in_registers=self.on_gpu)) for layer in calls
        ]
        total, kept, kept_of_latest, counted_twice = live, 0, 0, 0
        for layer, clip in reversed(layers):
            shared = min(counted_twice, self._scale(layer.activations - layer.saved_before, n))
            own = live - max(shared, self._released_before(layer, n))
            parts = {"activations": own, "per_sample_gradients": kept + clip.new_bytes(n)}
            output = layer.scale(layer.forward.largest_call().output_bytes, n) + layer.beside_output(n)
            temporaries = {**parts, "backward_temporaries": output}
            workspace = layer.bias_sum_workspace(n, self.multiprocessors, by_sample=True)
            yield Instant("backward", layer.name, {**temporaries, "library_workspace": workspace})
            names = cell_of(layer, self.layers)
            cell = [each for each in layers if each[0].name in names]
            if cell and layer is cell[-1][0]:  # its first call in backward, before any has released what it keeps
                outputs = layer.scale(layer.forward.input_bytes, n)  # whose gradient is live until the first call's
                yield self._layer_backward(layer, n, {**parts, "activations": live, "backprop_copies": outputs})
            if cell and layer is cell[-1][0] and (first := first_formed(cell, n, self.samples)):
                yield Instant("backward", layer.name, {**parts, **first, "activations": live - first["activations"]})
            norms = 0 if layer.is_repeated else clip.norm_temporaries(n)
            if layer.is_convolution and clip.kept_calls(n) < layer.forward.calls:  # each call forms its gradients
                one = replace(layer, forward=layer.forward.largest_call())
                norms = FlashClip(one, in_registers=self.on_gpu).norm_temporaries(n)
            workspace = self._product_workspace(clip.layer) if clip.forms_gradients(n) else 0
            in_norms = {**temporaries, "temp_matrices": norms, "library_workspace": workspace}
            yield Instant("backward", layer.name, in_norms)
            if self.passes > 1:  # of the latest pass, whose backward comes first
                of_latest = total - (total - own) // self.passes
                samples = kept_of_latest + clip.new_bytes(n)
                latest = {**in_norms, "activations": of_latest, "per_sample_gradients": samples}
                yield Instant("backward", layer.name, latest)
                kept_of_latest += self._kept(layer, clip, n) // (self.passes if clip.keeps_pair(n) else 1)
            after = {**parts, "activations": own - (0 if clip.keeps_pair(n) else layer.input_before(n))}
            # Autograd has saved a Linear layer's input only for the weight's gradient, which it does not form.
            yield self._layer_backward(layer, n, after if layer.module.kind == "Linear" else parts)
            yield self._backward_before(layer, n, after)
            kept += self._kept(layer, clip, n)
            live -= self._scale(layer.activations, n)
            counted_twice = clip.shared_bytes(n)
        summed = self._summed() if accumulates else 0
        for layer, clip in layers:
            if layer.is_repeated:  # norms are found when all its calls are known
                workspace = self.workspace if clip.multiplies_merged(n) else 0
                temporaries = {"library_workspace": workspace, "temp_matrices": clip.merged_norm_temporaries(n)}
                yield Instant("clip", layer.name, {"per_sample_gradients": kept, **temporaries})
        for layer, clip in layers:
            sums = {"summed_gradients": summed + layer.sum_bytes, "inputs": self._scale(self.inputs, n)}
            parts = {"per_sample_gradients": kept, "library_workspace": self.workspace, **sums}
            # The sum of another use of a weight is formed before it is added to the first one's. Of a third one, the
            # sum so far is live until then, too.
            uses = 2 if layer.is_repeated else 1 if layer.module.tied_to else 0
            use = uses * 4 * layer.module.rows * layer.module.columns
            yield Instant("clip", layer.name, {**parts, "clipping_temporaries": clip.sum_temporaries(n) + use})
            kept -= self._kept(layer, clip, n)
            summed += 0 if accumulates else layer.sum_bytes

    def _summed(self) -> int:
        """Returns the bytes of all clipped sums."""
        return sum(layer.sum_bytes for layer in self.layers) if self.mode == "flash_clip" else self.trained

    def _kept(self, layer: Layer, clip: FlashClip, n: int) -> int:
        outputs = layer.scale(layer.forward.output_bytes, n) if adds_outputs(layer, self.layers) else 0
        return clip.kept_bytes(n) - outputs * clip.kept_calls(n) // layer.forward.calls

    def _update(self, n: int, base: Mapping[str, int]) -> Iterator[Instant]:
        """Yields clipped sums, noise, and the optimizer's step.

        Noise needs twice the size of the largest layer: zeros, and the drawn noise. flash_clip's noise needs the size
        once or, on CUDA, no memory.
        """
        trained = self.trained
        if not self.mode:
            yield Instant("optimizer_step", "", {**base, "gradients": trained, "optimizer_temporaries": self.update})
            return
        left, casts = self._left_by_update(n), 0
        gradients = left.pop("gradients")
        if self.mode in PER_SAMPLE_MODES:
            casts = max((layer.clipping_casts(n) for layer in self.layers), default=0)
        if self.mode == "ew" and n < _UNFOLDED_FROM:  # their gradients have another memory layout, and are copied
            ungrouped = (layer for layer in self.layers if layer.is_convolution and layer.module.groups == 1)
            casts = max(casts, *(layer.per_sample_gradients(n) for layer in ungrouped), 0)
        parts = {**base, **left}
        in_clip = 0 if self.drops_gradients else gradients
        if self.mode in PER_SAMPLE_MODES:
            parts["library_workspace"] = self.workspace  # of the products that clip
        yield Instant("clip", "", {**parts, "gradients": in_clip, "clipping_temporaries": casts})
        in_noise = trained if self.drops_gradients else gradients
        noise = 2 * self.largest
        if self.mode == "flash_clip":
            noise = 0 if self.on_gpu and draws_in_place(self.largest) else self.largest
        yield Instant("noise", "", {**parts, "gradients": in_noise, "noise": noise})
        yield Instant("optimizer_step", "", {**parts, "gradients": gradients, "optimizer_temporaries": self.update})
