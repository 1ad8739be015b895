# SPDX-License-Identifier: Apache-2.0
"""What is being trained, as far as hooks have seen it: the shapes that say what a step needs beyond what it has
reached. For the forensics of a run that ended in the middle of a step.

Numbers and names only, bounded by the model's modules; of batches the latest few thousand.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from opacus_memprof import observations

_BATCHES = 4096


@dataclass(frozen=True)
class Module:
    """A module with parameters of its own that are trained.

    Attributes:
        kind: the class' name.
        bytes: of these parameters. `weight` and `bias` are their elements, all but the bias being weight.
        rows, columns: of the weight, flattened from its second dimension on; 0 without such a weight.
        groups, taps: of a convolution, its groups and the positions of its kernel.
        norm_sampler: Opacus has one of its own for this class, by which ghost clipping finds norms.
    """

    kind: str
    bytes: int
    weight: int
    bias: int
    rows: int
    columns: int
    norm_sampler: bool
    groups: int = 1
    taps: int = 1


@dataclass(frozen=True)
class Forward:
    """What Opacus captured of a module in its largest forward pass.

    Attributes:
        samples, tokens: of its input: the first dimension, and the positions of each sample.
        input_bytes, output_bytes: of all samples. `width` is the bytes of an element of the output.
        from_leaf: its input needs no gradient.
        relaid: a convolution, which its library computes in another layout than its tensors have.
    """

    samples: int
    tokens: int
    input_bytes: int
    output_bytes: int
    width: int
    from_leaf: bool
    relaid: bool = False


@dataclass
class Workload:
    """What is known of the run.

    Attributes:
        mode: Opacus' grad_sample_mode ("fast" for ghost without norm samplers, "flash_clip" for ours), or "" for a
            model without Opacus.
        mean: the loss is averaged over samples: hooks then scale a copy of the output's gradients.
        modules: in the model's order. `forwards`: in the order of the first forward pass.
        optimizer: the class' name. `states`: tensors of a parameter's shape that it keeps for each, and `temporaries`
            those that a step makes of all parameters at once where it works on lists of them (on a GPU).
        keeps_gradients: p.grad outlives zero_grad; None where that was not seen.
        batches: (physical step, samples) whenever the number of samples changed.
        processors: multiprocessors of the GPU, 0 without one.
        flash_clip_refusal: why flash_clip cannot clip the model; None if it can.
    """

    mode: str = ""
    mean: bool = True
    modules: dict[str, Module] = field(default_factory=dict)
    forwards: dict[str, Forward] = field(default_factory=dict)
    optimizer: str = ""
    states: int = 0
    temporaries: int = 0
    keeps_gradients: bool | None = None
    batches: "deque[tuple[int, int]]" = field(default_factory=lambda: deque(maxlen=_BATCHES))
    processors: int = 0
    flash_clip_refusal: Callable[[], str | None] = lambda: "no model is followed"

    @property
    def trained_bytes(self) -> int:
        return sum(module.bytes for module in self.modules.values())

    def batch_of(self, step: int) -> int | None:
        """The samples of a physical step's last forward pass; None where none was seen."""
        found = None
        for begun, samples in self.batches:
            if begun > step:
                break
            found = samples
        return found


_current = Workload()


def current() -> Workload:
    """That of the running session."""
    return _current


def _clear() -> None:
    global _current
    _current = Workload()


observations.on_clear(_clear)
