# SPDX-License-Identifier: Apache-2.0
"""Observes what is wrong with a private training, and why Opacus raised an error.

Wrong are updates without clipping and noise, and per-sample gradients that nobody clears. A model is private once a
DPOptimizer for its parameters is followed. Only weak references are kept.
"""

import ast
import dis
import linecache
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.loss import _Loss
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from opacus_memprof.hooks import forward_shapes, modules
from opacus_memprof.hooks.vocabulary import (
    AbstractGradSampleHooks,
    DPDataLoader,
    DPOptimizer,
    DPOptimizerFastGradientClipping,
)
from opacus_memprof.profiles.layer_shapes import Program, TrainingShapes
from opacus_memprof.recording import native, observations
from opacus_memprof.recording.attachment import Attachment
from opacus_memprof.recording.faults import contain
from opacus_memprof.versions import variables_of

_models: "weakref.WeakKeyDictionary[nn.Module, None]" = weakref.WeakKeyDictionary()  # private
_optimizers: "weakref.WeakKeyDictionary[DPOptimizer, None]" = weakref.WeakKeyDictionary()  # of private models
_originals: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()  # that make_private was given
_unrelated: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()  # that have no parameter of a private model
_clipped: "weakref.ref[Optimizer] | None" = None  # the original optimizer whose update will be private
_private_steps = _public_steps = 0
_unclipped_steps = 0  # of ghost clipping, with a loss that clips nothing
_clips = 0  # of ghost clipping, since the last step
_clips_of_batch = 0  # the same, since the last physical step
_zero_grads = 0
_unused = 0  # calls of zero_grad that cleared per-sample gradients which no step had used


_PACKAGE = str(Path(__file__).parents[1])
_WRAPPERS = (_PACKAGE, *(f"/site-packages/{name}/" for name in ("accelerate", "opacus", "peft", "torch")))
_RETURNED = 4  # instructions before the end of a function that can load what it returns


def _reset() -> None:
    global _clipped, _private_steps, _public_steps, _unclipped_steps, _clips, _clips_of_batch, _zero_grads, _unused
    _clipped = None
    _private_steps = _public_steps = _unclipped_steps = _clips = _clips_of_batch = _zero_grads = _unused = 0
    _originals.clear()
    _unrelated.clear()


observations.on_clear(_reset)


def follow_private(attachment: Attachment, optimizer: DPOptimizer, roots: Sequence[nn.Module]) -> None:
    """Marks the models whose parameters the optimizer has as private, until `attachment` is detached."""
    trained = {id(parameter) for parameter in _parameters(optimizer)}
    for root in roots:
        if any(id(parameter) in trained for parameter in root.parameters()):
            attachment.set_entry(_models, root, None)
    attachment.set_entry(_optimizers, optimizer, None)
    _originals.add(optimizer.original_optimizer)
    _unrelated.clear()


def watch_updates(attachment: Attachment, follow: Callable[[Optimizer], None]) -> None:
    """Observes the updates of all optimizers until `attachment` is detached.

    Args:
        attachment: of the observation.
        follow: is called with each optimizer that updates a private model in public, so that its steps are counted.
    """
    hook = partial(on_update, follow)
    attachment.on_detach(register_optimizer_step_post_hook(hook).remove)


def _parameters(optimizer: Any) -> Iterator[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad)


# --- updates ---


def on_clipping_factors() -> None:
    """Observes that ghost clipping has computed clipping factors."""
    global _clips, _clips_of_batch
    _clips += 1
    _clips_of_batch += 1


def on_physical_step(optimizer: DPOptimizer) -> None:
    """Observes that a DPOptimizer's step begins, and how many backward passes it is for.

    In ghost clipping, each backward pass of its criterion clears the gradients of earlier ones.
    """
    global _clips_of_batch
    shapes = observations.layer_shapes()
    shapes.accumulated = max(shapes.accumulated, max(map(_unused_passes, islice(_parameters(optimizer), 1)), default=1))
    if _clips_of_batch > 1:
        observations.record("ghost_accumulated", 0, _clips_of_batch)
    _clips_of_batch = 0


def on_private_step(optimizer: DPOptimizer) -> None:
    """Observes that a DPOptimizer has clipped gradients and added noise, and is about to update."""
    global _clipped, _clips, _unclipped_steps
    _clipped = weakref.ref(optimizer.original_optimizer)
    if isinstance(optimizer, DPOptimizerFastGradientClipping) and not hasattr(optimizer, "bookkeeping"):
        _unclipped_steps += not _clips
        # A program may step without a backward where a Poisson batch is empty, so only never is evidence.
        if _unclipped_steps > _private_steps:
            observations.record("unclipped_steps", 0, _unclipped_steps)
        else:
            observations.discard("unclipped_steps")
    _clips = 0


