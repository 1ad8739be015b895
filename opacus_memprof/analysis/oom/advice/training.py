# SPDX-License-Identifier: Apache-2.0
"""Suggests changes of the training itself, such as checkpointing or another data type, alone and combined."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, combinations

from opacus_memprof.analysis.oom.advice.changes import batch_action, batch_code, largest_that_fits, samples_of_each
from opacus_memprof.analysis.oom.advice.changes import mode_change as another_mode
from opacus_memprof.analysis.oom.advice.suggestion import (
    ADAPTERS,
    CHECKPOINTS,
    COMBINED,
    DTYPE,
    LINE,
    OPTIMIZER,
    SEQUENCE,
    Change,
    Suggestion,
    suggest,
)
from opacus_memprof.analysis.oom.layers import Layer, repeated_units
from opacus_memprof.analysis.oom.predict import Case
from opacus_memprof.analysis.oom.step import Instant, Step
from opacus_memprof.profiles.layer_shapes import KeptBlock, LayerShape
from opacus_memprof.profiles.oom_report import Action
from opacus_memprof.profiles.units import format_bytes, format_count

_RANK = 8  # of the adapters
_PROJECTIONS = ("Linear", "Conv1D", "NonDynamicallyQuantizableLinear")  # of attention's output
_MODES = ("", "hooks", "functorch", "ghost", "fast", "flash_clip")


def training_changes(case: Case) -> list[Change]:
    """Returns the changes of the training that are possible."""
    if case.step is None or case.step.mode not in _MODES:
        return []
    makers = (checkpoints, fused_attention, optimizer_states, data_type, adapters, shorter_sequence)
    return [change for maker in makers if (change := maker(case, case.step)) is not None]


def change_training(case: Case) -> Iterator[Suggestion]:
    """Suggests each change of `training_changes` alone."""
    for change in training_changes(case):
        yield _suggestion(case, [change])


def keep_fewer_activations(case: Case) -> Iterator[Suggestion]:
    """Suggests activation checkpoints, and attention without matrices, each alone."""
    if case.step is None or case.step.mode not in _MODES:
        return
    for make in (checkpoints, fused_attention):
        if (change := make(case, case.step)) is not None:
            yield _suggestion(case, [change])


def combine(case: Case) -> Iterator[Suggestion]:
    """Suggests combinations of two or three changes, the smallest that fit; with a smaller batch if none does."""
    if case.step is None:
        return
    mode = another_mode(case, "flash_clip")
    changes = [*([] if mode is None else [mode]), *training_changes(case)]
    several = [list(each) for count in (2, 3) for each in combinations(changes, count)]
    several.sort(key=lambda each: (len(each), sum(change.change for change in each)))
    found = [each for each in several if case.fits(peak_with(case, each).bytes)]
    for each in found[:2]:
        yield _suggestion(case, each)
    if found or not case.samples or not case.step.mode:
        return
    for each in [[change] for change in changes] + several:
        fitting = largest_that_fits(case, lambda n, each=each: peak_with(case, each, n))  # type: ignore[misc]
        if fitting is not None:
            yield _suggestion(case, each, fitting[0])
            return


def _apply(step: Step, changes: list[Change]) -> Step:
    for change in changes:
        step = change.apply(step)
    return step


def peak_with(case: Case, changes: list[Change], n: int | None = None) -> Instant:
    """Returns the predicted peak with these changes, for n samples (default: as many as in the failed step)."""
    assert case.step is not None
    same_forward = all(change.same_forward for change in changes)
    return case.peak_of(_apply(case.step, changes), n, same_forward=same_forward)


def _suggestion(case: Case, changes: list[Change], n: int | None = None) -> Suggestion:
    """Builds the suggestion of these changes, and of a physical batch of at most n samples."""
    assert case.step is not None
    step = _apply(case.step, changes)
    titles, codes = [change.title for change in changes], [change.code for change in changes]
    actions = [action for change in changes for action in change.actions]
    if n is not None:
        titles.append(f"a physical batch of at most {format_count(n // samples_of_each(case), 'sample')}")
        codes.append(batch_code(case, n))
        actions.append(batch_action(case, n))
    return suggest(
        case,
        peak_with(case, changes, n),
        changes[0].change if len(titles) == 1 else COMBINED,
        ", and ".join(titles),
        "\n".join(codes),
        " ".join(change.computed for change in changes),
        *actions,
        largest=step.largest_block(n or case.most_samples or step.samples),
    )


# --- the changes ---


def checkpoints(case: Case, step: Step) -> Change | None:
    """Returns activation checkpointing of repeated units as a change; None if it cannot apply.

    Each unit keeps only its input, and backward recomputes its activations, one unit at a time.
    """
    if step.mode == "ghost":  # whose hooks refuse a forward pass that runs again
        return None
    reentrant = step.mode not in ("", "flash_clip")  # Opacus' hooks know no other kind
    inside: dict[str, list[Layer]] = {}
    for prefix in repeated_units(case.shapes.modules):
        layers = [layer for layer in step.layers if layer.name.startswith(f"{prefix}.")]
        # A reentrant checkpoint passes no gradient on if none of its inputs needs one.
        if layers and not (reentrant and layers[0].forward.from_leaf):
            inside[prefix] = layers
    activations = {prefix: sum(layer.activations for layer in layers) for prefix, layers in inside.items()}
    if not activations or step.recomputed:
        return None
    behind = _behind_the_last_layers(case, step, inside)
    of_others: dict[str | None, int] = {}  # what units before a layer have made, and count for the layer
    for blocks in behind.values():
        for block in blocks:
            of_others[block.layer] = of_others.get(block.layer, 0) + block.bytes

    def apply(changed: Step) -> Step:
        by_name = {layer.name: layer for layer in changed.layers}
        kept: dict[str, int] = {}
        recomputed: dict[str, int] = {}  # by layer: activations of its unit that are recomputed and not used yet
        for layers in inside.values():
            unit = [by_name[layer.name] for layer in layers]
            kept |= {layer.name: unit[0].forward.input_bytes if layer is unit[0] else 0 for layer in unit}
            sums = accumulate(max(layer.activations - of_others.get(layer.name, 0), 0) for layer in unit)
            recomputed |= {layer.name: size for layer, size in zip(unit, sums, strict=True)}
        layers = [
            replace(each, activations=kept[each.name], saved_before=0)
            if each.name in kept
            else _without(each, of_others.get(each.name, 0))
            for each in changed.layers
        ]
        for prefix in inside.keys() & behind.keys():
            last = by_name[inside[prefix][-1].name]
            place = next(number for number, each in enumerate(layers) if each.name == last.name)
            layers.insert(place + 1, _operations_behind(prefix, last, behind[prefix]))
            recomputed[prefix] = recomputed[last.name] + sum(each.bytes for each in behind[prefix])
        tail = max(changed.tail - of_others.get(None, 0), 0)
        return changed.with_changes(
            layers=tuple(layers),
            recomputed=recomputed,
            tail=tail,
            largest_in_tail=min(changed.largest_in_tail, tail),
            forward_peak=0,
            product_peak=0,
        )

    return Change(
        CHECKPOINTS,
        f"activation checkpoints around {len(activations)} repeated blocks",
        _checkpoint_code(case, list(activations), reentrant=reentrant),
        f"Blocks hold {format_bytes(sum(activations.values()))} of activations; with checkpoints each keeps its input, "
        f"and one at a time recomputes the rest, up to {format_bytes(max(activations.values()))}.",
        (Action(kind="checkpoint", modules=list(activations)),),
        apply,
    )


def _behind_the_last_layers(
    case: Case, step: Step, checkpointed: Mapping[str, Sequence[Layer]]
) -> dict[str, list[KeptBlock]]:
    """Returns the blocks that units make behind their last trained layers, such as those of frozen layers by adapters.

    They count for the layer behind the unit, or for none. Of units without a checkpoint, only blocks are returned that
    count for a layer of a unit with one. Nothing if the forward pass could not be repeated.
    """
    whole = case.shapes.whole_forward()
    found: dict[str, list[KeptBlock]] = {}
    within = {layer.name for layers in checkpointed.values() for layer in layers}
    for block in () if whole is None else whole.blocks:
        for prefix in repeated_units(case.shapes.modules):
            is_inside = block.module == prefix or block.module.startswith(f"{prefix}.")
            is_behind = not (block.layer or "").startswith(f"{prefix}.") and not block.is_output
            if is_inside and is_behind and (prefix in checkpointed or block.layer in within):
                size = block.bytes * step.samples // max(whole.samples if whole else 1, 1)
                found.setdefault(prefix, []).append(replace(block, bytes=size))
    return found


def _without(layer: Layer, size: int) -> Layer:
    """Returns the layer with so many bytes less that were saved before its forward began."""
    return replace(layer, activations=max(layer.activations - size, 0), saved_before=max(layer.saved_before - size, 0))


def _operations_behind(name: str, last: Layer, blocks: Sequence[KeptBlock]) -> Layer:
    """Returns the operations behind a unit's last layer as a layer without parameters, which keeps nothing."""
    largest = max(block.bytes for block in blocks)
    forward = replace(last.forward, input_bytes=largest, output_bytes=largest, calls=1, from_leaf=False)
    return Layer(name, _frozen(last.module), forward, 0, residual_gradient=last.residual_gradient)


