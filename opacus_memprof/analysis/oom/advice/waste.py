# SPDX-License-Identifier: Apache-2.0
"""Suggests freeing memory that serves no purpose: leftovers, unused gradients, fragments, other processes."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from opacus_memprof.analysis.findings import MATERIAL, largest
from opacus_memprof.analysis.kept_memory import MANY_BATCHES, earlier_models, model_of
from opacus_memprof.analysis.oom.advice.changes import (
    batch_action,
    batch_code,
    largest_that_fits,
    samples_of_each,
)
from opacus_memprof.analysis.oom.advice.suggestion import BATCH, DEFECT, LINE, SETTING, Suggestion, format_sum, suggest
from opacus_memprof.analysis.oom.failure import (
    ACTIVATIONS,
    CONTEXT,
    MARGIN,
    BlockGroup,
    find_evaluation,
    is_crowded_by_others,
    is_fragmented,
    sum_by,
    was_free_again,
)
from opacus_memprof.analysis.oom.predict import Case
from opacus_memprof.analysis.oom.step import PER_SAMPLE_MODES, Instant
from opacus_memprof.profiles.categories import PER_SAMPLE
from opacus_memprof.profiles.oom_report import Action
from opacus_memprof.profiles.units import format_bytes, format_count

_IN_TURN = "x, y = x.to(device), y.to(device)  # in the loop; keep no list or queue of batches on the GPU"
_NOT_OF_EVALUATION = {"inputs", "per_sample_gradients"}
_MANY_TENSORS = 3  # of the bytes of a step's peak, one in so many
_BY_HAND = ("unattributed", "backward_temporaries", "gradients")


def release_leftovers(case: Case) -> Iterator[Suggestion]:
    """Suggests freeing blocks of earlier steps, or of forward passes without a backward pass."""
    left = case.leftovers
    if not left.bytes:
        return
    instant = case.peak(with_leftovers=False)
    size = f"{format_bytes(left.bytes)} ({largest(left.by_module)})"
    if left.are_captures:
        computed = f"Opacus holds {size} of activations from forward passes without a backward pass."
        if left.stray_samples:
            computed += _sized_by_strays(case)
        yield suggest(
            case,
            instant,
            DEFECT,
            "forward passes without a backward pass under torch.no_grad(), or in model.eval()",
            "with torch.no_grad():  # around every forward pass without a backward pass",
            computed,
            Action(kind="no_grad", modules=list(left.by_module)),
        )
        return
    if left.backward_passes:
        # The sum, and the gradients of the pass before, to which a variable still refers.
        parts = {**instant.parts, "gradients": instant.parts.get("gradients", 0) + 2 * case.shapes.trained_bytes}
        yield suggest(
            case,
            replace(instant, parts=parts),
            DEFECT,
            f"adding up the gradients of {left.backward_passes} backward passes, instead of keeping all",
            "for t, g in zip(total, grads): t.add_(g, alpha=scale)  # in the loop, if scale clips them; keep no list",
            f"{size} of gradients of one step's backward passes are live, and more would have followed.",
            Action(kind="add_gradients", modules=list(left.by_module)),
        )
        return
    if left.forward_passes:
        yield suggest(
            case,
            instant,
            DEFECT,
            "forward passes without a backward pass under torch.no_grad(), or a backward pass after each",
            "with torch.no_grad():  # around an evaluation; add up loss.item(), not loss. In training, call "
            "loss.backward() for each part",
            f"{left.forward_passes} forward passes in a row recorded graphs, without a backward pass, and {size} of "
            "theirs are live.",
            Action(kind="no_grad", modules=list(left.by_module)),
        )
        return
    steps = left.steps
    if case.shapes.is_public and "per_sample_gradients" in left.by_category:
        program = case.shapes.program
        yield suggest(
            case,
            instant,
            DEFECT,
            "stepping the optimizer that make_private returned: this training is not private",
            f"{program.model}, {program.optimizer}, {program.loader} = PrivacyEngine().{case.shapes.engine_call}(...)"
            "  # the loop calls zero_grad and step of this optimizer",
            f"{size} of per-sample gradients stay from {format_count(len(steps), 'step')}: the optimizer that steps "
            "neither clips, nor adds noise, nor clears them.",
            Action(kind="let_go", categories=list(left.by_category), modules=list(left.by_module)),
        )
        return
    categories = ", ".join(name.replace("_", " ") for name in left.by_category)
    code = (
        "losses.append(loss.item())  # not the tensor, which keeps its step's memory alive; or .detach().cpu()"
        if "activations" in left.by_category
        else "# look for lists, dictionaries and attributes that keep tensors of each step"
    )
    yield suggest(
        case,
        instant,
        DEFECT,
        f"freeing what each step leaves behind: {categories}",
        code,
        f"{size} from {len(steps)} steps between {steps[0]} and {steps[-1]} are still live, about "
        f"{format_bytes(left.bytes // len(steps))} of each.",
        Action(kind="let_go", categories=list(left.by_category), modules=list(left.by_module)),
    )


def release_models(case: Case) -> Iterator[Suggestion]:
    """Suggests freeing models of earlier trainings in the same process."""
    modules: dict[str, dict[str, int]] = {}
    for (module, category), size in case.failure.sum_by(lambda group: (group.module, group.category)).items():
        modules.setdefault(module, {})[category] = size
    made_in = {
        model_of(group.module)[1]: group.step
        for group in case.failure.block_groups
        if group.category == "model_parameters"
    }
    sizes = earlier_models(modules, made_in)
    total = sum(sizes.values())
    instant = case.peak()
    if total < MATERIAL * instant.bytes:
        return
    program = case.shapes.program
    theirs = [group for group in case.failure.block_groups if group.module and model_of(group.module)[1] in sizes]
    freed = sum_by(theirs, lambda group: group.category)
    yield suggest(
        case,
        _without(instant, freed),
        DEFECT,
        f"freeing {format_count(len(sizes), 'equal model')} of earlier trainings",
        f"import gc\n{program.model} = {program.optimizer} = {program.loader} = loss = None; gc.collect()  # before "
        "each training",
        f"{largest(sizes)} of models that an equal one has followed are alive: hooks keep a private model in a "
        "reference cycle.",
        Action(kind="release_models", modules=list(sizes)),
    )


def _without(instant: Instant, freed: Mapping[str, int]) -> Instant:
    """Returns the instant without these bytes by category. A step's own instants have most categories as resident."""
    parts = {name: size - freed.get(name, 0) for name, size in instant.parts.items()}
    if rest := sum(size for name, size in freed.items() if name not in parts):
        parts["resident"] = parts.get("resident", 0) - rest
    return replace(instant, parts=parts)


