# SPDX-License-Identifier: Apache-2.0
"""Forms clipped sums, `sum_n factors[n] (gradient of sample n)`, from kept tensors, and adds a step's noise to them.

Sums of bfloat16 and float16 are float32, and so are the scaled numbers that are added up. Rounding each of them to
eight bits would change a constant vector by up to 0.2 %, and gradients that cancel by any factor.

The noise has the numbers that Opacus draws, without the zeros that it allocates.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from opacus.optimizers import optimizer as opacus_optimizer

from opacus_memprof.clipping.cost import choose, copied_numbers, draws_in_place
from opacus_memprof.clipping.kernels import native
from opacus_memprof.clipping.kernels.native import draw_normal
from opacus_memprof.clipping.kernels.norm_bounds import uses_tf32
from opacus_memprof.clipping.kernels.norms import has_kernels, matrix, norms_of_sums
from opacus_memprof.clipping.workspace import Workspace, batches, is_low_precision, slices, sum_dtype
from opacus_memprof.errors import MemprofError


def sum_stack(stack: torch.Tensor, factors: torch.Tensor, dtype: torch.dtype, workspace: Workspace) -> torch.Tensor:
    """Returns the weighted sum of kept per-sample gradients.

    Args:
        stack: per-sample gradients, [N, ...].
        factors: clip factors, [N], float32 (float64).
        dtype: the dtype of the result, float32 for parameters of low precision.
        workspace: limit on temporaries.
    """
    if has_kernels(stack):
        from opacus_memprof.clipping.kernels.stacks import weighted_sum_cuda

        return weighted_sum_cuda(stack.contiguous(), factors.float(), dtype)
    flat = matrix(stack)
    if flat.dtype == factors.dtype:
        summed = torch.mv(flat.mT, factors)
        if flat is not stack:
            summed = summed.view(stack.shape[1:])
        return summed if summed.dtype == dtype else summed.to(dtype)
    # Rounding the factors to a low-precision dtype would let a sample exceed the bound: sum in float32.
    total = torch.empty(flat.shape[1], dtype=dtype, device=stack.device)
    width = workspace.fit_at_least_one(
        len(stack) * factors.element_size(), flat.shape[1], "one element of every sample"
    )
    for part in slices(flat.shape[1], width):
        total[part] = factors @ flat[:, part].to(factors.dtype)
    return total.view(stack.shape[1:])


def sum_outer_products(
    g: torch.Tensor, a: torch.Tensor, factors: torch.Tensor, workspace: Workspace, lost: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Does the same as `sum_products`, for operands [N, T, rows] and [N, T, columns]; returns [rows, columns].

    Returns None if one matmul is not enough: its copies do not fit into the workspace, or there is one sample, whose
    gradient is scaled instead.
    """
    if _is_by_sample(g.mT, a):
        return None
    sums = native.sum_outer_products([(g, a)], factors.to(sum_dtype(g.dtype)), workspace.bytes)
    if sums and lost is not None:
        add_lost([(g, a)], sums, lost)
    return sums[0] if sums else None


def add_lost(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], totals: Sequence[torch.Tensor], factors: torch.Tensor
) -> None:
    """Adds the clipped gradients of samples whose tokens cancel, on CUDA. See `lost.add_products_cuda`."""
    from opacus_memprof.clipping.kernels.formed import add_products_cuda

    add_products_cuda(pairs, totals, factors)


def scale_single_samples(stacks: list[torch.Tensor], factors: torch.Tensor) -> list[torch.Tensor]:
    """Returns the clipped sums of a single sample, whose gradients are scaled in place without extra memory.

    Args:
        stacks: each [1, ...], contiguous, not empty; all float32 (float64), on one device.
        factors: the clip factor, [1], float32 (float64).
    """
    if has_kernels(stacks[0]):
        # One launch for all of them.
        from opacus_memprof.clipping.kernels.stacks import scale_cuda

        scale_cuda(stacks, factors.float())
    else:
        for stack in stacks:
            stack.mul_(factors.view(-1, *[1] * (stack.dim() - 1)))
    return [stack[0] for stack in stacks]


