# SPDX-License-Identifier: Apache-2.0
"""Suggests a smaller batch, another mode, or an improvement of the mode."""

import math
from collections.abc import Callable, Iterator
from functools import partial

from opacus_memprof.analysis.oom.advice.suggestion import (
    BATCH,
    LINE,
    MODE,
    MODE_AND_BATCH,
    OTHER_MODE,
    SEQUENCE,
    SMALL_BATCH,
    VARYING,
    Change,
    Suggestion,
    suggest,
)
from opacus_memprof.analysis.oom.flash import FlashClip
from opacus_memprof.analysis.oom.predict import Case
from opacus_memprof.analysis.oom.step import PER_SAMPLE_MODES, Instant, Step
from opacus_memprof.profiles.layer_shapes import TrainingShapes
from opacus_memprof.profiles.oom_report import Action
from opacus_memprof.profiles.units import format_bytes, format_count

_RARELY_DOUBLED = 16  # from so many expected samples on, fewer than one of 3000 Poisson batches has twice as many


def physical_batch(case: Case) -> Iterator[Suggestion]:
    """Suggests BatchMemoryManager with the largest physical batch whose predicted peak fits.

    If batch sizes vary, as in Poisson sampling, this also bounds later, larger batches.
    """
    is_part = not case.shapes.mode and not case.shapes.has_nodes and not case.shapes.mixes_samples()
    found = largest_that_fits(case, partial(case.peak, is_part=is_part))
    if found is None or case.samples is None:
        return
    n, instant = found
    if not case.shapes.mode:
        yield (_smaller_graph if case.shapes.has_nodes else _smaller_batch)(case, n, instant)
        return
    program = case.shapes.program
    varies = len({samples for _, samples in case.shapes.batches}) > 1
    change = VARYING if varies else BATCH if 2 * n >= case.samples else SMALL_BATCH
    before = case.shapes.most_samples if program.splits_batches else None
    title = (
        f"a physical batch of at most {format_count(n, 'sample')} instead of {before or case.samples}, "
        "and the same logical batch"
    )
    if (times := samples_of_each(case)) > 1:
        title = (
            f"a physical batch of at most {format_count(n // times, 'sample')} instead of {program.expected_samples}: "
            f"the model gets {times} for each sample of the loader"
        )
    elif case.is_drawn and (program.expected_samples or case.samples) < case.samples:
        change = VARYING  # the next draw can be larger still
        title = (
            f"a physical batch of at most {format_count(n, 'sample')}: the loader asks for {program.expected_samples}, "
            f"and this Poisson batch drew {case.samples}"
        )
    slope = bytes_per_sample(case, case.peak)
    yield suggest(
        case,
        instant,
        SMALL_BATCH if program.computes_epsilon else change,
        title,
        batch_code(case, n),
        f"In this run a sample takes {format_bytes(slope)} at the peak, and the rest does not grow with the batch.",
        batch_action(case, n),
        largest=case.largest_block(n),
    )


def samples_of_each(case: Case) -> int:
    """Returns how many samples the model gets for one of the loader's, such as 2 for real and generated ones.

    A Poisson batch of at least two times the expected size is possible only where few samples are expected.
    """
    expected = case.shapes.program.expected_samples
    is_drawn = case.is_drawn and (expected or 0) < _RARELY_DOUBLED
    if not expected or is_drawn or not case.samples or case.samples % expected:
        return 1
    return case.samples // expected