def clear_other_models(case: Case) -> Iterator[Suggestion]:
    """Suggests clearing the per-sample gradients of private models that were trained before and stay alive.

    These are models of the same kind, such as those of the clients in federated learning.
    """
    in_use = {
        case.failure.module,
        *(group.module for group in case.failure.block_groups if group.category in ACTIVATIONS),
    }
    # Between backward and zero_grad none has activations.
    in_use = {model_of(module)[1] for module in in_use if module} or {
        model_of(module)[1] for module in case.shapes.modules
    }
    theirs = [
        group
        for group in case.failure.block_groups
        if group.category == "per_sample_gradients" and model_of(group.module)[1] not in in_use
    ]
    total = sum(group.bytes for group in theirs)
    instant = case.peak()
    models = {model_of(group.module)[1] for group in theirs}
    if not models or total < MATERIAL * instant.bytes:
        return
    parts = {**instant.parts, "per_sample_gradients": instant.parts.get("per_sample_gradients", 0) - total}
    yield suggest(
        case,
        replace(instant, parts=parts),
        DEFECT,
        f"clearing the gradients of {format_count(len(models), 'other model')} after each one's training",
        f"{case.shapes.program.optimizer}.zero_grad()  # after the last step of each model's training",
        f"{format_bytes(total)} are per-sample gradients of models that are not being trained: they stay until their "
        "optimizer's next zero_grad.",
        Action(kind="clear_gradients", modules=sorted(models)),
    )


