# SPDX-License-Identifier: Apache-2.0
"""The noise of a step: the numbers that Opacus draws, without the zeros that it allocates."""

import itertools
from collections.abc import Iterable, Sequence

import torch
from opacus.optimizers import optimizer as opacus_optimizer

from opacus_memprof.clipping.cost import draws_in_place
from opacus_memprof.clipping.kernels.native import draw_normal
from opacus_memprof.clipping.kernels.norms import has_kernels
from opacus_memprof.clipping.workspace import batches


def add_noise(
    sums: Sequence[torch.Tensor],
    *,
    std: float,
    generator: torch.Generator | None,
    secure_mode: bool,
    divisor: float = 1,
) -> None:
    """Adds Gaussian noise to every sum in place, in the order of the sums, and divides them.

    On CUDA one kernel draws and adds it, if the kernel gives the same numbers as torch.
    """

    def kernel(total: torch.Tensor) -> tuple[torch.device, torch.dtype] | None:
        """Returns the properties that sums of one launch share; None if no launch can add the noise of this sum."""
        is_plain = type(total) is torch.Tensor and has_kernels(total) and total.is_contiguous()
        return (total.device, total.dtype) if is_plain and draws_in_place(total.nbytes) else None

    if secure_mode or std == 0 or (generator is not None and generator.device.type != "cuda"):
        draw_and_add(sums, std, generator, secure_mode, divisor)
        return
    for of_kernel, group in itertools.groupby(sums, kernel):
        if of_kernel is not None:
            from opacus_memprof.clipping.kernels import noise as noise_triton

            if noise_triton.draws_as_torch(of_kernel[0]):
                noise_triton.add_normal_cuda(list(group), std, generator, divisor)
                continue
        draw_and_add(list(group), std, generator, secure_mode, divisor)


def draw_and_add(
    sums: Sequence[torch.Tensor], std: float, generator: torch.Generator | None, secure_mode: bool, divisor: float
) -> None:
    """Does what `add_noise` does, with noise that is drawn first.

    Draws noise for several sums at once, as long as it needs no more memory than the largest sum.
    """
    largest = max((total.nbytes for total in sums), default=0)
    for batch in batches(sums, largest, lambda total: total.nbytes):
        drawn = draw_noise(batch, std, generator, secure_mode)
        torch._foreach_add_(batch, drawn)
        del drawn  # before the next noise is drawn
        divide(batch, divisor)


class GeneratorStates:
    """The states of random generators, to restore them when a step is refused after noise was drawn."""

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        self._states = [(generator, generator.get_state()) for generator in generators]

    def restore(self) -> None:
        """Sets the generators to these states."""
        for generator, state in self._states:
            generator.set_state(state)


def default_generator(device: torch.device) -> torch.Generator:
    """Returns the generator that torch uses by default on a device."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def divide(sums: Sequence[torch.Tensor], divisor: float) -> None:
    """Divides every sum in place."""
    if divisor != 1 and sums:
        torch._foreach_div_(list(sums), divisor)


def draw_noise(
    references: list[torch.Tensor], std: float, generator: torch.Generator | None, secure_mode: bool
) -> list[torch.Tensor]:
    """Returns noise with the shape, dtype and device of each reference.

    The draws come one after the other, as in `_generate_noise` of opacus.optimizers.optimizer.
    """
    if secure_mode or std == 0 or any(type(each) is not torch.Tensor for each in references):
        return [opacus_optimizer._generate_noise(std, each, generator, secure_mode) for each in references]
    return draw_normal(references, std, generator)
