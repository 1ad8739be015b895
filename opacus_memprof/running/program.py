# SPDX-License-Identifier: Apache-2.0
"""Runs a program in this process, as `python SCRIPT` and `python -m MODULE` run it in a new one; forks for ranks.

A program can also start its ranks itself, by torch.multiprocessing.spawn or a Process of the start method `spawn`. A
process that multiprocessing starts becomes a rank when it calls init_process_group. From then on it records a profile
of its own, in `rank_0`, `rank_1` … of the program's directory. Other children, such as workers of a DataLoader, record
nothing. Nor does a forked process, because the profiler's locks belong to its parent.
"""

import functools
import importlib.machinery
import importlib.util
import inspect
import io
import os
import signal
import sys
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import InspectLoader
from pathlib import Path
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import Any, NoReturn

from opacus_memprof.errors import MemprofError
from opacus_memprof.language import tr, tr_sentence
from opacus_memprof.recording.startup import AfterImport, run_in_children

_PACKAGE = str(Path(__file__).parents[1]) + os.sep


class Program:
    """A script or a module, and its arguments. Sets sys.path as python does.

    Args:
        target: the path of the script, or the name of the module.
        arguments: sys.argv[1:] of the program.
        module: whether `target` is a module.

    Raises:
        MemprofError: the script or module does not exist.
    """

    def __init__(self, target: str, arguments: Sequence[str], *, module: bool) -> None:
        self._target = target
        self._arguments = arguments
        self._module = module
        if not module and not os.path.isfile(target):
            raise MemprofError(f"the script {target} {'is a directory' if os.path.isdir(target) else 'does not exist'}")
        if not getattr(sys.flags, "safe_path", False):  # python -P, since 3.11
            sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.realpath(target))
        if module and importlib.util.find_spec(target.partition(".")[0]) is None:
            raise MemprofError(f"there is no module {target}")

    def run(self) -> None:
        """Runs the program as the module `__main__`, which stays in sys.modules for its threads and exit handlers."""
        main = ModuleType("__main__")
        if self._module:
            sys.argv = ["-m", *self._arguments]  # python has this value while it imports the module's packages
            spec, code = _find_module(self._target)
            sys.argv[0] = str(spec.origin)
            attributes = {"__spec__": spec, "__loader__": spec.loader, "__package__": spec.parent}
            attributes |= {"__file__": spec.origin, "__cached__": spec.cached}
        else:
            sys.argv = [self._target, *self._arguments]
            path = os.path.abspath(self._target)
            attributes = {"__spec__": None, "__package__": None, "__file__": path, "__cached__": None}
            attributes["__loader__"] = importlib.machinery.SourceFileLoader("__main__", path)
            with io.open_code(path) as file:
                code = compile(file.read(), path, "exec", dont_inherit=True)
        vars(main).update(attributes, __builtins__=sys.modules["builtins"])
        sys.modules["__main__"] = main
        exec(code, vars(main))


def print_exception(error: BaseException) -> None:
    """Prints an uncaught exception as python does, through sys.excepthook, without the frames of this package.

    A MemprofError is followed by its translation, because the exception itself stays English.
    """
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        traceback = traceback.tb_next
    sys.excepthook(type(error), error.with_traceback(traceback), traceback)
    if isinstance(error, MemprofError) and (said := tr_sentence(str(error), least_words=2)) != str(error):
        print(f"opacus-memprof: {said}", file=sys.stderr)


def _find_module(name: str) -> tuple[importlib.machinery.ModuleSpec, CodeType]:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(name := f"{name}.__main__")
    except ModuleNotFoundError as error:
        raise MemprofError(f"there is no module {name}: {error}") from error
    code = spec.loader.get_code(name) if spec is not None and isinstance(spec.loader, InspectLoader) else None
    if spec is None or code is None:
        raise MemprofError(f"there is no module {name} that can be run")
    return spec, code


def fork_for_each(ranks: Sequence[int]) -> int:
    """Forks a child process for each rank, one after the other, and returns the rank in the child.

    The parent does not return: it exits with the exit code of the first child that failed. A single rank is not forked.
    Must be called before torch is imported, because threads do not survive a fork.
    """
    if len(ranks) == 1:
        return ranks[0]
    sys.stdout.flush()
    exit_code = 0
    for rank in ranks:
        child = os.fork()
        if child == 0:
            return rank
        child_exit_code = _wait(child)
        exit_code = exit_code or child_exit_code
    sys.exit(exit_code)


def _wait(child: int) -> int:
    """Waits for the child and returns its exit code.

    Forwards SIGTERM and SIGINT, so that the child writes its profile before they end this process.
    """

    def forward(signum: int, _: FrameType | None) -> NoReturn:
        os.kill(child, signum)
        os.waitpid(child, 0)
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
        raise SystemExit(128 + signum)

    original = {signum: signal.signal(signum, forward) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        _, status = os.waitpid(child, 0)
    finally:
        for signum, handler in original.items():
            signal.signal(signum, handler)
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def record_started_ranks(directory: Path, device: str, max_events: int) -> None:
    """Makes the ranks that this process starts from now on record profiles in `directory`."""
    run_in_children(
        "from opacus_memprof.running import recording; "
        f"recording.record_if_rank({str(directory)!r}, {device!r}, {max_events})"
    )
    pid = os.getpid()

    def note_fork(_: Mapping[str, Any]) -> None:
        if os.getpid() != pid:
            forked = tr(
                "this rank was forked, and is not recorded: start ranks by the start method spawn, or by torchrun"
            )
            print(f"opacus-memprof: {forked}", file=sys.__stderr__)

    before_init_process_group(note_fork)


def before_init_process_group(callback: Callable[[Mapping[str, Any]], None]) -> None:
    """Calls the callback with the arguments of each call of init_process_group, before it."""

    def patch() -> None:
        from torch import distributed

        if not distributed.is_available():
            return
        c10d = distributed.distributed_c10d
        initialize = c10d.init_process_group
        signature = inspect.signature(initialize)

        @functools.wraps(initialize)
        def init_process_group(*args: Any, **kwargs: Any) -> None:
            callback(signature.bind(*args, **kwargs).arguments)
            initialize(*args, **kwargs)

        for module in (c10d, distributed):
            vars(module)["init_process_group"] = init_process_group

    AfterImport("torch.distributed", patch)


def variables(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Returns the rank and the number of ranks that init_process_group is given, as a launcher's variables."""
    query = dict(urllib.parse.parse_qsl(urllib.parse.urlparse(arguments.get("init_method") or "").query))
    given = {name: arguments.get(name, -1) for name in ("rank", "world_size")}
    found = {name: query.get(name, value) if value in (-1, None) else value for name, value in given.items()}
    return {name.upper(): str(value) for name, value in found.items() if value not in (-1, None)}
