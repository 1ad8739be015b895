# SPDX-License-Identifier: Apache-2.0
"""The shapes of the model and of its activations, as hooks have recorded them.

The report of a run that ran out of memory computes from these how much the rest of the step needs. They are numbers and
names, as many as the model has modules, and the latest few thousand batch sizes.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

_BATCHES = 4096


@dataclass(frozen=True)
class LayerShape:
    """The trained parameters of a module, without those of its submodules.

    Attributes:
        kind: the class' name.
        bytes: bytes of the parameters.
        weight, bias: elements of the weight and of the bias; every parameter that is not a bias counts as weight.
        rows, columns: of the weight, flattened from its second dimension on; 0 without such a weight.
        groups, kernel_positions: for a convolution: its groups, and the number of elements of its kernel (9 for 3x3).
        norm_sampler: whether Opacus has a norm sampler for this class, for ghost clipping.
        tied_to: the module to which the weight is assigned, if this module shares it; rows and columns are still the
            weight's.
        sampled_in: the module around this one, or this one, that has parameters of its own and no sampler, so that
            Opacus computes per-sample gradients of all of it at once by functorch. None if a sampler knows this class.
        frozen: elements of frozen parameters that functorch computes per-sample gradients of, too.
    """

    kind: str
    bytes: int
    weight: int
    bias: int
    rows: int
    columns: int
    norm_sampler: bool
    groups: int = 1
    kernel_positions: int = 1
    tied_to: str = ""
    sampled_in: str | None = None
    frozen: int = 0

    @property
    def weight_bytes(self) -> int:
        """The bytes of the weight."""
        return self.bytes * self.weight // max(self.weight + self.bias, 1)


@dataclass(frozen=True)
class CaptureShape:
    """The input and output of a module in its largest forward pass.

    Attributes:
        samples: the first dimension of the input.
        tokens: positions per sample: the dimensions between batch and features, or a convolution's output positions.
        input_bytes, output_bytes: bytes of all samples.
        element_bytes: bytes of an element of the output.
        from_leaf: whether the input needs no gradient.
        layout_copied: whether a convolution's library uses another memory layout than its tensors have.
        is_bfloat16: whether the output is of this type.
        calls: calls of the module in one forward pass, over which tokens and bytes are added up.
        input_element_bytes: bytes of an element of the input, which autocast casts to the output's type.
        viewed_bytes: of the tensor that the input of a single call is a view of, and keeps alive. 0: not a view.
        viewed_id: id() of that tensor.
        most_tokens: those of the largest of several calls, which can differ, as of a head for features of all sizes.
    """

    samples: int
    tokens: int
    input_bytes: int
    output_bytes: int
    element_bytes: int
    from_leaf: bool
    layout_copied: bool = False
    is_bfloat16: bool = False
    calls: int = 1
    input_element_bytes: int = 0
    viewed_bytes: int = 0
    viewed_id: int = 0
    most_tokens: int = 0

    def with_call(self, other: "CaptureShape") -> "CaptureShape":
        """Returns the shape with that of another call added."""
        return replace(
            self,
            tokens=self.tokens + other.tokens,
            input_bytes=self.input_bytes + other.input_bytes,
            output_bytes=self.output_bytes + other.output_bytes,
            from_leaf=self.from_leaf and other.from_leaf,
            calls=self.calls + 1,
            most_tokens=max(self.most_tokens or self.tokens, other.tokens),
        )

    def largest_call(self) -> "CaptureShape":
        """Returns the shape of the largest call, of which all bytes grow with the tokens."""
        if self.calls == 1 or not self.most_tokens:
            return self.divided(self.calls)
        return replace(
            self,
            tokens=self.most_tokens,
            input_bytes=self.input_bytes * self.most_tokens // self.tokens,
            output_bytes=self.output_bytes * self.most_tokens // self.tokens,
            calls=1,
        )

    def repeated(self, times: int) -> "CaptureShape":
        """Returns the shape of `times` as many calls."""
        return replace(
            self,
            tokens=times * self.tokens,
            input_bytes=times * self.input_bytes,
            output_bytes=times * self.output_bytes,
            calls=times * self.calls,
        )

    def divided(self, passes: int) -> "CaptureShape":
        """Returns the shape of the calls of one of so many equal passes."""
        return replace(
            self,
            tokens=max(self.tokens // passes, 1),
            input_bytes=self.input_bytes // passes,
            output_bytes=self.output_bytes // passes,
            calls=self.calls // passes,
        )


@dataclass(frozen=True)
class KeptBlock:
    """A block that a forward pass allocates and keeps until backward.

    Attributes:
        bytes: its size.
        module: the module that allocates it.
        layer: the trained module whose backward pass follows the block's release: `module`, or the next one that the
            forward pass calls. None after the last one.
        is_output: whether it is the model's output.
        is_shared: whether several operations have saved it, as a ReLU and the layer after it.
        captor: the layer whose capture by Opacus alone keeps it, as the float32 input of a layer that autocast casts;
            None if something else keeps it.
        is_softmax: whether a softmax has allocated it.
        first_save: the place of the operation that has saved it first, in the order of the pass; 0 if none has.
        is_attention: whether it is a softmax of products, as of queries and keys: graph attention makes sums instead.
        is_cached: whether it is in a cache of keys and values, which the model's output has.
    """

    bytes: int
    module: str
    layer: str | None
    is_output: bool
    is_shared: bool
    captor: str | None
    is_softmax: bool
    first_save: int = 0
    is_attention: bool = False
    is_cached: bool = False


@dataclass(frozen=True)
class WholeForward:
    """The memory of a whole forward pass, as found without running it on the device.

    Attributes:
        forwards: see TrainingShapes.
        blocks: what it keeps.
        peak: bytes of the activations and temporaries that are live at once.
        samples: the first dimension of the model's first input.
        streams: by module, the bytes of a residual stream that it adds to.
        added: the layers whose output is added to a residual stream, so that its gradient is that of the stream.
        recomputed: what the functions of activation checkpoints keep when backward runs them again, one at a time.
        checkpoints: the number of its checkpoint, by layer inside of one, in the order of calls.
        product_peak: the peak while a matrix product runs.
    """

    forwards: dict[str, CaptureShape]
    blocks: tuple[KeptBlock, ...]
    peak: int
    samples: int
    streams: dict[str, int]
    added: frozenset[str]
    recomputed: tuple[KeptBlock, ...] = ()
    checkpoints: Mapping[str, int] = field(default_factory=dict)
    product_peak: int = 0

    @property
    def kept(self) -> dict[str, int]:
        """Bytes that live until backward, by the module that allocates them."""
        sizes: dict[str, int] = {}
        for block in self.blocks:
            sizes[block.module] = sizes.get(block.module, 0) + block.bytes
        return sizes

    @property
    def largest(self) -> dict[str, int]:
        """The bytes of the largest block of each module."""
        sizes: dict[str, int] = {}
        for block in (*self.blocks, *self.recomputed):
            sizes[block.module] = max(sizes.get(block.module, 0), block.bytes)
        return sizes

    def operations(self, layer: str) -> tuple[tuple[int, int, bool], ...]:
        """Returns the operations whose blocks a layer's backward pass releases, in the order of the forward pass.

        Of each: the bytes of the block that it saves, those of the blocks that only later operations save, which are
        free in its backward pass, and whether it is a softmax.
        """
        blocks = [block for block in (*self.blocks, *self.recomputed) if block.layer == layer and block.first_save]
        return tuple(
            (
                block.bytes,
                sum(each.bytes for each in blocks if each.first_save > block.first_save and not each.is_output),
                block.is_softmax,
            )
            for block in sorted(blocks, key=lambda block: block.first_save)
        )

    def recomputed_before(self, times: float) -> dict[str, int]:
        """Returns `times` the bytes that a checkpoint has recomputed and no backward has used yet, by layer inside."""
        own: dict[str, int] = {}
        for block in self.recomputed:
            if block.layer is not None:
                own[block.layer] = own.get(block.layer, 0) + block.bytes
        sizes: dict[str, int] = {}
        sums: dict[int, int] = {}
        for layer, checkpoint in self.checkpoints.items():
            sums[checkpoint] = sums.get(checkpoint, 0) + own.get(layer, 0)
            sizes[layer] = int(times * sums[checkpoint])
        return sizes


@dataclass(frozen=True)
class Program:
    """The names of objects in the training program, and its properties on which advice depends.

    Attributes:
        model, optimizer, loader: names of variables.
        criterion: the name of a loss that is a module; "" if there is none. `loss` makes it, if its class is torch's.
        has_trainer: whether transformers' Trainer trains.
        computes_epsilon: whether the function that trains calls get_epsilon, too.
        adopts_samples: whether adopt_grad_samples is in effect.
        has_norm_samplers: whether register_norm_samplers is in effect.
        enables_checkpoints: the name of the model's outermost module that has transformers'
            gradient_checkpointing_enable, "" for the model itself; None if there is none.
        expected_samples: the number of samples of a logical batch that the DPOptimizer expects, or without Opacus those
            of a batch of the only DataLoader; None if it is unknown.
        splits_batches: whether a BatchMemoryManager is in effect.
    """

    model: str = "model"
    optimizer: str = "optimizer"
    loader: str = "loader"
    criterion: str = ""
    loss: str = ""
    has_trainer: bool = False
    computes_epsilon: bool = False
    adopts_samples: bool = False
    has_norm_samplers: bool = False
    enables_checkpoints: str | None = None
    expected_samples: int | None = None
    splits_batches: bool = False


@dataclass(frozen=True)
class UntrainedGraphs:
    """The graphs that calls of a model have recorded which no optimizer trains.

    Attributes:
        name: what the program calls the model.
        bytes: what each call keeps for a backward pass.
        without: the most bytes that a call holds at once if it records no graph; 0 if that is not known.
        is_unused: whether no loss was computed from its output with a graph, so that no backward pass frees what it
            keeps, which lives until the next call has ended.
    """

    name: str
    bytes: int
    without: int
    is_unused: bool


@dataclass
class TrainingShapes:
    """The shapes of the model, its activations, its batches and its optimizer.

    Attributes:
        mode: Opacus' grad_sample_mode ("fast" for ghost without norm samplers), "flash_clip", or "" for a model without
            Opacus.
        mean_loss: whether the loss is averaged over samples, so that Opacus' hooks scale a copy of the output's
            gradients.
        modules: shapes by name, in the model's order.
        forwards: shapes by name, in the order of the first forward pass.
        optimizer: the class' name.
        state_tensors: tensors of a parameter's shape that the optimizer keeps for each parameter.
        step_temporaries: such tensors that its step allocates for all parameters at once, if it is a foreach step.
        keeps_gradients: whether p.grad outlives zero_grad; None if that was not seen.
        clears_late: whether the optimizer's zero_grad comes between a forward pass and its backward pass, so that what
            a step leaves lives through the next forward pass.
        keeps_output: whether a variable of the loop keeps the model's output through the next forward pass.
        drops_output: whether no variable keeps the model's output until its backward pass, as where another function
            takes the loss from it.
        accumulates: whether the program without Opacus clears gradients only after some of its backward passes, as the
            text of its loop says. Asked for when memory has run out.
        forward_step: the physical step of the latest forward pass that recorded a graph; None before the first one.
        cleared_step: the same of zero_grad.
        batches: (physical step, samples) whenever the number of samples changed.
        unreleased: the batch sizes of the forward passes since a backward last released all of Opacus' captures, the
            latest one last.
        waiting: the forward passes that recorded graphs since the last backward pass; None before the first one.
        input_bytes: bytes of the inputs of the largest batch.
        by_hand: the samples of the largest batch whose gradients torch.func has computed, and the bytes of the
            gradients of one sample; None if that was not seen.
        evaluation: the samples of the latest forward pass, and whether it records a graph, if it is in eval mode and
            another was in training mode; else None.
        is_public: whether an optimizer updates a private model without clipping and noise.
        accumulated: the most backward passes whose per-sample gradients were kept for one step.
        released: the most forward passes whose captures a backward has released together.
        engine_call: the method of the PrivacyEngine that the program has called last.
        draws_poisson: whether its batches are drawn by Poisson sampling, as by default.
        most_samples: the most samples that a later batch is likely to have, or BatchMemoryManager's largest; None if
            that is not known. Asked for when memory has run out.
        coming_states: bytes of the states that optimizers of other models will make at their first step. Asked for when
            memory has run out.
        coming_gradients: the same of gradients, which live until their optimizer's next zero_grad.
        made_before: unattributed bytes by device when the first batch of the followed model came; None if none came.
        has_nodes: whether the rows of the model's first input are nodes of a graph, whose edges are another input.
        multiprocessors: of the GPU; 0 without one.
        workspace: bytes of cuBLAS' workspace for one thread.
        has_bfloat16: whether the device computes in bfloat16.
        flash_clip_refusal: the reason why flash_clip cannot clip the model; None if it can.
        mixes_samples: whether the forward pass makes a matrix of samples by samples, as a contrastive loss does: then
            there are no per-sample gradients, which flash_clip refuses.
        runs_in: a function that returns whether the forward pass runs with parameters and inputs of a type such as
            "bfloat16".
        whole_forward: a function that returns what the forward pass of the largest batch keeps; None if it cannot.
        peak_without_graph: a function that returns the most bytes that are live at once in the forward pass of the
            largest batch if it records no graph; 0 if that is not known.
        untrained_graphs: a function that returns the graphs that calls of these models have recorded.
        untrained_gradients: a function that returns the bytes of gradients that a backward pass gives to models that no
            optimizer trains, such as a reference model whose calls record graphs, without those of earlier steps.
        unclaimed_parameters: a function that returns the bytes of parameters that count as unattributed, because they
            were made in this step.
        program: see Program.
    """

    mode: str = ""
    mean_loss: bool = True
    modules: dict[str, LayerShape] = field(default_factory=dict)
    forwards: dict[str, CaptureShape] = field(default_factory=dict)
    optimizer: str = ""
    state_tensors: int = 0
    step_temporaries: int = 0
    keeps_gradients: bool | None = None
    clears_late: bool = False
    keeps_output: bool = False
    drops_output: bool = False
    accumulates: bool = False
    forward_step: int | None = None
    cleared_step: int | None = None
    batches: "deque[tuple[int, int]]" = field(default_factory=lambda: deque(maxlen=_BATCHES))
    unreleased: "deque[int]" = field(default_factory=lambda: deque(maxlen=_BATCHES))
    waiting: int | None = None
    input_bytes: int = 0
    by_hand: tuple[int, int] | None = None
    evaluation: tuple[int, bool] | None = None
    is_public: bool = False
    accumulated: int = 1
    released: int = 1
    engine_call: str = "make_private"
    draws_poisson: bool = True
    most_samples: int | None = None
    coming_states: int = 0
    coming_gradients: int = 0
    made_before: Mapping[str, int] | None = None
    has_nodes: bool = False
    multiprocessors: int = 0
    workspace: int = 32 * 2**20
    has_bfloat16: bool = True
    flash_clip_refusal: Callable[[], str | None] = lambda: "no model is followed"
    mixes_samples: Callable[[], bool] = lambda: False
    runs_in: Callable[[str], bool] = lambda dtype: True
    whole_forward: Callable[[], WholeForward | None] = lambda: None
    peak_without_graph: Callable[[], int] = lambda: 0
    untrained_graphs: "Callable[[], Sequence[UntrainedGraphs]]" = lambda: ()
    untrained_gradients: Callable[[], int] = lambda: 0
    unclaimed_parameters: Callable[[], int] = lambda: 0
    program: Program = Program()

    def at_instant(self) -> "TrainingShapes":
        """Returns the shapes for one instant, at which the program is searched for each answer at most once."""
        return replace(
            self,
            peak_without_graph=cache(self.peak_without_graph),
            untrained_graphs=cache(self.untrained_graphs),
            untrained_gradients=cache(self.untrained_gradients),
            unclaimed_parameters=cache(self.unclaimed_parameters),
        )

    @property
    def weights(self) -> frozenset[int]:
        """The bytes of the trained weights, without those of biases."""
        return frozenset(module.weight_bytes for module in self.modules.values() if module.weight)

    @property
    def trained_bytes(self) -> int:
        return sum(module.bytes for module in self.modules.values())

    @property
    def stray_samples(self) -> tuple[int, ...]:
        """The batch sizes of stray forward passes.

        These are the forward passes before the latest one whose captures no backward has released. Empty if a backward
        has released as many before, or if the latest batch is the largest: Opacus sizes per-sample gradients by the
        largest batch that it has captured.
        """
        *before, latest = self.unreleased or (0,)
        strays = len(before) >= self.released and max(before, default=0) > latest
        return tuple(before) if strays else ()

    def batch_size_in(self, step: int) -> int | None:
        """Returns the samples of the last forward pass of a physical step; None if none was seen."""
        result = None
        for first_step, samples in self.batches:
            if first_step > step:
                break
            result = samples
        return result