def _smaller_batch(case: Case, n: int, instant: Instant) -> Suggestion:
    """Suggests a smaller batch for a program without Opacus, which accumulates gradients itself.

    What compares the samples of a batch, as a contrastive loss, then compares fewer, and trains otherwise.
    """
    times = samples_of_each(case)
    samples, size = (case.samples or n) // times, n // times
    parts = math.ceil(samples / size)
    mixes = case.shapes.mixes_samples()
    if mixes:
        code = f"DataLoader(..., batch_size={size})  # the loss compares fewer samples, also if gradients accumulate"
    elif case.shapes.program.has_trainer:
        accumulating = f"per_device_train_batch_size={size}, gradient_accumulation_steps={parts}"
        code = f"TrainingArguments(..., {accumulating})  # trains as with {samples}"
    else:
        how = f"step and zero_grad after every {parts} batches, with loss / {parts}, train as with {samples}"
        code = f"DataLoader(..., batch_size={size})  # {how}"
        if case.failure.phase in ("forward", "idle"):  # the loss has not been seen
            code = f"DataLoader(..., batch_size={size})  # if the loss compares no samples: {how}"
    count = format_count(size, "sample")
    title = f"a batch of {count} instead of {samples}"
    if times > 1:
        title = f"a batch of {count} instead of {samples}: the model gets {times} for each sample of the loader"
    change = SEQUENCE if mixes else BATCH if 2 * size >= samples else SMALL_BATCH
    return suggest(
        case,
        instant,
        change,
        title,
        code,
        f"In this run a sample takes {format_bytes(bytes_per_sample(case, case.peak))} at the peak, and the rest does "
        "not grow with the batch.",
        Action(kind="batch_size", value=size),
        largest=case.largest_block(n),
    )


def _smaller_graph(case: Case, n: int, instant: Instant) -> Suggestion:
    """Suggests subgraphs: the rows of the model's input are nodes, which depend on one another."""
    size = format_bytes(bytes_per_sample(case, case.peak))
    return suggest(
        case,
        instant,
        SEQUENCE,
        f"a subgraph of {format_count(n, 'node')} in each step instead of all {case.samples}",
        f"nodes = torch.randperm({case.samples})[:{n}]  # in each step, with the edges between them: "
        "adj[nodes][:, nodes]",
        f"In this run a node takes {size} at the peak. Nodes lose neighbors, so that accuracy can differ.",
        Action(kind="batch_size", value=n),
        largest=case.largest_block(n),
    )