def move_batches_in_turn(case: Case) -> Iterator[Suggestion]:
    """Suggests moving each batch to the device when it is its turn, if many are there."""
    batch, instant = case.shapes.input_bytes, case.peak()
    if case.samples is None:
        yield from _keep_fewer_tensors(case)
        return
    if case.leftovers.bytes:  # graphs of forward passes keep their inputs
        return
    if case.step is None or not case.step.made:  # what a step makes of its batch is not kept
        yield from _keep_fewer_tensors(case)
    inputs = [group for group in case.failure.block_groups if group.category in ("inputs", "unattributed")]
    largest_block = max((group.largest for group in inputs if group.category == "inputs"), default=0)
    waiting = [group for group in inputs if group.largest == largest_block]
    size = sum(group.bytes for group in waiting) - batch
    if not batch or size < MANY_BATCHES * batch or size < MATERIAL * instant.bytes:
        return
    sizes = sum_by(waiting, lambda group: group.category)
    sizes["inputs"] = sizes.get("inputs", 0) - batch
    computed = f"{format_bytes(size)} of batches are on the GPU beside the one in use of {format_bytes(batch)}."
    actions = [Action(kind="move_in_turn")]
    after = _without(instant, sizes)
    yield suggest(case, after, DEFECT, "moving each batch to the GPU when it is its turn", _IN_TURN, computed, *actions)
    fitting = None if case.fits(after.bytes) else largest_that_fits(case, lambda n: _without(case.peak(n), sizes))
    if fitting is not None and not case.shapes.mode:
        n, after = fitting
        yield suggest(
            case,
            after,
            DEFECT,
            f"moving each batch to the GPU when it is its turn, with {format_count(n, 'sample')} instead of "
            f"{case.samples}",
            f"{_IN_TURN}\nDataLoader(..., batch_size={n})  # and step less often, to train as with {case.samples}",
            computed,
            *actions,
            Action(kind="batch_size", value=n),
            largest=case.largest_block(n),
        )


def _keep_fewer_tensors(case: Case) -> Iterator[Suggestion]:
    """Suggests moving tensors one at a time, if one line of the program made many of them, which are live."""
    by_line: dict[str, list[BlockGroup]] = {}
    for group in case.failure.block_groups:
        if group.category == "unattributed" and ":" in group.op:
            by_line.setdefault(group.op, []).append(group)
    groups = max(by_line.values(), key=lambda each: sum(group.bytes for group in each), default=[])
    size, largest_block = sum(each.bytes for each in groups), max((each.largest for each in groups), default=1)
    count, line = size // largest_block, groups[0].op.partition(" < ")[0] if groups else ""
    instant = case.peak()
    if count <= MANY_BATCHES or _MANY_TENSORS * size < instant.bytes:
        return
    yield suggest(
        case,
        _without(instant, {"unattributed": size - largest_block}),
        DEFECT,
        f"moving each of {count} tensors of {format_bytes(largest_block)} to the GPU when it is its turn",
        f"# {line} keeps them: leave them on the CPU, and call .to(device) in the loop for the one that is needed",
        "They were made before the first training step."
        if case.samples is None
        else "They are kept from step to step, and more may follow.",
        Action(kind="move_in_turn"),
    )


