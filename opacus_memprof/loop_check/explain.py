# SPDX-License-Identifier: Apache-2.0
"""Explains errors of Opacus with their cause and the names of the parameters, and finds modes without the error."""

import inspect
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

from opacus_memprof.errors import MemprofError
from opacus_memprof.loop_check.records import Call, PrivateModel, first_line, listed

_MODES = ("flash_clip", "functorch", "ghost", "hooks")


def explain(error: BaseException, roots: list[PrivateModel], held: Collection[int]) -> str | None:
    """Explains an error that Opacus raised, or a refusal of flash_clip or of `check=`.

    Args:
        error: the error, with its traceback.
        roots: the private models of the program.
        held: ids of the parameters of its private optimizers.

    Returns:
        Sentences with names and causes; None if the error is none of these. Also None for foreign parameters in the
        optimizer, which are found before its step, and for parameters that it does not hold, which are found after.
    """
    message = str(error)
    if "Module parameters are different than optimizer Parameters" in message:
        return _explain_foreign(error)
    if not roots:
        return None
    if isinstance(error, MemprofError):
        return f"The training is refused: {message}"
    root = roots[-1]
    said = f"Opacus stops with {first_line(error)}."
    if "Per sample gradient not found" in message:
        why = _without_hooks(root, root.trained()) or _WRONG_MODEL
        return None if foreign_parameters(_local(error, "self"), roots) else f"{said} {why}"
    if "Per sample gradient is not initialized" in message:
        missing = f"{said} {_missing(root, 'grad_sample')}"
        return None if foreign_parameters(_local(error, "self"), roots) else missing
    if "No activations detected" in message:
        return f"{said} The forward ran in eval mode, in which Opacus' hooks keep nothing: call train() before it."
    if "_forward_counter" in message:
        return (
            f"{said} The model that runs is a copy of the private one, whose parameters the optimizer does not have: "
            "train the model that was made private, and copy it before."
        )
    if "_norm_sample" in message:
        return f"{said} {_missing(root, '_norm_sample')}"
    if "stack expects each tensor to be equal size" in message or "must match the size of tensor" in message:
        counts = _sample_counts(root)
        return f"{said} {counts}" if counts else None
    if "Number of accumulated steps is inconsistent" in message:
        return f"{said} {_sample_counts(root) or _missing(root, 'grad_sample')}"
    if "not compatible with grad accumulation" in message:
        trained = {name: p for root in roots for name, p in root.trained().items()}
        if any(id(p) not in held for p in trained.values()):
            return None  # zero_grad of the optimizer does not clear these
        if any(getattr(getattr(p, "grad_sample", None), "_processed", False) for p in trained.values()):
            return f"{said} The gradients of the last step are still there: call optimizer.zero_grad() in each step."
        return (
            f"{said} The script calls backward several times before optimizer.step(), on a loader with Poisson "
            "sampling: put the loader into a BatchMemoryManager, which splits its batches, or call make_private with "
            "poisson_sampling=False."
        )
    if "Gradients haven't been cleared" in message or "already been processed" in message:
        return (
            f"{said} Two steps had no optimizer.zero_grad() between them: call it in each step. "
            "The model's zero_grad() does not clear what the optimizer has summed up."
        )
    if "missing 1 required positional argument: 'closure'" in message:
        return (
            f"{said} Opacus steps the original optimizer once, without a closure: one that evaluates the loss several "
            "times in a step, such as LBFGS, cannot be private."
        )
    if "Parameter tying is not supported" in message:
        return f"{said} {_tied(root)}"
    return None


_WRONG_MODEL = "The optimizer holds parameters of a model that was not made private."


def foreign_parameters(optimizer: Any, roots: list[PrivateModel]) -> str | None:
    """Returns a sentence with the parameters of an optimizer that no private model has; None if all belong to one."""
    groups = getattr(optimizer, "param_groups", None)
    if not groups or not roots:
        return None
    own = {id(p) for root in roots for p in root.model.parameters()}
    held = [p for group in groups for p in group["params"]]
    foreign = [p for p in held if id(p) not in own]
    return _foreign_sentence(foreign, len(held), roots[-1].trained().items()) if foreign else None


def _foreign_sentence(foreign: list[nn.Parameter], count: int, trained: Iterable[tuple[str, nn.Parameter]]) -> str:
    by_shape: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, p in trained:
        by_shape[tuple(p.shape)].append(name)
    shapes = listed([f"{list(p.shape)}" + _resembling(by_shape, p) for p in foreign])
    return (
        f"The optimizer holds {count} parameters, and {len(foreign)} of them are not parameters of the private model: "
        f"{shapes}. They are those of another model, or of this one before it was copied, converted or had layers "
        "replaced, and updating them does not train the model that runs: make the optimizer from the parameters of the "
        "model that is trained, after its last change."
    )