def batch_action(case: Case, n: int) -> Action:
    return Action(kind="max_physical_batch_size", value=n // samples_of_each(case))


def batch_code(case: Case, n: int) -> str:
    """Returns the code of a BatchMemoryManager, with the names that the program uses."""
    program = case.shapes.program
    n //= samples_of_each(case)
    if program.splits_batches:
        return f"BatchMemoryManager(..., max_physical_batch_size={n})  # where the program has it already"
    lines = ["from opacus.utils.batch_memory_manager import BatchMemoryManager"]
    if program.computes_epsilon:  # Opacus' accountants fail, or are 0, before the first of their steps
        lines.append(
            "# and get_epsilon after the loop: before the end of a logical batch there is no step to account for"
        )
    return "\n".join(
        [
            *lines,
            f"with BatchMemoryManager(data_loader={program.loader}, max_physical_batch_size={n}, "
            f"optimizer={program.optimizer}) as {program.loader}:",
        ]
    )


def clip_each_batch(case: Case) -> Iterator[Suggestion]:
    """Suggests BatchMemoryManager instead of per-sample gradients of several batches, accumulated for one step."""
    passes, n = case.shapes.accumulated, case.samples
    if passes < 2 or n is None or case.step is None or case.step.mode not in PER_SAMPLE_MODES:
        return
    yield suggest(
        case,
        case.peak_of(case.step, accumulates=True),
        BATCH,
        f"clipping after each batch of {format_count(n, 'sample')}, with the same logical batch",
        f"{batch_code(case, n)}\n    # the DataLoader's batch_size is the logical batch; step and zero_grad after each "
        "batch, without a division of the loss",
        f"Per-sample gradients of {passes} batches are kept for one step; BatchMemoryManager keeps those of one and "
        "the clipped sums.",
        Action(kind="clip_each_batch", value=n),
    )


def largest_that_fits(case: Case, peak: Callable[[int], Instant]) -> tuple[int, Instant] | None:
    """Returns the largest physical batch whose peak fits, and that peak. None if not even one sample fits.

    BatchMemoryManager splits a logical batch into the fewest parts of equal sizes. If the capacity is unknown, half of
    the batch is returned.

    The clipped sums of the previous physical batch may fragment the memory that the next one needs. A fifth of the
    peak, or the largest block if that is more, is left free for this, as long as at least one sample fits. Batches that
    are drawn have other sizes in each step, which leaves more fragments: then it is a third.
    """
    if case.samples is None:
        return None
    times = samples_of_each(case)
    of_loader = case.samples // times
    parts = [times * math.ceil(of_loader / count) for count in range(2, of_loader + 1)]
    sizes = {n: peak(n) for n in dict.fromkeys(parts)}
    is_drawn = case.is_drawn and case.shapes.program.expected_samples is not None
    for spares in (case.memory.fragments, False):
        for n, instant in sizes.items():
            spare = max(instant.bytes // (3 if is_drawn else 5), case.largest_block(n)) if spares else 0
            if case.fits(instant.bytes + spare) is not False:
                return n, instant
    return None


def bytes_per_sample(case: Case, peak: Callable[[int], Instant]) -> int:
    """Returns the bytes per sample, from the peaks of the whole batch and of half the batch."""
    whole = case.samples or 1
    half = max(whole // 2, 1)
    return (peak(whole).bytes - peak(half).bytes) // max(whole - half, 1) if whole > half else peak(whole).bytes


def norms_without_squares(case: Case) -> Iterator[Suggestion]:
    """Suggests ghost clipping with norm samplers that form no T x T matrices."""
    step = case.step
    if step is None or step.mode != "ghost" or not step.forms_squares:
        return
    n = step.samples
    costly = {layer.name: layer.ghost_norms(n) for layer in step.layers if layer.forward.tokens > 1}
    costly = {name: size for name, size in costly.items() if size > 64 * 2**20 or size > case.peak().bytes // 20}
    if not costly or case.shapes.flash_clip_refusal() is not None:
        return
    instant = case.peak_of(step.with_changes(forms_squares=False))
    largest = max(costly, key=lambda name: costly[name])
    yield suggest(
        case,
        instant,
        LINE,
        f"norms without T x T matrices in {format_count(len(costly), 'layer')}",
        "from opacus_memprof.clipping import register_norm_samplers\nregister_norm_samplers()  # ghost clipping stays",
        f"Norms of {largest} make T x T matrices of {format_bytes(costly[largest])} (s n T^2, three with a bias, two "
        "without); these samplers work in tiles.",
        Action(kind="register_norm_samplers"),
    )


def adopted_samples(case: Case) -> Iterator[Suggestion]:
    """Suggests keeping the results of Opacus' grad samplers, which Opacus copies."""
    step = case.step
    if step is None or step.mode not in ("hooks", "functorch") or not step.layers or not step.copies_samples:
        return
    if case.shapes.accumulated > 1:  # the gradients of several batches are more than a copy of one layer's
        return
    size, name = max((layer.per_sample_gradients(step.samples), layer.name) for layer in step.layers)
    yield suggest(
        case,
        case.peak_of(step.with_changes(copies_samples=False)),
        LINE,
        "per-sample gradients without a copy of each",
        "from opacus_memprof.clipping import adopt_grad_samples\nadopt_grad_samples()  # before training",
        f"Opacus copies the results of its grad samplers into zeros of the same size, {format_bytes(size)} for {name}; "
        "without the copy, backward holds a layer's gradients once.",
        Action(kind="adopt_grad_samples"),
    )


def another_mode(case: Case) -> Iterator[Suggestion]:
    """Suggests flash_clip, ghost or hooks instead of the current mode.

    If the mode alone does not fit, a smaller physical batch is suggested with it.
    """
    for mode in ("flash_clip", "ghost", "hooks"):
        change = mode_change(case, mode)
        if change is None or case.step is None:
            continue
        other = change.apply(case.step)
        instant = case.peak_of(other)
        yield suggest(
            case,
            instant,
            change.change,
            change.title,
            change.code,
            change.computed,
            *change.actions,
            largest=other.largest_block(case.most_samples or other.samples),
        )
        if case.fits(instant.bytes) is False:
            found = largest_that_fits(case, lambda n, other=other: case.peak_of(other, n))  # type: ignore[misc]
            if found is not None:
                yield suggest(
                    case,
                    found[1],
                    MODE_AND_BATCH,
                    f"{change.title}, and a physical batch of at most "
                    f"{format_count(found[0] // samples_of_each(case), 'sample')}",
                    f"{change.code}\n{batch_code(case, found[0])}",
                    change.computed,
                    *change.actions,
                    batch_action(case, found[0]),
                    largest=other.largest_block(found[0]),
                )


def mode_change(case: Case, mode: str) -> Change | None:
    """Returns the change to another mode; None if it is no other mode, or not possible."""
    step = case.step
    if step is None or step.mode not in (*PER_SAMPLE_MODES, "ghost", "fast") or mode == step.mode:
        return None
    if mode == "hooks" and step.mode in PER_SAMPLE_MODES:
        return None
    # In ghost clipping each backward pass would discard the gradients of earlier ones.
    if mode == "ghost" and (case.shapes.accumulated > 1 or _uses_weights_again(step)):
        return None
    if mode == "flash_clip" and (case.shapes.flash_clip_refusal() is not None or case.shapes.mixes_samples()):
        return None
    return Change(
        MODE if mode == "flash_clip" else OTHER_MODE,
        f'grad_sample_mode="{mode}"',
        _code(step.mode, mode, case.shapes),
        _why(step, mode),
        (_action(mode),),
        lambda changed: changed.in_mode(mode),
        same_forward=True,
    )


def _uses_weights_again(step: Step) -> bool:
    """Returns whether a layer with a norm sampler runs again before its backward pass, which Opacus' hooks refuse."""
    samplers = [layer for layer in step.layers if layer.module.norm_sampler]
    times = {layer.name: step.passes * layer.forward.calls for layer in samplers}
    return any(layer.module.tied_to or layer.name in step.recomputed or times[layer.name] > 1 for layer in samplers)


def _action(mode: str) -> Action:
    return Action(kind="grad_sample_mode", value=mode)


def _code(current: str, mode: str, shapes: TrainingShapes) -> str:
    call, program = shapes.engine_call, shapes.program
    criterion, loss = program.criterion or "criterion", program.loss or "torch.nn.CrossEntropyLoss()"
    if mode == "ghost":
        names = f"{program.model}, {program.optimizer}, {criterion}, {program.loader}"
        made = f"{criterion} = {loss}  # or the loss of the loop, which then calls it\n"
        code = f'{names} = engine.{call}(..., criterion={criterion}, grad_sample_mode="ghost")'
        return code if program.criterion else made + code
    names = after = ""
    if current in ("ghost", "fast"):  # which have returned a criterion, and have changed the one that they got
        names = f"{program.model}, {program.optimizer}, {program.loader} = "
        after = f"\n{criterion} = {loss}  # the loss itself" + ("" if program.loss else ", or another one")
    if mode == "flash_clip":
        imported = "from opacus_memprof import PrivacyEngine  # has Opacus' interface\n"
        return f'{imported}{names}PrivacyEngine().{call}(..., grad_sample_mode="flash_clip"){after}'
    return f'{names}engine.{call}(..., grad_sample_mode="{mode}"){after}'


def _why(step: Step, mode: str) -> str:
    n = step.samples
    samples = sum(layer.per_sample_gradients(n) for layer in step.layers)
    if mode == "hooks":
        squares = max((layer.ghost_norms(n) for layer in step.layers), default=0)
        return (
            f"Per-sample gradients of all layers are {format_bytes(samples)} (s n w), and norms of a single layer "
            f"take {format_bytes(squares)} here."
        )
    if mode == "flash_clip":
        kept = sum(FlashClip(layer, in_registers=step.on_gpu).kept_bytes(n) for layer in step.layers)
        return (
            f"Per-sample gradients of all layers would be {format_bytes(samples)} (s n w); this mode keeps "
            f"{format_bytes(kept)}: for each layer its gradients or their factors, whichever is smaller, and no p.grad."
        )
    return (
        f"Per-sample gradients of all layers are {format_bytes(samples)} (s n w), which this mode does not keep; "
        "instead, autograd's saved tensors stay live through a second backward pass."
    )