def _checkpoint_code(case: Case, units: list[str], *, reentrant: bool) -> str:
    program = case.shapes.program
    if program.has_trainer and not case.shapes.mode:
        kind = '{"use_reentrant": False}'
        return f"TrainingArguments(..., gradient_checkpointing=True, gradient_checkpointing_kwargs={kind})"
    if program.enables_checkpoints is not None:
        path = program.enables_checkpoints
        model = f'{program.model}.get_submodule("{path}")' if path else program.model
        return f'{model}.gradient_checkpointing_enable({{"use_reentrant": {reentrant}}})'
    parents: dict[str, list[int]] = {}
    for unit in units:
        parent, _, number = unit.rpartition(".")
        parents.setdefault(parent, []).append(int(number))
    slices = [
        ".".join(filter(None, [program.model, parent])) + f"[{min(numbers)}:{max(numbers) + 1}]"
        if len(numbers) == max(numbers) + 1 - min(numbers)
        else f"[{', '.join(f'{program.model}.{parent}[{number}]' for number in numbers)}]"
        for parent, numbers in parents.items()
    ]
    called = "checkpoint, block.forward, use_reentrant=False"
    code = ["from functools import partial", "from torch.utils.checkpoint import checkpoint"]
    if reentrant:  # which takes no arguments by name
        call = "checkpoint(partial(forward, **named), *args, use_reentrant=True)"
        code.append(f"checkpointed = lambda forward, *args, **named: {call}")
        called = "checkpointed, block.forward"
    return "\n".join([*code, *(f"for block in {each}: block.forward = partial({called})" for each in slices)])