def _resembling(by_shape: dict[tuple[int, ...], list[str]], p: nn.Parameter) -> str:
    names = by_shape.get(tuple(p.shape))
    return f" (as {names.pop(0)})" if names else ""


def _explain_foreign(error: BaseException) -> str | None:
    module, optimizer = _local(error, "module"), _local(error, "optimizer")
    if module is None or optimizer is None:
        return None
    own = {id(p) for p in module.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [p for p in held if id(p) not in own]
    sentence = _foreign_sentence(foreign, len(held), module.named_parameters())
    return f"Opacus stops with {first_line(error)}. {sentence}"


def _local(error: BaseException, name: str) -> Any:
    """Returns the variable of the innermost frame of Opacus that has it."""
    found, traceback = None, error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        if "opacus" in frame.f_globals.get("__name__", "").split(".")[0]:
            found = frame.f_locals.get(name, found)
        traceback = traceback.tb_next
    return found


def _missing(root: PrivateModel, attribute: str) -> str:
    trained = root.trained()
    without = [name for name, p in trained.items() if getattr(p, attribute, None) is None]
    if len(without) == len(trained):
        return (
            "No parameter of the private model has per-sample gradients: backward did not reach it before the step. "
            "Either the model that runs is a copy of the private one, or the batch was run in eval mode or without "
            "grad, or zero_grad was called between backward and step."
        )
    if not without:
        return "All parameters have them now: they came after the step."
    return _without_hooks(root, without) or (
        f"These parameters have no per-sample gradient, because no layer with them took part in the loss: "
        f"{listed(without)}. Freeze them with requires_grad_(False) before the model is made private, or use their "
        "layers in forward; a parameter that is used outside of its own module's forward is not seen by hooks."
    )


def _without_hooks(root: PrivateModel, names: Iterable[str]) -> str | None:
    trained = root.trained()
    new = [name for name in names if not hasattr(trained[name], "_forward_counter")]  # which Opacus sets first of all
    return (
        f"Added or unfrozen after the model was made private, and therefore without Opacus' hooks: {listed(new)}. "
        "Make the model private after its last change."
        if new
        else None
    )


def _sample_counts(root: PrivateModel) -> str | None:
    """Returns which parameters have how many per-sample gradients or norms."""
    by_count: dict[int, list[str]] = defaultdict(list)
    for name, p in root.trained().items():
        stack = getattr(p, "grad_sample", None)
        stack = getattr(p, "_norm_sample", None) if stack is None else stack
        if stack is not None:
            by_count[sum(map(len, stack)) if isinstance(stack, list) else len(stack)].append(name)
    if len(by_count) < 2:
        return None
    usual = max(by_count, key=lambda count: len(by_count[count]))
    others = "; ".join(f"{listed(names)}: {count}" for count, names in sorted(by_count.items()) if count != usual)
    return (
        f"The layers have different numbers of samples. Most parameters have {usual} ({listed(by_count[usual], 2)}), "
        f"but {others}. The layers of the latter get inputs whose first dimension is not the batch, for example rows "
        "of several samples, tokens, or one row for all: keep the batch first in them."
    )


def _tied(root: PrivateModel) -> str:
    seen: dict[int, str] = {}
    pairs = []
    for name, p in root.model.named_parameters(remove_duplicate=False):
        if id(p) in seen:
            pairs.append(f"{seen[id(p)]} and {name}")
        seen.setdefault(id(p), name)
    which = f"Tied are {listed(pairs)}." if pairs else "A layer is called several times in one forward."
    return f"{which} Use grad_sample_mode='hooks' or 'flash_clip'."


def exact_modes(call: Call, mode: str) -> list[str]:
    """Returns the other modes that clip the inputs of a call exactly.

    Args:
        call: a recorded call.
        mode: the mode of the program.
    """
    from opacus_memprof.clipping import verify

    plain, exact = call.root.plain, []
    assert plain is not None  # it was run
    for other in _MODES:
        try:
            if other != mode and verify(plain, _arguments(plain, call), other).exact:
                exact.append(other)
        except Exception:  # a mode that cannot run this model is not suggested
            continue
    return exact


def _arguments(model: nn.Module, call: Call) -> Any:
    """Returns the inputs in the form that `verify` accepts: by position, or all by name."""
    if not call.kwargs:
        return call.args
    signature = inspect.signature(model.forward)
    named: dict[str, Any] = {}
    for name, value in signature.bind(*call.args, **call.kwargs).arguments.items():
        named |= value if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return named