@contain("following an optimizer's update")
def on_update(follow: Callable[[Optimizer], None], optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Observes an update of any optimizer, and records it if it is one of a private model without clipping and noise.

    Parameters that were clipped have a `summed_grad`. Those without per-sample gradients or norms are trained publicly
    on purpose.
    """
    global _clipped, _private_steps, _public_steps
    if not _models or optimizer in _unrelated:
        return
    if _clipped is not None and _clipped() is optimizer:
        _clipped = None
        _private_steps += 1
        steps = _private_steps
    elif _updates_in_public(optimizer):
        _public_steps += 1
        observations.layer_shapes().is_public = True
        follow(optimizer)
        details = {"private": _private_steps, "optimizer": type(optimizer).__name__}
        details["is_original"] = optimizer in _originals  # also where the program has dropped what was returned
        observations.record("public_steps", 0, _public_steps, **details)
        steps = _public_steps
    else:
        return
    if steps & (steps - 1) == 0:  # rarely
        _record_unowned()


def _updates_in_public(optimizer: Optimizer) -> bool:
    private = {id(parameter) for model in list(_models) for parameter in model.parameters()}
    shared = [parameter for parameter in _parameters(optimizer) if id(parameter) in private]
    if not shared:
        _unrelated.add(optimizer)
    return any(
        parameter.grad is not None
        and getattr(parameter, "summed_grad", None) is None
        and (getattr(parameter, "grad_sample", None) is not None or hasattr(parameter, "_norm_sample"))
        for parameter in shared
    )


# --- who owns what grows ---


def on_zero_grad(optimizer: DPOptimizer) -> None:
    """Observes a DPOptimizer's zero_grad, and records per-sample gradients that it clears and no step has used."""
    global _zero_grads, _unused
    _zero_grads += 1
    observations.record("zero_grads", 0, _zero_grads)
    sizes: dict[int, int] = {}
    for parameter in _parameters(optimizer) if optimizer in _optimizers else ():
        if unused := sum(each.nbytes for each in _samples(parameter) if not hasattr(each, "_processed")):
            owner = native.owner_of(parameter)
            sizes[owner] = sizes.get(owner, 0) + unused
    _unused += bool(sizes)
    observations.record("unused_passes", 0, _unused)
    for owner, size in sizes.items():
        observations.record("unused_samples", owner, size)


def _record_unowned() -> None:
    """Records per-sample gradients of parameters that no DPOptimizer has, which it neither uses nor clears."""
    owned = {id(parameter) for optimizer in list(_optimizers) for parameter in _parameters(optimizer)}
    sizes: dict[int, int] = {}
    for _, parameter in _private_parameters():
        if id(parameter) not in owned and (size := sum(each.nbytes for each in _samples(parameter))):
            owner = native.owner_of(parameter)
            sizes[owner] = sizes.get(owner, 0) + size
    for owner, size in sizes.items():
        observations.record("unowned_samples", owner, size)


def _private_parameters() -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the trained parameters of private models, each with the name of the module that owns it."""
    for model in list(_models):
        yield from (each for each in modules.owned_parameters(model) if each[1].requires_grad)


def _unused_passes(parameter: nn.Parameter) -> int:
    """Returns the number of backward passes with per-sample gradients of a parameter that no step has used."""
    return sum(not hasattr(each, "_processed") for each in _samples(parameter))


def _samples(parameter: nn.Parameter) -> list[Tensor]:
    """Returns a parameter's per-sample gradients of each backward pass."""
    samples = getattr(parameter, "grad_sample", None)
    return [each for each in (samples if isinstance(samples, list) else [samples]) if isinstance(each, Tensor)]


def _norms(parameter: nn.Parameter) -> list[Tensor]:
    """Returns a parameter's norms of samples' gradients, as ghost clipping computes them."""
    norms = getattr(parameter, "_norm_sample", None)
    return [norms] if isinstance(norms, Tensor) else []


# --- errors ---

_UNEQUAL = ("stack expects each tensor to be equal size", "must match the size of tensor", "operands do not broadcast")
_MISSING = (
    "Per sample gradient is not initialized",
    "Per sample gradient not found",
    "has no attribute '_norm_sample'",  # the same in ghost clipping
)
_NOT_CAPTURED = "No activations detected for"
_ACCUMULATED = "not compatible with grad accumulation"
_ACCUMULATED_BY_TORCH = "Current Expanded Weights accumulates"  # the same in the mode ew
_USED_UP = "pop from empty list"  # of captures
_NOT_VECTORIZED = "vmap: "
_COPIED = "has no attribute '_forward_counter'"
_IN_PLACE = ("is a view and is being modified inplace", "modified by an inplace operation")


@contain("explaining an error of Opacus")
def explain(error: BaseException) -> None:
    """Records which parameters, modules or lines have led to an error of Opacus or of its hooks."""
    message, frames = str(error), list(_frames(error.__traceback__))
    if not _models:
        return
    in_opacus = any("opacus" in frame.f_code.co_filename for frame, _ in frames)
    if any(part in message for part in _IN_PLACE):
        _record_in_place(frames)
    elif not in_opacus:
        return
    elif _COPIED in message:
        _record_copy(frames)
    elif _NOT_CAPTURED in message:
        _record_not_captured(frames)
    elif _USED_UP in message or message.startswith(_NOT_VECTORIZED):
        _record_in_hook("captures_used_up" if _USED_UP in message else "not_vectorized", frames)
    elif any(part in message for part in _MISSING):
        _record_missing()
    elif _ACCUMULATED in message:
        _record_unowned()
        _record_accumulated()
    elif _ACCUMULATED_BY_TORCH in message:
        _record_accumulated(by_torch=True)
    elif any(part in message for part in _UNEQUAL):
        _record_counts()


def _flash_clip_can_clip() -> bool:
    """Returns whether flash_clip would be another mode, and can clip the model."""
    shapes = observations.layer_shapes()
    return shapes.mode != "flash_clip" and shapes.flash_clip_refusal() is None and not shapes.mixes_samples()


def _frames(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    """Yields the frames of a traceback with their lines, the innermost last."""
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def _record_counts() -> None:
    """Records how many samples the gradients of each module have, where a step found different numbers."""
    owned = {id(parameter) for optimizer in list(_optimizers) for parameter in _parameters(optimizer)}
    batches = observations.layer_shapes().batches
    details = {"batch": batches[-1][1] if batches else 0, "flash_clip": _flash_clip_can_clip()}
    for _, parameter in _private_parameters():
        samples = _samples(parameter) or _norms(parameter)
        if id(parameter) in owned and samples:
            count = sum(map(len, samples))
            observations.record("sample_counts", native.owner_of(parameter), 0, samples=count, **details)


def _record_missing() -> None:
    """Records which modules have no per-sample gradients, and how far they came."""
    owned = {id(parameter) for optimizer in list(_optimizers) for parameter in _parameters(optimizer)}
    waiting, can_clip = observations.captures(), _flash_clip_can_clip()
    named = {name: module for model in list(_models) for name, module in modules.named_modules(model)}
    for name, parameter in _private_parameters():
        if id(parameter) in owned and not (_samples(parameter) or _norms(parameter)):
            owner = native.owner_of(parameter)
            observations.record(
                "samples_missing",
                owner,
                parameter.nbytes,
                has_gradient=parameter.grad is not None,
                training=name not in named or named[name].training,
                captures=waiting.get(owner, 0),
                hooked=_is_hooked(name, named),
                flash_clip=can_clip,
            )


def _is_hooked(name: str, named: Mapping[str, nn.Module]) -> bool:
    """Returns whether a module, or one around it that Opacus samples as a whole, has a forward hook."""
    parts = name.split(".")
    around = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return any(each in named and named[each]._forward_hooks for each in around)


def _record_in_hook(kind: str, frames: Sequence[tuple[FrameType, int]]) -> None:
    """Records the module whose backward hook failed, and the line of the program in which it did."""
    names = {module: name for model in list(_models) for name, module in modules.named_modules(model)}
    hooked = [module for frame, _ in frames if (module := frame.f_locals.get("module")) in names]
    lines = [f"{frame.f_code.co_filename}:{line}" for frame, line in frames if _is_own(frame.f_code.co_filename)]
    if hooked:
        details = {"layer": type(hooked[-1]).__name__, "line": lines[-1] if lines else ""}
        observations.record(kind, native.module_id(names[hooked[-1]]), 0, **details, flash_clip=_flash_clip_can_clip())


def _record_not_captured(frames: Sequence[tuple[FrameType, int]]) -> None:
    """Records the module whose backward hook ran although its forward was in eval mode, which captures nothing."""
    running = [module for frame, _ in frames if isinstance(module := frame.f_locals.get("module"), nn.Module)]
    if not running or running[-1].training:
        return
    for parameter in running[-1].parameters():
        owner, size = native.owner_of(parameter), parameter.nbytes
        observations.record(
            "samples_missing", owner, size, has_gradient=False, training=False, captures=0, flash_clip=False
        )


def _record_copy(frames: Sequence[tuple[FrameType, int]]) -> None:
    """Records the line of the program that runs a copy of a private model, which has its hooks without their state."""
    lines = [f"{frame.f_code.co_filename}:{line}" for frame, line in frames if _is_own(frame.f_code.co_filename)]
    observations.record("private_copy", 0, 0, line=lines[-1] if lines else "")


def _record_accumulated(*, by_torch: bool = False) -> None:
    """Records modules with per-sample gradients of several backward passes, or those of which torch would add some."""
    for _, parameter in _private_parameters():
        passes = len(samples := _samples(parameter)) + by_torch
        if samples and passes > 1:
            details = {"steps": _private_steps + _public_steps, "used": hasattr(samples[0], "_processed")}
            owner = native.owner_of(parameter)
            observations.record("samples_accumulated", owner, passes, **details, by_torch=by_torch)


def _record_in_place(frames: Sequence[tuple[FrameType, int]]) -> None:
    """Records the module or the line of the program that changed a layer's output in place."""
    inside = [own for frame, _ in frames if isinstance(own := frame.f_locals.get("self"), nn.Module)]
    names = {module: name for model in list(_models) for name, module in modules.named_modules(model)}
    known = [module for module in inside if module in names]
    lines = [f"{frame.f_code.co_filename}:{line}" for frame, line in frames if _is_own(frame.f_code.co_filename)]
    module = known[-1] if known else None
    name = "" if module is None else names[module]
    is_option = bool(getattr(module, "inplace", False))
    details = {"line": lines[-1] if lines else "", "layer": type(module).__name__, "is_option": is_option}
    details["flash_clip"] = _flash_clip_can_clip()
    observations.record("in_place", native.module_id(name), 0, **details)


# --- the program that trains ---

# What the names are looked for, the most specific class first.
_CALLED: dict[str, tuple[type, ...]] = {
    "model": (nn.Module, AbstractGradSampleHooks),
    "optimizer": (DPOptimizer, Optimizer),
    "loader": (DPDataLoader, DataLoader),
}


def after_step() -> None:
    """Looks at the program after its steps 1, 2, 4, ...: when the run ends, the function that trains has returned."""
    step = native.step()[0]
    if step & (step - 1) == 0:
        observe_program(observations.layer_shapes())


@contain("looking at the program that trains")
def observe_program(shapes: TrainingShapes) -> None:
    """Records what the program calls its model, optimizer and loader, where its main thread is in a step.

    The names are those of the innermost function of the program that has an optimizer, and of its callers for what it
    does not have itself. Up to Python 3.11, an error that torch raises is made an object only where it is caught: if
    that is not in the program, or in a module's call, its functions have returned. Then what was seen before counts, as
    when the largest batch's forward pass began.
    """
    names: dict[str, str] = {}
    outermost: dict[str, str] = {}
    batch_sizes: set[int | None] = set()
    criterion = loss = ""
    has_trainer = False
    computes_epsilon = False
    next_call = ""
    accumulates = False
    is_in_forward = True
    for frame in forward_shapes.running_frames():
        is_in_forward &= frame.f_code.co_name not in ("backward", "step")
        has_trainer |= any(each.__module__ == "transformers.trainer" for each in _classes_of_self(frame))
        if _is_own(frame.f_code.co_filename):
            next_call = next_call or _next_call(frame)
            accumulates |= not shapes.mode and _accumulates(frame)
            computes_epsilon |= "get_epsilon" in frame.f_code.co_names
            batch_sizes |= {each.batch_size for each in variables_of(frame).values() if isinstance(each, DataLoader)}
            if not criterion:
                criterion, loss = _criterion_in(frame)
            found = _names_in(frame)
            if "optimizer" in names or "optimizer" in found:
                names = {**found, **names}
            outermost |= found
    names = names or outermost  # a library trains, as transformers' Trainer does
    if names:
        shapes.accumulates = accumulates
    if names and shapes.cleared_step is None:  # without a zero_grad, what comes next is in the program's text alone
        shapes.clears_late = is_in_forward and next_call == "zero_grad"
    trained = [model for model in list(_models) if isinstance(model, nn.Module)]
    expected = [each.expected_batch_size for each in list(_optimizers) if each.expected_batch_size]
    if not trained and len(batch_sizes) == 1:
        expected = [size for size in batch_sizes if size]
    default = Program() if names else shapes.program
    passes = max((_unused_passes(parameter) for _, parameter in _private_parameters()), default=0)
    shapes.accumulated = max(shapes.accumulated, passes)
    samplers = sys.modules.get("opacus_memprof.clipping.modes")  # which imports Opacus
    shapes.program = Program(
        model=names.get("model", default.model),
        optimizer=names.get("optimizer", default.optimizer),
        loader=names.get("loader", default.loader),
        criterion=criterion or default.criterion,
        loss=loss or default.loss,
        has_trainer=has_trainer or default.has_trainer,
        computes_epsilon=computes_epsilon or default.computes_epsilon,
        adopts_samples=samplers is not None and samplers.adopts_grad_samples(),
        has_norm_samplers=samplers is not None and samplers.has_norm_samplers(),
        enables_checkpoints=next(
            (
                name
                for model in trained
                for name, module in modules.named_modules(model)
                if hasattr(type(module), "gradient_checkpointing_enable")
            ),
            None,
        ),
        expected_samples=expected[0] if len(expected) == 1 else None,
        # BatchMemoryManager has queued whether this batch is the last of a logical one
        splits_batches=any(getattr(each, "_step_skip_queue", None) for each in list(_optimizers)),
    )


@contain("looking at the call of the model")
def _observe_call(shapes: TrainingShapes) -> None:
    """Records the program, and whether a variable keeps a forward pass' output until the next one has ended."""
    observe_program(shapes)
    frame = next((each for each in forward_shapes.running_frames() if _is_own(each.f_code.co_filename)), None)
    shapes.keeps_output = frame is not None and _stores_in_loop(frame)
    shapes.drops_output = _drops_result(forward_shapes.running_frames())


forward_shapes.observe_largest.append(_observe_call)


def _stores_in_loop(frame: FrameType) -> bool:
    """Returns whether the call that a function is in is in a loop, and a variable gets its value and keeps it."""
    last = frame.f_lasti
    later = [each for each in dis.get_instructions(frame.f_code) if each.offset > last and each.opname != "CACHE"]
    stored = later[0]
    return (
        stored.opname.startswith("STORE_")
        and any("JUMP" in each.opname and each.argval <= last for each in later)
        and not any(each.opname.startswith("DELETE_") and each.argval == stored.argval for each in later)
    )


def _drops_result(frames: Iterator[FrameType]) -> bool:
    """Returns whether no variable keeps the model's result until the backward pass.

    The model's caller, the first of `frames` that is not a wrapper's, has none for it, or neither calls backward nor
    returns it.
    """
    for frame in frames:
        if any(package in frame.f_code.co_filename for package in _WRAPPERS):
            continue
        instructions = [each for each in dis.get_instructions(frame.f_code) if each.opname != "CACHE"]
        later = [each for each in instructions if each.offset > frame.f_lasti]
        if not later or later[0].opname.startswith("RETURN"):
            continue
        if not later[0].opname.startswith(("STORE_", "UNPACK_")):
            return True
        if "backward" in frame.f_code.co_names or later[0].opname.startswith("UNPACK_"):
            return False
        returns = [place for place, each in enumerate(instructions) if each.opname.startswith("RETURN")]
        read = {each.argval for place in returns for each in instructions[max(place - _RETURNED, 0) : place]}
        return not _is_own(frame.f_code.co_filename) or later[0].argval not in read
    return False


def _next_call(frame: FrameType) -> str:
    """Returns which of zero_grad, backward and step a function names first after what it is doing; "" if none."""
    names = (each.argval for each in dis.get_instructions(frame.f_code) if each.offset > frame.f_lasti)
    return next((name for name in names if name in ("zero_grad", "backward", "step")), "")


def _accumulates(frame: FrameType) -> bool:
    """Returns whether the loop that a function is in clears gradients under a condition, and calls backward always."""
    lines = linecache.getlines(frame.f_code.co_filename)
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:  # cells of notebooks
        return False
    loops = [
        each
        for each in ast.walk(tree)
        if isinstance(each, (ast.For, ast.While)) and each.lineno <= frame.f_lineno <= (each.end_lineno or 0)
    ]
    for loop in loops[-1:]:  # the innermost: `walk` goes by depth
        inside = {name: _calls_of(name, loop) for name in ("backward", "zero_grad")}
        branches = [each for each in ast.walk(loop) if isinstance(each, ast.If)]
        conditional = {call for branch in branches for name in inside for call in _calls_of(name, branch)}
        return (
            bool(inside["zero_grad"]) and inside["zero_grad"] <= conditional and bool(inside["backward"] - conditional)
        )
    return False


def _calls_of(name: str, tree: ast.AST) -> set[ast.Call]:
    return {
        each
        for each in ast.walk(tree)
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr == name
    }


def _names_in(frame: FrameType) -> dict[str, str]:
    """Returns the names of model, optimizer and loader in a function, as far as it has them."""
    values = _named_values(frame)
    names = {}
    owners = list(_optimizers) or [value for value in values.values() if isinstance(value, Optimizer)]
    trained = {id(parameter) for optimizer in owners for parameter in _parameters(optimizer)}
    watched = forward_shapes.watched_model()
    trained |= set() if watched is None or owners else set(map(id, watched.parameters()))
    for what, kinds in _CALLED.items():
        found = [name for kind in kinds for name, value in values.items() if isinstance(value, kind) and _trains(value)]
        if found:
            # The program's own model, rather than the one that make_private returned, a part of it, or another one.
            names[what] = max(
                found,
                key=lambda name: (
                    _common_parameters(values[name], trained),
                    _unwrapped(values[name]) is _unwrapped(watched),  # which has all of them, as a part of it can, too
                    not isinstance(values[name], AbstractGradSampleHooks),
                ),
            )
    return names


def _classes_of_self(frame: FrameType) -> tuple[type, ...]:
    is_method = frame.f_code.co_varnames[:1] == ("self",)
    return type(variables_of(frame).get("self")).__mro__ if is_method else ()


def _criterion_in(frame: FrameType) -> tuple[str, str]:
    """Returns what a function calls a loss that is a module, or that ghost clipping has made of one, and its repr."""
    for name, value in _named_values(frame).items():
        loss = value.criterion if type(value).__name__ == "DPLossFastGradientClipping" else value
        if isinstance(loss, _Loss) and not _trains(loss):
            return name, f"torch.nn.{loss!r}" if type(loss).__module__ == _Loss.__module__ else ""
    return "", ""


def _unwrapped(value: Any) -> Any:
    """Returns the module that one of Opacus' wraps, and anything else as it is."""
    return value._module if isinstance(value, AbstractGradSampleHooks) and isinstance(value, nn.Module) else value


def _named_values(frame: FrameType) -> dict[str, Any]:
    """Returns what a function's variables refer to, and behind them the attributes of the program's own objects."""
    variables = variables_of(frame).items()
    values = {name: value for name, value in variables if name.isidentifier() and not name.startswith("_")}
    for name, value in list(values.items()):
        file = getattr(sys.modules.get(type(value).__module__), "__file__", None)
        if file is not None and _is_own(file) and not isinstance(value, (nn.Module, Optimizer, DataLoader)):
            inside = getattr(value, "__dict__", {}).items()
            values |= {f"{name}.{key}": each for key, each in inside if not key.startswith("_")}
    return values


def name_of(module: nn.Module) -> str:
    """Returns what the program calls a module where it runs, such as `teacher` or `self.teacher`; "" if nothing."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        for name, value in _named_values(frame).items() if _is_own(frame.f_code.co_filename) else ():
            if value is module:
                return name
            inside = value._modules.items() if isinstance(value, nn.Module) else ()
            if found := [f"{name}.{key}" for key, each in inside if each is module]:
                return found[0]
        frame = frame.f_back
    return ""


def _common_parameters(value: Any, parameters: set[int]) -> int:
    """Returns how many parameters of a module are among those with the given ids; 0 for what is not a module."""
    return sum(id(each) in parameters for each in value.parameters()) if isinstance(value, nn.Module) else 0


def _trains(value: Any) -> bool:
    """Returns False for modules without trained parameters, such as losses, and True for anything else."""
    return not isinstance(value, nn.Module) or any(parameter.requires_grad for parameter in value.parameters())


def _is_own(file: str) -> bool:
    """Returns whether a file is one of the program, and not of an installed package or of Python."""
    return not file.startswith(("<", sys.prefix, sys.base_prefix, _PACKAGE)) and "site-packages" not in file
