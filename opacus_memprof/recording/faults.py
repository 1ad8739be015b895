# SPDX-License-Identifier: Apache-2.0
"""Contains exceptions of the profiler itself, so that they never end or change a training.

All code of the profiler that runs inside a training is in a `contain` block or is a call hook, which runs around a call
of the program. A fault becomes a warning and a sentence in the profile, and the training continues. MemprofError, which
the user can fix, is raised only from functions that the user has called.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from torch.compiler import is_compiling

P = ParamSpec("P")
R = TypeVar("R")

# A generator around a call: it runs to its `yield` before the call, and continues with the call's result.
CallHook = Generator[None, Any, None]

_MOST_SENTENCES = 100
_sentences: dict[str, None] = {}


class CallError(Exception):
    """Raised at the `yield` of a call hook when the call has raised `error`."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def clear() -> None:
    """Discards the faults that were recorded. Called when a session begins."""
    _sentences.clear()


def recorded() -> list[str]:
    """Returns a sentence for each fault of the session, in order."""
    return list(_sentences)


def record(sentence: str) -> None:
    """Records a sentence for the profile and warns the program, once for each sentence. Never raises."""
    if sentence in _sentences or len(_sentences) == _MOST_SENTENCES:
        return
    _sentences[sentence] = None
    with contextlib.suppress(Exception):  # the program may have turned warnings into errors
        warnings.warn(sentence, RuntimeWarning, stacklevel=2)


def describe(error: BaseException) -> str:
    """Returns the exception's type and message, in one line."""
    try:
        message = " ".join(str(error).split())
    except Exception:  # an exception that cannot be printed
        message = ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def record_fault(doing: str, error: BaseException) -> None:
    """Records that the profiler has failed while `doing` something. Never raises."""
    record(
        f"the profiler failed while {doing} ({describe(error)}): the training goes on without it, and the profile has "
        "what there is"
    )


class Containment:
    """The context manager that `contain` returns. Also a decorator of functions, which return None if they fail."""

    __slots__ = ("_doing",)

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        record_fault(self._doing, error)
        return True

    def __call__(self, function: Callable[P, R]) -> Callable[P, R | None]:
        doing = self._doing

        @functools.wraps(function)
        def contained(*args: P.args, **kwargs: P.kwargs) -> R | None:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                record_fault(doing, error)
                return None

        return contained


def contain(doing: str) -> Containment:
    """Makes a block or function of the profiler never raise: an exception becomes a fault.

    Args:
        doing: what it does, as it completes the sentence "the profiler failed while".
    """
    return Containment(doing)


def observe(function: Callable[..., R], hook: Callable[..., CallHook]) -> Callable[..., R]:
    """Wraps a function of the program in a call hook, which is called with its arguments.

    torch.compile traces only the function.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> R:
        if is_compiling():
            return function(*args, **kwargs)
        return call_observed(function, args, kwargs, lambda: hook(*args, **kwargs))

    return wrapper


def call_observed(function: Callable[..., R], args: Any, kwargs: Any, observe: Callable[[], CallHook]) -> R:
    """Calls a function of the program inside the call hook that `observe` returns.

    The function's result and exceptions pass unchanged. Exceptions of the hook are contained.
    """
    name = getattr(function, "__qualname__", type(function).__name__)
    hook: CallHook | None = None
    try:
        hook = observe()
        next(hook)
    except StopIteration:
        hook = None
    except Exception as error:
        hook = None
        record_fault(f"following {name}", error)
    try:
        result = function(*args, **kwargs)
    except BaseException as error:
        if hook is not None:
            _fail(name, hook, error)
        raise
    if hook is not None:
        try:
            hook.send(result)
        except StopIteration:
            pass
        except Exception as error:
            record_fault(f"following {name}", error)
    return result


def _fail(name: str, hook: CallHook, error: BaseException) -> None:
    """Raises CallError in a call hook whose call has raised `error`."""
    failure = CallError(error)
    try:
        hook.throw(failure)
    except (StopIteration, CallError):
        pass
    except Exception as fault:
        record_fault(f"following {name}", fault)
    finally:  # its traceback has this frame: a reference cycle would keep the call's tensors alive
        failure.__traceback__ = None
