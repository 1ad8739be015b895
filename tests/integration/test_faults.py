# SPDX-License-Identifier: Apache-2.0
"""Faults of the profiler itself, planted at every one of its steps: none ends or changes a training.

The steps are found by running a training under the profiler: every call that the profiler's own code makes of a
function of its own, and of the extension's. Each fails once, at its beginning or at its end, which is after it has made
its changes. What contains faults and what undoes changes is taken to work: `test_opacus_detach.py` tests these.
"""

from __future__ import annotations

import dis
import gc
import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import dataloader

import opacus_memprof
from opacus_memprof.analysis.profile import load_profile
from opacus_memprof.recording import faults, native
from opacus_memprof.recording.attachment import Attachment
from tests.integration.opacus_training import Training, prepare
from tests.integration.test_opacus_detach import identities, state_of_opacus

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="steps are told apart by code.co_qualname")

PACKAGE = Path(opacus_memprof.__file__).parent
OURS = tuple(str(PACKAGE / room) for room in ("session", "recording", "hooks"))
TRUSTED = {str(PACKAGE / "recording" / name) for name in ("faults.py", "attachment.py")}

# A step: who calls, and the function of ours or of the extension that is called.
Step = tuple[CodeType, CodeType | str]


# What `start` checks before anything is recorded: a fault there is raised, before the training.
CHECKS = ("current", "refuse_after_fork", "resolve_device", "claim", "ProfileDirectory.clear")


class PlantedError(Exception):
    """The fault."""


def is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(OURS)


def is_step(code: CodeType, caller: CodeType | None) -> bool:
    """Whether the function is one of the package that the code of the three rooms calls.

    Not those that a program calls, and generators only where `call_observed` runs them: nobody is told what one raises
    that is closed.
    """
    return (
        code.co_filename.startswith(str(PACKAGE))
        and code.co_filename not in TRUSTED
        and not code.co_name.startswith("<")
        and caller is not None
        and is_ours(caller)
        and not (code.co_qualname.startswith("Session.") and not code.co_name.startswith("_"))
        and code.co_name not in ("__init__", "__enter__", "__exit__")
        and not (code.co_flags & inspect.CO_GENERATOR and caller.co_filename not in TRUSTED)
    )


@contextmanager
def on_each_call(at_end: bool, function: Callable[[Step], None]) -> Iterator[None]:
    """Calls `function` at the beginning or at the end of each step. What it raises, the step raises."""
    known: dict[Any, bool] = {}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        caller = None if frame.f_back is None else frame.f_back.f_code
        step = caller, frame.f_code
        if step not in known:
            known[step] = is_step(frame.f_code, caller)
        if not known[step]:
            return None
        if not at_end:
            function(step)
            return None

        def at_return(frame: FrameType, event: str, _: Any) -> Any:
            if event == "return" and not is_yield(frame):
                function(step)
            return at_return

        frame.f_trace_lines = False
        return at_return

    originals = {name: getattr(native, name) for name in native.__all__}
    for name, original in originals.items():
        if type(original).__name__ == "builtin_function_or_method":
            setattr(native, name, around(name, original, at_end, function))
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)
        for name, original in originals.items():
            setattr(native, name, original)


def is_yield(frame: FrameType) -> bool:
    """Whether the frame passes a value on and waits.

    What a trace raises there would not reach the generator's own `with` and `finally`, which no exception of the
    profiler's can do.
    """
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] == "YIELD_VALUE"


