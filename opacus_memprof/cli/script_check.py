# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof doctor --script`: runs a script up to its first batch, and compares the clipping of its
grad_sample_mode with clipping by hand."""

import copy
import functools
import inspect
import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from opacus_memprof.cli.program import Program
from opacus_memprof.errors import MemprofError
from opacus_memprof.recording.after_import import AfterImport

if TYPE_CHECKING:
    from opacus_memprof.clipping import Verification

_MOST_ROWS = 20
_OTHER_MODES = ("flash_clip", "functorch", "ghost", "hooks")


class _CheckedError(BaseException):
    """Ends the script; not an Exception, which scripts catch."""


class ScriptCheck:
    """Verifies the first model that a script makes private, on the first batch that it is trained with.

    Args:
        script: path of the script.
        arguments: its arguments.

    Raises:
        MemprofError: there is no such script.
    """

    def __init__(self, script: str, arguments: Sequence[str]) -> None:
        self._script = script
        self._program = Program(script, arguments, module=False)
        self._result: tuple[Verification, list[str]] | MemprofError | None = None
        self._is_private = False

    def run(self) -> tuple["Verification", list[str]]:
        """Runs the script until the check is done. Returns what it found and, if the mode is wrong, which others are
        exact.

        Raises:
            MemprofError: the script ended before it had trained a private model, or the check cannot be made.
        """
        AfterImport("opacus", self._wrap_make_private)
        how = "ended"
        try:
            self._program.run()
        except _CheckedError:
            pass
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            how = self._ending(error)
        if self._result is None:
            what = "called its private model with a batch" if self._is_private else "called PrivacyEngine.make_private"
            raise MemprofError(f"{self._script} {how} before it {what}: there is nothing to check.")
        if isinstance(self._result, MemprofError):
            raise self._result
        return self._result

    def _ending(self, error: BaseException) -> str:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.endswith(self._script)]
        where = f" in line {frames[-1].lineno}" if frames else ""
        message = str(error).strip().partition("\n")[0]
        return f"ended with {type(error).__name__}{where}{f' ({message})' if message else ''}"

    def _wrap_make_private(self) -> None:
        import opacus

        original = opacus.PrivacyEngine.make_private

        @functools.wraps(original)
        def make_private(engine: Any, **options: Any) -> Any:
            if self._is_private:
                return original(engine, **options)
            module = options["module"]
            before = copy.deepcopy(module)
            prepared = original(engine, **options)
            self._is_private = True
            self._watch(prepared[0], module, before, options)
            return prepared

        opacus.PrivacyEngine.make_private = make_private

    def _watch(self, returned: Any, module: Any, before: Any, options: Mapping[str, Any]) -> None:
        """Checks when the model, or what wraps it, is called for training."""
        import torch

        def check(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not called.training or not torch.is_grad_enabled() or self._result is not None:
                return
            device = next(module.parameters()).device
            try:
                with torch.autocast(device.type, enabled=False):
                    self._result = _verify(before.to(device), _arguments(before, args, kwargs), options)
            except MemprofError as error:
                self._result = error
            except Exception as error:  # whatever the model raises when it runs on one sample
                message = str(error).strip().partition("\n")[0]
                self._result = MemprofError(f"the check could not be made ({type(error).__name__}: {message}).")
            raise _CheckedError

        called = returned if isinstance(returned, torch.nn.Module) else module
        called.register_forward_pre_hook(check, with_kwargs=True)


def _arguments(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the model was called with, as `verify` takes it: by position, or all by name."""
    if not kwargs:
        return args
    bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    named: dict[str, Any] = {}
    for name, value in bound.items():
        kind = inspect.signature(model.forward).parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL and value:
            raise MemprofError("the model is called with arguments by position that have no names, and others by name.")
        named |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return named


def _verify(model: Any, batch: Any, options: Mapping[str, Any]) -> tuple["Verification", list[str]]:
    from opacus_memprof.clipping import verify

    mode = options.get("grad_sample_mode", "hooks")
    if not options.get("batch_first", True):
        raise MemprofError(
            "the script uses batch_first=False; the check knows batches whose first dimension is samples."
        )
    found = verify(model, batch, mode)
    exact = []
    for other in _OTHER_MODES if not found.exact else ():
        try:
            if other != mode and verify(model, batch, other).exact:
                exact.append(other)
        except Exception:  # a mode that cannot run this model is not advised
            continue
    return found, exact


def print_verification(found: "Verification", exact: Sequence[str], console: Console) -> None:
    """Prints each parameter's deviation, and the verdict."""
    worst = sorted(found.errors, key=lambda name: -found.errors[name])
    console.print(f"{'deviation':>9}  of the clipped gradient of, relative to its largest element")
    for name in worst[:_MOST_ROWS]:
        style = "bold red" if found.errors[name] > found.tolerance else None
        console.print(f"{found.errors[name]:>9.1e}  {name}", style=style, soft_wrap=True)
    if len(worst) > _MOST_ROWS:
        console.print(f"{'':>9}  {len(worst) - _MOST_ROWS} more, none above {found.errors[worst[_MOST_ROWS]]:.1e}")
    console.print(f"{found.norm_error:>9.1e}  the samples' norms, relative", soft_wrap=True)
    console.print(f"\n{found}", soft_wrap=True, markup=False)
    if not found.exact:
        rely = "Neither the training nor the privacy that is accounted for can be relied on."
        advice = f" Exact for this model and batch: {', '.join(exact)}." if exact else ""
        console.print(rely + advice, soft_wrap=True)