def fused_attention(case: Case, step: Step) -> Change | None:
    """Returns the change to an attention kernel that never holds the whole matrix of attention weights."""
    weights = {layer.name: _attention_weights(layer) for layer in step.layers}
    if not (total := sum(weights.values())):
        return None
    whole = case.shapes.whole_forward()
    if whole is not None and not any(block.is_attention for block in (*whole.blocks, *whole.recomputed)):
        return None  # as in graph attention, whose scores are sums
    program = case.shapes.program
    in_bfloat16 = any(weights[layer.name] and layer.forward.is_bfloat16 for layer in step.layers)
    what = f"Attention matrices, tokens by tokens, take {format_bytes(total)} of activations."

    def apply(changed: Step) -> Step:
        return changed.with_changes(
            layers=tuple(map(_without_attention_weights, changed.layers)), forward_peak=0, product_peak=0
        )

    if in_bfloat16 and not case.shapes.has_bfloat16:
        return Change(
            LINE,
            "float16: this GPU has no fused attention for bfloat16",
            f"{program.model} = {program.model}.to(torch.float16)  # or the dtype of torch.autocast",
            f"{what} This GPU has fused attention kernels only for float16 and float32. Accuracy can differ: float16 "
            "has a smaller range, and may need a scaled loss.",
            (Action(kind="dtype", value="float16"),),
            apply,
        )
    return Change(
        CHECKPOINTS,
        "fused attention instead of attention matrices",
        "y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # or without is_causal",
        f"{what} scaled_dot_product_attention makes none, unless it gets a mask with elements for each head, the mask "
        "needs a gradient, the head size is not a multiple of 8, or weights are returned, as with need_weights=True.",
        (Action(kind="fused_attention"),),
        apply,
    )