def around(name: str, original: Any, at_end: bool, function: Callable[[Step], None]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_code
        is_planted = is_ours(caller) and caller.co_filename not in TRUSTED
        if is_planted and not at_end:
            function((caller, name))
        result = original(*args, **kwargs)
        if is_planted and at_end:
            function((caller, name))
        return result

    return call


def all_patched() -> dict[str, Any]:
    """Everything in Opacus and torch that the profiler replaces."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.jit import _recursive

    owners = (torch, torch._C._nn, nn.Module, torch.OutOfMemoryError, dataloader._BaseDataLoaderIter, _recursive)
    owners += (nn.parallel.DistributedDataParallel, FSDPParam, FSDPParamGroup)
    return state_of_opacus() | {str(owner): dict(identities(dict(vars(owner)))) for owner in owners}


class Sink:
    """A destination of the stream that keeps nothing."""

    def open(self) -> None: ...

    def write(self, reading: Any) -> None: ...

    def close(self) -> None: ...


def two_steps(training: Training) -> list[float]:
    return [training.step(tokens, labels) for (tokens, labels), _ in zip(training.loader, range(2), strict=False)]


def train(mode: str, directory: Path | None) -> tuple[list[float], list[Any]]:
    """The losses and the parameters of an epoch; with a directory, under a session that does all that one can do."""
    if directory is None:
        training = prepare(mode)
        return two_steps(training), [p.detach().clone() for p in training.model.parameters()]
    with opacus_memprof.profile(directory, device="cpu", stream=Sink(), stream_interval=100.0) as session:
        import opacus

        session.attach(opacus.PrivacyEngine)
        training: Training = prepare(mode)
        if mode == "vanilla":
            session.attach(training.model, training.optimizer)
        losses = two_steps(training)
        session.snapshot("after")
        session.breakdown()
        torch.OutOfMemoryError("a program's own")
    return losses, [p.detach().clone() for p in training.model.parameters()]


def name_of(step: Step) -> str:
    caller, called = step
    return f"{caller.co_qualname} → {called if isinstance(called, str) else called.co_qualname}"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch's own threads cost such a small model most of its time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("at_end", "every"),
    [(False, 8), pytest.param(False, 1, marks=pytest.mark.nightly), pytest.param(True, 1, marks=pytest.mark.nightly)],
    ids=["at the beginning of one in eight", "at its beginning", "at its end"],
)
def test_a_fault_at_any_step_changes_nothing(at_end: bool, every: int, tmp_path: Path) -> None:
    tried: set[Step] = set()
    wrong = []
    for mode in ("hooks", "ghost", "vanilla"):
        expected = train(mode, None)
        train(mode, tmp_path / "out")
        before = all_patched()
        steps: dict[Step, None] = {}
        with on_each_call(at_end, lambda step, steps=steps: steps.setdefault(step)):
            train(mode, tmp_path / "out")
        for step in [each for each in steps if each not in tried][::every]:
            if at_end and is_check(step):  # it has nothing to undo, and what it returned is lost
                continue
            wrong += [
                f"{mode}, {name_of(step)}: {what}"
                for what in consequences(mode, step, at_end, tmp_path / "out", expected, before)
            ]
        tried |= steps.keys()
        assert not wrong, "\n".join(wrong)
    assert len(tried) > 200


def consequences(
    mode: str,
    step: Step,
    at_end: bool,
    directory: Path,
    expected: tuple[list[float], list[Any]],
    before: dict[str, Any],
) -> Iterator[str]:
    """What a fault at this step does that it must not do."""
    undoing: list[bool] = []

    def plant(called: Step) -> None:
        if called == step and not undoing:
            undoing.append(in_detach(sys._getframe()))
            raise PlantedError("planted")

    losses, parameters = [], []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a program may turn warnings into errors
            warnings.filterwarnings("ignore", "Secure RNG|Full backward hook|Optimal order")
            with on_each_call(at_end, plant):
                losses, parameters = train(mode, directory)
    except Exception as error:
        if not (isinstance(error, PlantedError) and is_check(step)):
            yield f"raised {error!r}"
        if (left := opacus_memprof.session.current()) is not None:
            left.discard()
            yield "a session is left"
    else:
        assert undoing
        if losses != expected[0] or not all(map(torch.equal, parameters, expected[1])):
            yield "other losses or parameters"
        profile = load_profile(directory)
        if profile.status != "finished":
            yield f"the profile is {profile.status}"
        # What undoes a change is tried again, and after the profile there is only the warning.
        sentences = [*profile.warnings, *faults.recorded()]
        if not undoing[0] and not any("PlantedError" in sentence for sentence in sentences):
            yield f"no sentence, but {sentences}"
    if (after := all_patched()) != before:
        yield f"changed {[key for key in before if after[key] != before[key]]}"
    if native.cpu_installed() or native.events_status()["recording"]:
        yield "the allocator or the events are left"
        native.stop_events()
        native.cpu_uninstall()
    if (category := category_of_a_new_block()) != "unattributed":
        yield f"this thread's blocks are {category} from now on"


def category_of_a_new_block() -> str:
    """As this thread's tags have it."""
    native.cpu_install()
    try:
        block = torch.empty(12_345, dtype=torch.uint8)
        (found,) = (each["category"] for each in native.live_blocks() if each["bytes"] == block.nbytes)
        return str(found)
    finally:
        native.cpu_uninstall()


def is_check(step: Step) -> bool:
    return name_of(step).removeprefix("Session.start → ") in CHECKS


def in_detach(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not Attachment.detach.__code__:
        frame = frame.f_back
    return frame is not None


def test_what_the_program_raises_passes_and_is_not_kept() -> None:
    """No cycle of references keeps the tensors of a failed call alive until the next collection."""
    seen: list[type[BaseException]] = []

    class Large:
        pass

    def fail() -> None:
        large = Large()
        alive.append(weakref.ref(large))
        raise StopIteration("of the program")

    def observation() -> faults.CallHook:
        try:
            yield
        except faults.CallError as failed:
            seen.append(type(failed.error))
            raise

    alive: list[weakref.ref[Large]] = []
    gc.disable()
    try:
        message = ""
        try:
            faults.observe(fail, observation)()
        except StopIteration as error:
            message = str(error)
        assert message == "of the program"
        assert seen == [StopIteration]
        assert alive[0]() is None
    finally:
        gc.enable()


def test_warnings_that_are_errors_stay_the_profilers() -> None:
    def observation(value: int) -> faults.CallHook:
        yield
        raise KeyError(value)

    faults.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert faults.observe(lambda value: 2 * value, observation)(21) == 42
    (sentence,) = faults.recorded()
    assert "(KeyError: 21)" in sentence
    faults.clear()