def split_gradients_by_hand(case: Case) -> Iterator[Suggestion]:
    """Suggests fewer samples at a time, if the program computes per-sample gradients itself, by torch.func."""
    if case.shapes.by_hand is None:
        return
    samples, size = case.shapes.by_hand
    instant = case.peak()
    rest = {name: part for name, part in instant.parts.items() if name not in _BY_HAND}
    whole = instant.bytes - sum(rest.values())
    if 2 * whole < samples * size:
        return
    halves = [samples >> halvings for halvings in range(1, samples.bit_length())]
    for n in halves:
        # Those of the part before, and its own; and the model, gradients, their sum and noise.
        parts = {**rest, "per_sample_gradients": max(2 * n * size, whole * n // samples), "gradients": 4 * size}
        peak = replace(instant, parts=parts)
        if case.fits(peak.bytes) is not False or n == 1:
            yield suggest(
                case,
                peak,
                DEFECT,
                f"gradients of {n} samples at a time instead of {samples}",
                f"for x, y in zip(x.split({n}), y.split({n})):  # compute, clip and add up; then add noise and step",
                f"vmap(grad(...)) computes the gradients of {samples} samples at once, {format_bytes(samples * size)}.",
                Action(kind="split_batch", value=n),
                largest=n * size,
            )
            return


def evaluate_without_graph(case: Case) -> Iterator[Suggestion]:
    """Suggests an evaluation without graphs, or one with smaller batches, if memory ran out in an evaluation."""
    evaluation = find_evaluation(case.failure, case.shapes)
    if evaluation is None:
        return
    samples, has_graph = evaluation
    instant = case.peak()
    if has_graph:
        size = sum(instant.parts.get(category, 0) for category in ACTIVATIONS)
        kept = {name: part for name, part in instant.parts.items() if name not in ACTIVATIONS}
        # Steps after an evaluation have its last graph, too, if a variable refers to it.
        steps = [each for each in case.history.peaks if each.phase not in ("forward", "idle")]
        steps = [each for each in steps if each.step < case.failure.step] or steps
        training = [Instant(each.phase, "", dict(each.categories)) for each in steps]
        yield suggest(
            case,
            max(
                replace(instant, parts={**kept, "forward_temporaries": _without_graph(case, samples)}),
                *training,
                key=lambda each: each.bytes,
            ),
            DEFECT,
            "evaluating under torch.no_grad()",
            "with torch.no_grad():  # around the evaluation; keep loss.item() and output.detach(), not loss and output",
            f"The evaluation records graphs, and {format_bytes(size)} of activations are live: model.eval() alone "
            "keeps them for a backward pass.",
            Action(kind="no_grad", modules=[]),
        )
        return
    # Inputs may be a whole test set, which stays. Per-sample gradients are those of the step before.
    growing = {"forward_temporaries": case.forward}
    if not case.forward:  # a layer needs its input and its output at once
        growing = {name: 2 * size for name, size in instant.parts.items() if name in PER_SAMPLE - _NOT_OF_EVALUATION}
    steps = [each for each in case.history.peaks if each.phase not in ("forward", "idle")]
    training = [Instant(each.phase, "", dict(each.categories)) for each in steps]
    sizes = (samples >> halvings for halvings in range(1, samples.bit_length()))
    for n in sizes:
        smaller = {name: size * n // samples for name, size in growing.items()}
        evaluating = replace(instant, parts={**instant.parts, **smaller})
        peak = max(evaluating, *training, key=lambda each: each.bytes)
        if case.fits(peak.bytes) is not False:
            yield suggest(
                case,
                peak,
                BATCH,
                f"evaluating batches of {n} instead of {samples}",
                f"DataLoader(..., batch_size={n})  # of the evaluation",
                "What an evaluation allocates grows with its batch.",
                Action(kind="batch_size", value=n),
                largest=0,
            )
            return


def call_without_graph(case: Case) -> Iterator[Suggestion]:
    """Suggests calling models that no optimizer trains, such as a teacher, without recording graphs.

    If that does not fit, a smaller physical batch is suggested with it.
    """
    graphs, step, n = case.shapes.untrained_graphs(), case.step, case.samples
    freed = 0 if step is None else min(sum(each.bytes for each in graphs), step.made)
    if step is None or n is None or freed < MATERIAL * case.peak().bytes:
        return
    gradients = case.shapes.untrained_gradients()
    changed = step.with_changes(
        made=step.made - freed,
        unused_graphs=0,
        resident=step.resident - gradients,
        others={**step.others, "gradients": step.others.get("gradients", 0) - gradients},
    )
    without = replace(case, step=changed, freed=freed)
    # The call still holds an operation's input and output, with a library's workspace or what its caller refers to.
    widest = max(group.largest for group in case.failure.block_groups if group.category == "unattributed")
    in_call = max(max(each.without or 3 * widest for each in graphs), 2 * widest + case.history.workspace_between)

    def peak(samples: int) -> Instant:
        held = {**changed.in_call(samples), "library_workspace": 0, "forward_temporaries": in_call * samples // n}
        return max(without.peak(samples), Instant("idle", "", held), key=lambda instant: instant.bytes)

    names = ", ".join(each.name for each in graphs)
    title = f"calling {names} under torch.no_grad()"
    code = f"with torch.no_grad():  # around each call of {names}"
    computed = (
        f"No optimizer trains {names}, and each call records a graph for a backward pass, which keeps "
        f"{format_bytes(sum(each.bytes for each in graphs))}."
    )
    action = Action(kind="no_grad", modules=[])
    instant = peak(case.most_samples or n)
    yield suggest(case, instant, DEFECT, title, code, computed, action)
    fitting = None if case.fits(instant.bytes) else largest_that_fits(without, peak)
    if fitting is not None and step.mode:
        yield suggest(
            case,
            fitting[1],
            DEFECT,
            f"{title}, and a physical batch of at most {format_count(fitting[0] // samples_of_each(case), 'sample')}",
            f"{code}\n{batch_code(case, fitting[0])}",
            computed,
            action,
            batch_action(case, fitting[0]),
            largest=case.largest_block(fitting[0]),
        )


def _without_graph(case: Case, samples: int) -> int:
    """Returns what a forward pass of `samples` holds without a graph: a layer's input and output at once.

    An activation function after the layer has the layer's output as its input, and one more of the same size.
    """
    return max(
        (
            (max(each.input_bytes, each.output_bytes) + each.output_bytes) * samples // max(each.samples, 1)
            for each in case.shapes.forwards.values()
        ),
        default=0,
    )


def _sized_by_strays(case: Case) -> str:
    """Describes how a stray forward pass with a larger batch enlarges per-sample gradients."""
    most, now = max(case.leftovers.stray_samples), case.samples or 1
    gradients = sum(layer.per_sample_gradients(now) for layer in case.step.layers) if case.step is not None else 0
    return (
        f" One had {format_count(most, 'sample')}, and the forward pass after it {now}: as long as the "
        f"activations are held, Opacus sizes the per-sample gradients of every layer for {most}, "
        f"{format_bytes(gradients * most // now)} instead of "
        f"{format_bytes(gradients)}."
    )


def drop_unused_gradients(case: Case) -> Iterator[Suggestion]:
    """Suggests freeing autograd's p.grad, which clipping of per-sample gradients does not use."""
    if case.shapes.mode not in PER_SAMPLE_MODES or not case.shapes.trained_bytes:
        return
    instant = case.peak(gradients="dropped")
    yield suggest(
        case,
        instant,
        LINE,
        "freeing each p.grad as soon as autograd accumulates it",
        f"for p in {case.shapes.program.optimizer}.params: "  # a frozen parameter takes no such hook
        'p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))',
        f"p.grad takes {format_bytes(case.shapes.trained_bytes)} in backward and is never read: clipping uses "
        "grad_sample, and add_noise replaces it.",
        Action(kind="drop_gradients"),
    )


def set_gradients_to_none(case: Case) -> Iterator[Suggestion]:
    """Suggests zero_grad(set_to_none=True), if zero_grad keeps p.grad as zeros through the next forward."""
    if case.step is None or not case.step.keeps_gradients or case.shapes.accumulates:
        return
    yield suggest(
        case,
        case.peak(gradients="zeroed"),
        LINE,
        "letting zero_grad free p.grad",
        f"{case.shapes.program.optimizer}.zero_grad(set_to_none=True)",
        f"Opacus' zero_grad fills p.grad with zeros, {format_bytes(case.shapes.trained_bytes)} that stay live through "
        "the next forward pass.",
        Action(kind="set_to_none"),
    )


def clear_before_forward(case: Case) -> Iterator[Suggestion]:
    """Suggests zero_grad directly after the step, if it comes between a forward pass and its backward pass."""
    step = case.step
    if step is None or not step.clears_late or case.samples is None:
        return
    left = step.left_in_forward(case.samples)
    names = ", ".join(f"{format_bytes(size)} of {name}" for name, size in left.items() if size)
    yield suggest(
        case,
        case.peak(gradients="early"),
        LINE,
        "zero_grad before the forward pass",
        f"{case.shapes.program.optimizer}.zero_grad()  # directly after step(), and not between forward and backward",
        f"zero_grad comes after the forward pass, in which what the step before has left is live: {names}.",
        Action(kind="clear_gradients"),
    )


def expandable_segments(case: Case) -> Iterator[Suggestion]:
    """Suggests expandable segments if memory is fragmented: they grow and shrink by pages, and hardly fragment."""
    memory, instant = case.memory, case.peak()
    if not is_fragmented(memory, case.failure, instant.bytes) or memory.may_reserve is None:
        return
    if case.leftovers.backward_passes:  # they would fill the memory in any case
        return
    yield Suggestion(
        actions=(Action(kind="allocator_setting", value="expandable_segments:True"),),
        title="expandable segments",
        code="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True  # in the environment, before the program starts",
        computed=f"{format_bytes(memory.cached or 0)} are reserved and free, but the largest block is "
        f"{format_bytes(memory.largest_free or 0)}; with {format_bytes(memory.unreserved or 0)} that the device still "
        f"has, they make room for the {format_bytes(case.failure.requested)} asked for: {format_sum(instant)}",
        peak=instant.bytes,
        saved=memory.cached or 0,
        fits=instant.bytes * memory.rounding <= memory.may_reserve * (1 - MARGIN),
        change=SETTING,
    )


def other_processes(case: Case) -> Iterator[Suggestion]:
    """Suggests ending other processes on the device if this run needs the memory that they use."""
    memory = case.memory
    if not is_crowded_by_others(memory) or memory.others is None or memory.may_reserve is None:
        return
    instant = case.peak()
    without_others = memory.may_reserve + memory.others - CONTEXT
    lacking = int(instant.bytes * memory.rounding / (1 - MARGIN)) - memory.may_reserve
    if lacking <= 0:
        return
    yield Suggestion(
        actions=(Action(kind="other_processes", bytes=memory.others, lacking_bytes=lacking),),
        title="ending the other processes on this device",
        code="nvidia-smi  # shows it",
        computed=f"others use {format_bytes(memory.others)} of the device's {format_bytes(memory.device or 0)}; this "
        f"run lacks {format_bytes(lacking)}: {format_sum(instant)}",
        peak=instant.bytes,
        saved=memory.others,
        fits=instant.bytes * memory.rounding <= without_others * (1 - MARGIN),
        change=SETTING,
    )


def run_again(case: Case) -> Iterator[Suggestion]:
    """Suggests running again if the memory that failed was free a moment later: another process used it."""
    memory, requested = case.memory, case.failure.requested
    instant = case.peak()
    if not was_free_again(memory, case.failure) or not case.fits(instant.bytes):
        return
    free = format_bytes(memory.unreserved or 0)
    yield Suggestion(
        actions=(Action(kind="other_processes", bytes=memory.others or 0, lacking_bytes=0),),
        title=f"running it again without other processes on this device: {free} were free a moment after the "
        f"allocation of {format_bytes(requested)} failed, so another process has freed memory",
        code="nvidia-smi  # shows the processes that are there now",
        computed=f"before it fails, the allocator tries with all free memory of the device, and {free} were free when "
        f"the device was asked afterwards. Fragments are not the cause: {format_bytes(memory.cached or 0)} were "
        f"reserved and free. Others use {format_bytes(memory.others or 0)}: {format_sum(instant)}",
        peak=instant.bytes,
        saved=requested,
        fits=True,
        change=SETTING,
    )