def _attention_weights(layer: Layer) -> int:
    """Returns the bytes of attention weights (tokens by tokens) that autograd saved before a projection layer.

    Their shape is not recorded: blocks of a square number of elements that are larger than the layer's input count as
    attention weights.
    """
    square = layer.largest_square
    is_attention = layer.module.kind in _PROJECTIONS and square > layer.forward.input_bytes
    return layer.saved_before // square * square if is_attention else 0


def _without_attention_weights(layer: Layer) -> Layer:
    weights = _attention_weights(layer)
    if not weights:
        return layer
    return replace(
        layer,
        activations=layer.activations - weights,
        largest=layer.forward.input_bytes if layer.largest == layer.largest_square else layer.largest,
        saved_before=layer.saved_before - weights,
        largest_square=0,
        operations=(),
    )


def optimizer_states(case: Case, step: Step) -> Change | None:
    """Returns the change to an optimizer without states."""
    if not step.states or case.history.step_peaks:
        return None
    name = case.shapes.optimizer
    optimizer = "SGD with momentum" if name == "SGD" else name
    return Change(
        OPTIMIZER,
        f"SGD without momentum instead of {optimizer}",
        'TrainingArguments(..., optim="sgd")'
        if case.shapes.program.has_trainer
        else f"torch.optim.SGD({case.shapes.program.model}.parameters(), lr=...)",
        f"{optimizer} keeps {format_bytes(step.states)}, and its step temporarily allocates "
        f"{format_bytes(step.update)} more.",
        (Action(kind="optimizer", value="SGD"),),
        lambda changed: changed.with_changes(states=0, update=0),
        same_forward=True,
    )