def products(g: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Returns the weight gradients `g[n] @ a[n]`, [N, rows, columns]."""
    # For a single sample a plain matrix product, as in training without privacy.
    return torch.mm(g[0], a[0]).unsqueeze(0) if g.shape[0] == 1 else torch.bmm(g, a)


def sum_products(
    g: torch.Tensor,
    a: torch.Tensor,
    factors: torch.Tensor,
    groups: int,
    workspace: Workspace,
    lost: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the weighted sum of weight gradients `g[n] @ a[n]` by one matmul over samples and tokens together.

    This is as fast as in training without privacy.

    Args:
        g: output gradients, [N groups, rows, T], sample-major.
        a: inputs, [N groups, T, columns].
        factors: clip factors, [N], float32 (float64).
        groups: number of groups of a grouped convolution; otherwise 1.
        workspace: limit on temporaries.
        lost: on CUDA, the clip factors, [N] float32, of samples whose tokens cancel, which have 0 in `factors`.

    Returns:
        [groups, rows, columns], float32 for operands of low precision, otherwise in the operands' dtype.
    """
    total = _sum_products(g, a, factors, groups, workspace)
    if lost is not None and g.numel():
        pairs = [(g[k::groups].mT, a[k::groups]) for k in range(groups)]
        add_lost(pairs, list(total), lost)
    return total


def _sum_products(
    g: torch.Tensor, a: torch.Tensor, factors: torch.Tensor, groups: int, workspace: Workspace
) -> torch.Tensor:
    count, rows, tokens = g.shape
    columns, samples = a.shape[2], count // groups
    g = g.view(samples, groups, rows, tokens)
    a = a.view(samples, groups, tokens, columns)
    is_low = is_low_precision(g.dtype)
    if samples == 0 or tokens == 0:
        return torch.zeros(groups, rows, columns, dtype=sum_dtype(g.dtype), device=g.device)
    if samples == 1 and (g.is_cuda or not is_low):
        single = torch.bmm(g[0], a[0], out_dtype=torch.float32) if is_low else torch.bmm(g[0], a[0])
        return single.mul_(factors.to(single.dtype))
    if _is_by_sample(g[:, 0], a[:, 0]):
        return _sum_by_sample(g, a, factors, workspace)
    folds = groups == 1 and a.stride(3) == 1
    copied = copied_numbers(rows, columns, g.element_size(), folds=folds, splits=_is_split(g))
    width = groups * copied * g.element_size()
    total: torch.Tensor | None = None
    for n, t in workspace.tiles(samples, tokens, width, "one token of a clipped sum"):
        # [groups, rows, n, t] and [groups, n, t, columns]
        left, right = g[n, ..., t].permute(1, 2, 0, 3), a[n, :, t].permute(1, 0, 2, 3)
        scale = factors[n].to(sum_dtype(g.dtype)).view((-1, 1) if rows < columns else (-1, 1, 1))
        part = (_low_precision_product if is_low else _scaled_product)(left, right, scale, rows < columns)
        total = part if total is None else total.add_(part)
        del left, right, part
    assert total is not None  # there was at least one part
    return total


def _is_by_sample(g: torch.Tensor, a: torch.Tensor) -> bool:
    """Returns whether norms are those of gradients that a product with TF32 has formed.

    It rounds scaled operands differently, so a sample whose tokens cancel could add more than its bound.
    """
    if not uses_tf32(g.dtype, g.device):
        return False
    count, rows, tokens = g.shape
    return choose(count, tokens, rows, a.shape[2], g.element_size(), keep=False).norm == "gradient"


def _sum_by_sample(g: torch.Tensor, a: torch.Tensor, factors: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    """Does the same as `sum_products`, from the gradients of some samples at a time.

    The operands are [N, groups, rows, T] and [N, groups, T, columns].
    """
    samples, groups, rows, _ = g.shape
    columns = a.shape[3]
    total = torch.zeros(groups, rows, columns, dtype=g.dtype, device=g.device)
    for n, r in workspace.tiles(samples, rows, groups * columns * g.element_size(), "one row of a weight gradient"):
        stack = torch.bmm(g[n, :, r].flatten(0, 1), a[n].flatten(0, 1))
        total[:, r] += sum_stack(stack.view(-1, groups, *stack.shape[1:]), factors[n], g.dtype, workspace)
        del stack
    return total


def _is_split(x: torch.Tensor) -> bool:
    """Returns whether a scaled operand is multiplied as the sum of two matrices of this dtype, into float32.

    The exponents of float16 have a smaller range than float32's.
    """
    return x.is_cuda and x.dtype == torch.bfloat16


def _scaled_product(left: torch.Tensor, right: torch.Tensor, scale: torch.Tensor, scales_left: bool) -> torch.Tensor:
    """Returns the product of [groups, rows, n, t] and [groups, n, t, columns], one of which is scaled.

    Scales, and copies, the narrower one.
    """
    if scales_left:
        left = left * scale
    else:
        right = right * scale
    return _folded_product(left, right)


def _folded_product(left: torch.Tensor, right: torch.Tensor, **options: Any) -> torch.Tensor:
    groups, rows, samples, tokens = left.shape
    columns, inner = right.shape[-1], samples * tokens
    return torch.bmm(left.reshape(groups, rows, inner), right.reshape(groups, inner, columns), **options)


def _low_precision_product(
    left: torch.Tensor, right: torch.Tensor, scale: torch.Tensor, scales_left: bool
) -> torch.Tensor:
    """Does the same as `_scaled_product`, in float32 from low precision.

    On CUDA the scaled operand is the sum of two bfloat16 matrices, whose products take less time than one in float32.
    """
    narrow, wide = (left, right) if scales_left else (right, left)

    def product(one: torch.Tensor, other: torch.Tensor, **options: Any) -> torch.Tensor:
        return _folded_product(*((one, other) if scales_left else (other, one)), **options)

    scaled = torch.mul(narrow, scale, out=torch.empty(narrow.shape, dtype=torch.float32, device=narrow.device))
    if not _is_split(narrow):
        return product(scaled, wide.to(torch.float32, memory_format=torch.contiguous_format))
    high = scaled.to(narrow.dtype)
    low = scaled.sub_(high).to(narrow.dtype)
    del scaled
    return product(high, wide, out_dtype=torch.float32).add_(product(low, wide, out_dtype=torch.float32))


def add_noise(
    sums: Sequence[torch.Tensor],
    *,
    std: float,
    generator: torch.Generator | None,
    secure_mode: bool,
    divisor: float = 1,
    targets: Sequence[torch.Tensor] | None = None,
    norms: torch.Tensor | None = None,
) -> None:
    """Adds Gaussian noise to every sum, in the order of the sums, and divides them.

    On CUDA one kernel draws and adds it, if the kernel gives the same numbers as torch.

    Args:
        sums: clipped sums; they change unless a target takes the result.
        std: the standard deviation.
        generator: draws the noise; None for torch's default generator.
        secure_mode: whether torchcsprng draws it, as in Opacus.
        divisor: the divisor of the noisy sums.
        targets: tensors that take the noisy sums, rounded to their dtype; None for the sums themselves.
        norms: takes the norm of each sum without noise, [sums], float64.
    """

    def kernel(place: int) -> tuple[torch.device, torch.dtype, torch.dtype] | None:
        """Returns the properties that sums of one launch share; None if no launch can add the noise of this sum."""
        total, target = sums[place], written[place]
        if total.is_cpu:
            return None
        is_plain = all(type(x) is torch.Tensor and has_kernels(x) and x.is_contiguous() for x in (total, target))
        fits = is_plain and total.numel() and draws_in_place(total.nbytes)
        return (total.device, total.dtype, target.dtype) if fits else None

    written = sums if targets is None else targets
    is_secure = secure_mode or std == 0 or (generator is not None and generator.device.type != "cuda")
    for of_kernel, group in itertools.groupby(range(len(sums)), (lambda _: None) if is_secure else kernel):
        places = list(group)
        own, into = [sums[i] for i in places], None if targets is None else [targets[i] for i in places]
        if of_kernel is not None:
            from opacus_memprof.clipping.kernels import noise as noise_triton

            if noise_triton.draws_as_torch(of_kernel[0]):
                squares = None if norms is None else torch.zeros(len(own), dtype=torch.float64, device=of_kernel[0])
                noise_triton.add_normal_cuda(own, std, generator, divisor, into, squares)
                if norms is not None and squares is not None:
                    norms[places[0] : places[-1] + 1] = squares.sqrt_()
                continue
        if norms is not None:
            norms[places[0] : places[-1] + 1] = norms_of_sums(own)
        draw_and_add(own, std, generator, secure_mode, divisor)
        for total, target in zip(own, into or own, strict=True):
            if target is not total:
                target.copy_(total)


def draw_and_add(
    sums: Sequence[torch.Tensor], std: float, generator: torch.Generator | None, secure_mode: bool, divisor: float
) -> None:
    """Does the same as `add_noise`, with noise that is drawn first.

    Draws noise for several sums at once, as long as it needs no more memory than the largest sum.
    """
    largest = max((total.nbytes for total in sums), default=0)
    for batch in batches(sums, largest, lambda total: total.nbytes):
        drawn = draw_noise(batch, std, generator, secure_mode)
        native.add_and_divide(batch, drawn, divisor)
        del drawn  # before the next noise is drawn


_SEED_BYTES = 8  # at the beginning of a generator's state
_MOST_STATES = 1 << 17  # of generators that are remembered, 100 bytes each


def _hash(state: torch.Tensor) -> int:
    return hash(state.numpy().tobytes())


class GeneratorStates:
    """The states of random generators at one moment."""

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        self._states = {generator: generator.get_state() for generator in generators}

    def hashes(self, earlier: Mapping[torch.Generator, torch.Tensor]) -> set[tuple[torch.Generator, int]]:
        """Returns each generator with a hash of its state. Equal ones draw the same numbers.

        Args:
            earlier: states from which the generators may have come to these. Their hashes are returned, too, for the
                generators that have the same seed still. The number of draws in between may differ from step to step,
                as that of dropout for batches of different sizes.
        """
        found = {(generator, _hash(state)) for generator, state in self._states.items()}
        for generator, state in self._states.items():
            before = earlier.get(generator)
            if before is not None and torch.equal(before[:_SEED_BYTES], state[:_SEED_BYTES]):
                found.add((generator, _hash(before)))
        return found

    def restore(self) -> None:
        """Sets the generators to these states."""
        for generator, state in self._states.items():
            generator.set_state(state)


class EarlierNoise:
    """The states from which generators have drawn the noise of a training's steps."""

    def __init__(self) -> None:
        self._states: dict[tuple[torch.Generator, int], None] = {}

    def refusal(self, states: set[tuple[torch.Generator, int]]) -> MemprofError | None:
        """Returns why noise from these states is refused: it is that of an earlier step. None if it is not.

        Args:
            states: what `GeneratorStates.hashes` returns.
        """
        if not states & self._states.keys():
            return None
        return MemprofError(
            "the random numbers of this step would be those of an earlier step, so that the difference of both steps "
            "shows gradients without noise: do not call torch.manual_seed with a seed that an earlier step had, in the "
            "model or in the training loop, or give make_private a noise_generator."
        )

    def add(self, states: set[tuple[torch.Generator, int]]) -> None:
        """Remembers the generators' states of a step, and forgets the oldest ones if there are too many."""
        self._states |= dict.fromkeys(states)
        while len(self._states) > _MOST_STATES:
            del self._states[next(iter(self._states))]


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
