# SPDX-License-Identifier: Apache-2.0
"""Estimates the memory of the run's own training step (step.Step) from what hooks have recorded.

If the run ended before its first forward did, the remaining layers are estimated too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from opacus_memprof.analysis.kept_memory import model_of
from opacus_memprof.analysis.oom.failure import (
    ACTIVATIONS,
    BlockGroup,
    Failure,
    History,
    Leftovers,
    made_in_step,
    sum_by,
)
from opacus_memprof.analysis.oom.layers import (
    NORMS,
    Layer,
    distribute_missing,
    releasing_layers,
    repeated_units,
    unit_prefix,
    with_residual_gradients,
)
from opacus_memprof.analysis.oom.step import Step
from opacus_memprof.profiles.categories import PER_SAMPLE, RESIDENT
from opacus_memprof.profiles.layer_shapes import CaptureShape, LayerShape, TrainingShapes, WholeForward

_TOLERANCE = 0.05  # of a forward: what is live in it beside what it keeps


def estimate_step(failure: Failure, shapes: TrainingShapes, history: History, leftovers: Leftovers) -> Step | None:
    """Returns the run's own step, without leftovers. None if the model or its batch size is unknown."""
    samples = shapes.batch_size_in(failure.step)
    if not shapes.modules or not samples:
        return None
    activations = [group for group in failure.block_groups if group.category in ACTIVATIONS]
    left_behind = leftovers.by_module if leftovers.are_captures else {}
    # What variables keep from the step before, as its output, is released when the next one is assigned to them.
    carried = [group for group in activations if _is_carried(group, failure) and group not in leftovers.block_groups]
    activations = [group for group in activations if group not in carried]
    by_module = sum_by(activations, lambda group: group.module)
    live = {module: max(size - left_behind.get(module, 0), 0) for module, size in by_module.items()}
    largest_blocks: dict[str, int] = {}
    for group in activations:
        largest_blocks[group.module] = max(largest_blocks.get(group.module, 0), group.largest)
    if leftovers.stray_samples:
        stray = max(leftovers.stray_samples)
        largest_blocks |= {module: largest_blocks.get(module, 0) * samples // stray for module in left_behind}
    seen = {name: _with_samples(forward, samples) for name, forward in shapes.forwards.items()}
    in_first_forward = failure.phase == "forward" and not history.step_peaks
    trains = in_first_forward or shapes.evaluation is None
    whole = shapes.whole_forward() if trains else None
    if whole is not None and not in_first_forward and any(forward.calls > 1 for forward in whole.forwards.values()):
        whole = None  # a recurrent cell: its calls release their activations in turn
    calls = passes = _forward_passes(shapes, leftovers)
    if whole is not None:
        kept = sum(whole.kept.values())
        if in_first_forward:
            # More than one forward keeps: the program calls the model several times before a backward.
            in_forward = sum(live.get(module, 0) for module in whole.kept if module)  # the loss is outside
            calls = max(math.ceil(in_forward / kept - _TOLERANCE), 1) if kept else 1
        seen = {
            name: _with_samples(forward, samples) if forward.samples == whole.samples else forward
            for name, forward in whole.forwards.items()
        }
        largest_blocks = whole.largest | whole.streams
    reached = failure.module if in_first_forward and whole is None else None
    saved = (
        _saved_by_name(live, largest_blocks, _order(shapes, seen, reached), seen)
        if whole is None
        else _saved_in_order(whole, calls * samples / max(whole.samples, 1), shapes)
    )
    layers = _layers(shapes, seen, saved, largest_blocks, samples, reached=reached)
    if not layers:
        return None
    last = layers[-1]
    produced = carried_output = last.forward.output_bytes
    if whole is not None:
        ratio = samples / max(whole.samples, 1)
        produced = int(ratio * sum(each.bytes for each in whole.blocks if each.is_output))
        carried_output = produced + int(ratio * sum(each.bytes for each in whole.blocks if each.is_cached))
        layers = [
            replace(each, is_added=each.name in whole.added, operations=whole.operations(each.name)) for each in layers
        ]
    makers = {last.name}
    if whole is not None:  # what comes after the last layer can have made it, such as a log_softmax of the model's
        makers = {each.module for each in whole.blocks if each.is_output}
    before = sum_by(carried, lambda group: group.module)
    output = min(max(sum(sizes.get(name, 0) for name in makers) for sizes in (live, before)), produced)
    loss = live.get("", 0) if "" not in {layer.name for layer in layers} and whole is None else 0
    present = sum(left_behind.values()) + loss + sum(layer.activations for layer in layers)
    most = max(history.most_activations - sum(before.values()), history.most_outside_forward)
    if failure.step and failure.phase != "forward" and shapes.batch_size_in(0) == samples:
        # Later forwards may begin with an output of the step before, which this failure cannot tell.
        most = max(min(most, history.most_in_first_step), history.most_outside_forward)
    missing = most - present
    if in_first_forward:
        is_cast = any(layer.is_autocast for layer in layers)
        in_float32 = produced * 4 // last.forward.element_bytes + is_cast * produced
        output, loss = produced, max(saved.loss, loss, in_float32)  # losses compute in float32
        if shapes.drops_output and saved.loss and whole is not None:  # of a model that computes its loss itself
            unsaved = sum(each.bytes for each in whole.blocks if each.is_output and not each.first_save)
            output -= int(samples / max(whole.samples, 1) * unsaved)
    elif whole is not None:
        loss = max(missing - saved.tail - calls * produced, saved.loss)
    elif missing > 0:  # backward releases the loss's activations first
        released = min(missing, produced) if failure.phase == "backward" else 0
        loss += released
        layers = distribute_missing(layers, missing - released, failure.module if failure.phase == "backward" else "")
    if whole is None:
        layers[-1] = replace(layers[-1], activations=max(layers[-1].activations - output, 0))
    by_category = failure.sum_by(lambda group: group.category)
    # That of a single product is not there when the optimizer steps.
    stepped = [each for each in history.peaks if each.phase in ("noise", "optimizer_step")]
    for each in stepped if "library_workspace" in by_category else ():
        kept_workspace = each.categories.get("library_workspace", 0)
        by_category["library_workspace"] = min(by_category["library_workspace"], kept_workspace)
    trained = shapes.trained_bytes
    largest = max(module.bytes for module in shapes.modules.values())
    on_gpu = failure.device != "cpu"
    inside = math.gcd(*(layer.forward.calls for layer in layers))  # passes of a siamese network in one forward
    layers = [replace(layer, forward=layer.forward.divided(inside)) for layer in layers]
    # On a GPU torch updates all parameters at once (foreach), on the CPU one after the other.
    update = shapes.step_temporaries * trained if on_gpu else 2 * largest * bool(shapes.step_temporaries)
    theirs = [group for group in failure.block_groups if _is_of_another_model(group, shapes)]
    theirs = [group for group in theirs if group not in leftovers.block_groups and not _is_resident(group.category)]
    others = sum_by(theirs, lambda group: group.category)
    others["gradients"] = others.get("gradients", 0) + shapes.untrained_gradients() + shapes.coming_gradients
    others["optimizer_states"] = others.get("optimizer_states", 0) + shapes.coming_states
    made = max(made_in_step(failure, shapes) - leftovers.by_category.get("unattributed", 0), 0)
    return Step(
        mode=shapes.mode,
        mean_loss=shapes.mean_loss,
        samples=samples,
        layers=tuple(layers),
        resident=sum(
            size - leftovers.by_category.get(category, 0)
            for category, size in by_category.items()
            if _is_resident(category)
        )
        + sum(others.values())
        - made,
        others=others,
        made=made,
        made_workspace=max(history.most_between - by_category.get("unattributed", 0), 0) if made else 0,
        unused_graphs=min(sum(each.bytes for each in shapes.untrained_graphs() if each.is_unused), made),
        trained=trained,
        largest=largest,
        states=max(
            shapes.state_tensors * trained, by_category.get("optimizer_states", 0) - others.get("optimizer_states", 0)
        ),
        update=update,
        loss=loss,
        inputs=by_category.get("inputs", 0),
        keeps_gradients=keeps_gradients(shapes),
        clears_late=shapes.clears_late,
        output=output,
        carried=carried_output if shapes.keeps_output else 0,
        logits=produced,
        tail=saved.tail,
        largest_in_tail=saved.largest_in_tail,
        forward_peak=0 if whole is None else int(ratio * ((calls - 1) * kept + whole.peak)),
        product_peak=0 if whole is None else int(ratio * ((calls - 1) * kept + whole.product_peak)),
        multiprocessors=shapes.multiprocessors if on_gpu else 0,
        is_guessed=in_first_forward and whole is None and not _has_seen_whole_unit(shapes, seen),
        workspace=shapes.workspace if on_gpu and not by_category.get("library_workspace") else 0,
        forms_squares=not shapes.program.has_norm_samplers,
        copies_samples=not shapes.program.adopts_samples,
        passes=passes * inside,
        recomputed={} if whole is None else whole.recomputed_before(calls * ratio),
    )


def _forward_passes(shapes: TrainingShapes, leftovers: Leftovers) -> int:
    """Returns how many forward passes each backward pass is for, as Opacus' captures show."""
    is_known = shapes.mode in ("hooks", "functorch") and not leftovers.are_captures
    return max(shapes.released, len(shapes.unreleased)) if is_known else 1


def keeps_gradients(shapes: TrainingShapes) -> bool:
    """Returns whether p.grad outlives zero_grad, or is there in later backward passes because it accumulates.

    If no zero_grad was seen, the defaults count: Opacus' optimizers keep it, torch's do not.
    """
    if shapes.accumulates:
        return True
    if shapes.keeps_gradients is not None:
        return shapes.keeps_gradients
    return shapes.mode not in ("", "flash_clip")


def _is_carried(group: BlockGroup, failure: Failure) -> bool:
    return failure.phase == "forward" and group.step < failure.step


def _is_of_another_model(group: BlockGroup, shapes: TrainingShapes) -> bool:
    """Returns whether a block belongs to a model other than the trained one, whose per-sample gradients may stay."""
    trained = {model_of(name)[1] for name in shapes.modules}
    return bool(group.module) and group.category not in ACTIVATIONS and model_of(group.module)[1] not in trained


def _is_resident(category: str) -> bool:
    """Returns whether blocks of a category live through all steps. The program's own categories are assumed to."""
    transient = {"gradients", "optimizer_states", "summed_gradients", "noise", "optimizer_temporaries", "pending_free"}
    return category in RESIDENT or category not in PER_SAMPLE | transient


def _with_samples(forward: CaptureShape, samples: int) -> CaptureShape:
    """Returns the same forward with another number of samples."""
    if forward.samples == samples or not forward.samples:
        return forward
    return replace(
        forward,
        samples=samples,
        input_bytes=forward.input_bytes * samples // forward.samples,
        output_bytes=forward.output_bytes * samples // forward.samples,
        viewed_bytes=forward.viewed_bytes * samples // forward.samples,
    )


@dataclass
class _Saved:
    """Bytes of activations by the layer whose backward releases them.

    Attributes:
        own: bytes that the layer itself has allocated.
        before: bytes that have been allocated before its forward began.
        largest: the largest block of both.
        largest_squares: the largest block of `before` that can be attention weights.
        captured: those of both that only Opacus' captures keep, while autograd keeps what autocast has cast them to.
        shared: those of `before` that several operations have saved.
        tail: bytes that have been allocated after the last layer, without those of the loss.
        largest_in_tail: the largest block of them.
        loss: those of a softmax after the last layer: the model computes its loss itself.
    """

    own: dict[str, int] = field(default_factory=dict)
    before: dict[str, int] = field(default_factory=dict)
    largest: dict[str, int] = field(default_factory=dict)
    largest_squares: dict[str, int] = field(default_factory=dict)
    captured: dict[str, int] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    tail: int = 0
    largest_in_tail: int = 0
    loss: int = 0


def _saved_in_order(whole: WholeForward, times: float, shapes: TrainingShapes) -> _Saved:
    """Returns the bytes that a forward pass keeps beside its output, multiplied by `times`."""
    saved = _Saved()
    for block in whole.blocks:
        layer, size = block.layer, 0 if block.is_output else int(times * block.bytes)
        if layer is None:
            of_loss = block.is_softmax and not block.is_attention
            saved.tail += 0 if of_loss else size
            saved.largest_in_tail = max(saved.largest_in_tail, 0 if of_loss else size)
            saved.loss += size if of_loss else 0
            continue
        sizes = saved.own if layer == block.module else saved.before
        sizes[layer] = sizes.get(layer, 0) + size
        saved.largest[layer] = max(saved.largest.get(layer, 0), block.bytes)
        if block.is_attention:
            saved.largest_squares[layer] = max(saved.largest_squares.get(layer, 0), block.bytes)
        if block.is_shared and layer != block.module:
            saved.shared[layer] = saved.shared.get(layer, 0) + size
        if block.captor is not None and shapes.modules[block.captor].kind not in NORMS:
            saved.captured[layer] = saved.captured.get(layer, 0) + size
    for block in whole.recomputed:
        if block.layer is not None:
            saved.largest[block.layer] = max(saved.largest.get(block.layer, 0), block.bytes)
    return saved


def _saved_by_name(
    live: Mapping[str, int], largest_blocks: Mapping[str, int], order: Sequence[str], seen: Mapping[str, CaptureShape]
) -> _Saved:
    """Returns what modules keep, by the layers whose names are the nearest.

    Args:
        live: bytes of activations by module.
        largest_blocks: the largest activation by module.
        order: the layers, in forward order.
        seen: the forwards that hooks have recorded.
    """
    releasing = releasing_layers(live, order)
    containers = {name[:end] for name in order for end in range(len(name)) if name[end] == "."}
    saved = _Saved(own={name: live[name] for name, layer in releasing.items() if name == layer})
    for name, layer in releasing.items():
        block = largest_blocks.get(name, 0)
        saved.largest[layer] = max(saved.largest.get(layer, 0), block)
        if name != layer:
            saved.before[layer] = saved.before.get(layer, 0) + live[name]
            is_square = name in containers and layer in seen and _is_square(block, seen[layer])
            if is_square and block > _widest(name, seen) and not _is_like_an_output(name, block, seen):
                saved.largest_squares[layer] = max(saved.largest_squares.get(layer, 0), block)
    return saved


def _widest(container: str, seen: Mapping[str, CaptureShape]) -> int:
    """Returns the bytes of the widest input of a container's layers: adapters have one that is as narrow as their rank.

    A block that is not wider holds features of tokens.
    """
    inside = (forward for name, forward in seen.items() if name.startswith(f"{container}."))
    return max((forward.input_bytes // forward.calls for forward in inside), default=0)


def _is_like_an_output(container: str, block: int, seen: Mapping[str, CaptureShape]) -> bool:
    """Returns whether a block has the size of an output of a container's layers, as the sum with an adapter's has."""
    inside = (forward for name, forward in seen.items() if name.startswith(f"{container}."))
    return any(forward.output_bytes // forward.calls == block for forward in inside)


def _order(shapes: TrainingShapes, seen: Mapping[str, CaptureShape], reached: str | None) -> list[str]:
    """Returns the layers in forward order: layers that were seen, then the others if the forward did not end."""
    others = [name for name in shapes.modules if name not in seen] if reached is not None else []
    return [name for name in [*seen, *others] if name in shapes.modules]


def _layers(
    shapes: TrainingShapes,
    seen: Mapping[str, CaptureShape],
    saved: _Saved,
    largest_blocks: Mapping[str, int],
    samples: int,
    *,
    reached: str | None,
) -> list[Layer]:
    """Returns the layers in forward order, with their activations.

    Args:
        shapes: of the model.
        seen: the forwards that hooks have recorded, for `samples` samples.
        saved: the activations by layer.
        largest_blocks: the largest activation by module.
        samples: of the batch.
        reached: the module in which the first forward ended. Layers behind it are taken to be like layers that have the
            same place in another repeated unit; if there are none, they are estimated from their shapes. None: the
            forward was complete.
    """
    units = repeated_units(shapes.modules)
    begun = [prefix for prefix in units if any(unit_prefix(name) == prefix for name in seen)]
    unfinished = unit_prefix(reached or "")
    unfinished = unfinished if unfinished in units else (begun or [""])[-1]
    layers: list[Layer] = []
    viewed: set[int] = set()
    for name in _order(shapes, seen, reached):
        module = shapes.modules[name]
        prefix, forward = unit_prefix(name), seen.get(name)
        twins = [name]
        if reached is not None and prefix in units and (forward is None or prefix == unfinished):
            alike = [
                other
                for other in dict.fromkeys([*begun, unfinished])
                if other in units and units[other].signature == units[prefix].signature
            ]
            # What an unfinished unit has may be temporary, unless it is a single layer.
            finished = [other for other in alike if other != unfinished or other in shapes.modules] or alike
            twins += [other + name[len(prefix) :] for other in finished]
            forward = forward or next((seen[twin] for twin in twins if twin in seen), None)
        own, before, block, square = (
            max(sizes.get(twin, 0) for twin in twins)
            for sizes in (saved.own, saved.before, saved.largest, saved.largest_squares)
        )
        if forward is None:
            forward = _guess_forward(module, layers[-1] if layers else None, samples)
            own = max(own, forward.output_bytes)
            before = max(before, forward.input_bytes)  # saved by an operation between the two layers
        captured = saved.captured.get(name, 0)
        if forward.viewed_id in viewed:  # heads that have views of one tensor keep it once
            forward = replace(forward, viewed_bytes=0)
        viewed.add(forward.viewed_id)
        layers.append(
            Layer(
                name,
                module,
                forward,
                own + before,
                block,
                saved_before=before,
                largest_square=square,
                captured=captured,
                shared=saved.shared.get(name, 0),
            )
        )
    return with_residual_gradients(layers, largest_blocks, units)


def _has_seen_whole_unit(shapes: TrainingShapes, seen: Mapping[str, CaptureShape]) -> bool:
    """Returns whether the forward of a repeated unit has been seen as a whole, or nothing repeats."""
    units = repeated_units(shapes.modules)
    unseen = {unit_prefix(name) for name in shapes.modules if name not in seen}
    return not units or any(prefix not in unseen for prefix in units)


def _is_square(block: int, forward: CaptureShape) -> bool:
    """Returns whether a block can be the attention weights of a layer's heads, tokens by tokens."""
    square = forward.samples * forward.tokens**2 * forward.element_bytes
    return forward.tokens > 1 and block > 0 and block % square == 0


def _guess_forward(module: LayerShape, previous: Layer | None, samples: int) -> CaptureShape:
    """Estimates the forward of a layer that was not reached, from the previous layer.

    It has as many tokens as the previous layer, but a Linear after convolutions has one token per sample.
    """
    tokens, element_bytes = (previous.forward.tokens, previous.forward.element_bytes) if previous else (1, 4)
    rows, columns = (module.rows, module.columns) if module.rows else (module.weight, module.weight)
    columns = columns * module.groups // module.kernel_positions
    if module.kind == "Embedding":
        rows, columns = columns, 1
    behind_convolutions = previous is not None and (previous.is_convolution or previous.module.kind == "GroupNorm")
    if module.kind == "Linear" and behind_convolutions:
        tokens = 1
    size = samples * tokens * element_bytes
    layout_copied = previous is not None and previous.forward.layout_copied and module.kernel_positions > 1
    return CaptureShape(samples, tokens, size * columns, size * rows, element_bytes, previous is None, layout_copied)