def data_type(case: Case, step: Step) -> Change | None:
    """Returns the change to 16-bit parameters and activations.

    The data type is bfloat16, or float16 if the GPU does not compute in bfloat16.
    """
    trains_others = step.others.get("optimizer_states")  # between them, tensors would have two types
    if trains_others or any(layer.forward.element_bytes != 4 for layer in step.layers):
        return None
    name = "bfloat16" if case.shapes.has_bfloat16 else "float16"
    if not case.shapes.runs_in(name):
        return None
    parameters = case.failure.sum_by(lambda group: group.category).get("model_parameters", 0)
    program = case.shapes.program
    code = f"{program.model} = {program.model}.to(torch.{name})  # before the optimizer is made"
    if step.layers[0].module.kind != "Embedding":
        code += f"\nx = x.to(torch.{name})  # what the model is called with; and the targets of a loss such as mse_loss"

    def apply(changed: Step) -> Step:
        return changed.with_changes(
            layers=tuple(map(_halved, changed.layers)),
            resident=changed.resident - parameters // 2,
            trained=changed.trained // 2,
            largest=changed.largest // 2,
            states=changed.states // 2,
            update=changed.update // 2,
            loss=changed.loss // 2,
            output=changed.output // 2,
            carried=changed.carried // 2,
            logits=changed.logits // 2,
            tail=changed.tail // 2,
            largest_in_tail=changed.largest_in_tail // 2,
            forward_peak=changed.forward_peak // 2,
            product_peak=changed.product_peak // 2,
            recomputed={name: size // 2 for name, size in changed.recomputed.items()},
        )

    return Change(
        DTYPE,
        f"{name} instead of float32",
        code,
        f"Parameters, activations and gradients have half of their bytes. Accuracy can differ"
        f"{'' if case.shapes.has_bfloat16 else '; this GPU does not compute in bfloat16'}.",
        (Action(kind="dtype", value=name),),
        apply,
    )


def _halved(layer: Layer) -> Layer:
    forward = layer.forward
    inputs = forward.input_bytes if layer.module.kind == "Embedding" else forward.input_bytes // 2
    input_element_bytes = 2 if inputs < forward.input_bytes else forward.input_element_bytes
    return _smaller(
        replace(
            layer,
            module=replace(layer.module, bytes=layer.module.bytes // 2),
            forward=replace(
                forward,
                element_bytes=2,
                output_bytes=forward.output_bytes // 2,
                input_bytes=inputs,
                input_element_bytes=input_element_bytes,
            ),
        )
    )


def _smaller(layer: Layer, squares: int = 2) -> Layer:
    """Returns the layer with half of its activations and 1/`squares` of its attention weights."""
    square = layer.largest_square
    # Blocks of a square's size are taken for attention weights where they are larger than a layer's input.
    weights = layer.saved_before // square * square if square > layer.forward.input_bytes else 0
    return replace(
        layer,
        activations=(layer.activations - weights) // 2 + weights // squares,
        largest=layer.largest // (squares if layer.largest == square else 2),
        residual_gradient=layer.residual_gradient // 2,
        saved_before=(layer.saved_before - weights) // 2 + weights // squares,
        largest_square=square // squares,
        operations=(),
        repeated_forward=layer.repeated_forward // 2,
        captured=layer.captured // 2,
    )


def adapters(case: Case, step: Step) -> Change | None:
    """Returns the change to LoRA adapters at Linear layers, with all other parameters frozen.

    Meant for pretrained models.
    """
    adapted = [layer for layer in step.layers if _takes_adapter(layer)]
    if not adapted or 2 * sum(layer.module.bytes for layer in adapted) < step.trained:
        return None

    def apply(changed: Step) -> Step:
        layers = list(map(_with_adapter, changed.layers))
        first = next(place for place, layer in enumerate(layers) if layer.module.bytes)
        before, layers[: first + 1] = (
            layers[:first],
            [*map(_without_graph, layers[:first]), _first_in_graph(layers[first])],
        )
        freed = sum(each.activations for each in changed.layers) - sum(each.activations for each in layers)
        # What runs without a graph holds an operation's input and output, and an activation function's result.
        widest = max((each.forward.input_bytes + 2 * each.forward.output_bytes for each in before), default=0)
        sizes = [layer.module.bytes for layer in layers]
        return changed.with_changes(
            layers=layers,
            forward_peak=max(changed.forward_peak - max(freed, 0), widest) if changed.forward_peak else 0,
            product_peak=max(changed.product_peak - max(freed, 0), 0),
            resident=changed.resident + sum(sizes),
            trained=sum(sizes),
            largest=max(sizes),
            states=changed.states * sum(sizes) // max(changed.trained, 1),
            update=changed.update * sum(sizes) // max(changed.trained, 1),
        )

    program = case.shapes.program
    return Change(
        ADAPTERS,
        f"LoRA adapters of rank {_RANK} instead of all parameters",
        f"from peft import LoraConfig, get_peft_model\n{program.model} = get_peft_model({program.model}, "
        f'LoraConfig(r={_RANK}, target_modules="all-linear"))  # before the optimizer is made',
        f"Only adapters at {format_count(len(adapted), 'Linear layer')} are trained, for a pretrained model. "
        "Gradients, per-sample gradients and optimizer states are theirs alone.",
        (Action(kind="lora", value=_RANK),),
        apply,
    )


def _takes_adapter(layer: Layer) -> bool:
    module = layer.module
    return module.kind == "Linear" and not module.tied_to and min(module.rows, module.columns) > 4 * _RANK


def _with_adapter(layer: Layer) -> Layer:
    """Returns the layer with an adapter, or frozen. The adapter saves the same tensors of its input as the layer."""
    module = layer.module
    if not _takes_adapter(layer):
        return replace(layer, module=_frozen(module))
    itemsize = module.bytes // max(layer.elements, 1)
    weight = _RANK * (module.rows + module.columns)
    size = weight * itemsize
    adapter = replace(module, bytes=size, weight=weight, bias=0, rows=_RANK, columns=module.rows + module.columns)
    between = layer.forward.samples * layer.forward.tokens * _RANK * layer.forward.element_bytes
    scaled = layer.residual_gradient + layer.forward.output_bytes  # the gradient of the adapter's scaled output
    activations = layer.activations + between
    return replace(layer, module=adapter, activations=activations, residual_gradient=scaled, is_added=False)


def _without_graph(layer: Layer) -> Layer:
    """Returns a layer before the first trained one, which autograd does not record."""
    forward = replace(layer.forward, input_bytes=0, output_bytes=0, from_leaf=True)
    return Layer(layer.name, layer.module, forward, 0)


def _first_in_graph(layer: Layer) -> Layer:
    """Returns the first trained layer, before which autograd records nothing: it keeps its input."""
    kept = 0 if layer.forward.from_leaf else layer.forward.input_bytes
    return replace(
        layer,
        forward=replace(layer.forward, from_leaf=True),
        activations=layer.activations - layer.saved_before + kept,
        largest=min(layer.largest, layer.forward.output_bytes),
        saved_before=kept,
        largest_square=0,
        shared=0,
        operations=(),
    )


def _frozen(module: LayerShape) -> LayerShape:
    return replace(module, kind="frozen", bytes=0, weight=0, bias=0, rows=0, columns=0, sampled_in=None, tied_to="")


def shorter_sequence(case: Case, step: Step) -> Change | None:
    """Returns the change to half of the tokens per sample."""
    first = step.layers[0]
    if first.module.kind != "Embedding" or first.forward.tokens < 2:
        return None
    tokens = first.forward.tokens // first.forward.calls

    def halve(layer: Layer) -> Layer:
        forward = layer.forward
        if forward.tokens < 2:
            return layer
        half = replace(
            forward,
            tokens=forward.tokens // 2,
            most_tokens=forward.most_tokens // 2,
            input_bytes=forward.input_bytes // 2,
            output_bytes=forward.output_bytes // 2,
        )
        return _smaller(replace(layer, forward=half), squares=4)

    by_token = step.layers[-1].forward.tokens > 1

    def apply(changed: Step) -> Step:
        return changed.with_changes(
            layers=tuple(map(halve, changed.layers)),
            inputs=changed.inputs // 2,
            loss=changed.loss // 2 if by_token else changed.loss,
            output=changed.output // 2 if by_token else changed.output,
            logits=changed.logits // 2 if by_token else changed.logits,
            tail=changed.tail // 2 if by_token else changed.tail,
            largest_in_tail=changed.largest_in_tail // 2 if by_token else changed.largest_in_tail,
            forward_peak=changed.forward_peak // 2,
            product_peak=changed.product_peak // 2,
            recomputed={name: size // 2 for name, size in changed.recomputed.items()},
        )

    return Change(
        SEQUENCE,
        f"sequences of {tokens // 2} tokens instead of {tokens}",
        f"ids = ids[:, :{tokens // 2}]  # each batch",
        f"A sample has {format_count(tokens, 'token')}; activations grow with them, and attention weights with their "
        "square.",
        (Action(kind="sequence_length", value=tokens // 2),),
        apply,
    )
