# SPDX-License-Identifier: Apache-2.0
"""The process from which planned runs are forked: `python -m opacus_memprof.planning.fork_server SOCKET PACKAGE...`.

It imports the packages once, which takes most of a short run's time, and forks for each run: before CUDA is
initialised, while there is one thread, and with the packages hidden until the program imports them. SOCKET is a file
descriptor, over which a socket comes for each run: its other side sends a line with the configuration, the directory
and the log, and gets the exit code.

A run reports which other packages it has imported. Before the next run the process imports them, too, in a fork of
itself, which serves all further runs. If their import does more than to import, this process serves them instead.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import sysconfig
import threading
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, FrameType, ModuleType
from typing import Any, NoReturn

from opacus_memprof.planning import run_process
from opacus_memprof.recording.startup import note_modules
from opacus_memprof.running.program import print_exception
from opacus_memprof.virtual_gpu.requirements import LIBRARIES

_PR_SET_PDEATHSIG = 1  # of prctl(2)
_INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib"))
_FOLDERS = (*_INSTALLED, sysconfig.get_path("stdlib") + os.sep)
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_NOT_THE_PROGRAM = (*_FOLDERS, _PACKAGE, "<")  # beginnings of files: installed, the profiler's, made by Python
_REFUSED = 77  # exit code of a fork that must not serve


class ForkServer:
    """A process with the libraries of a virtual GPU and with packages, which are hidden until a program imports them.

    Its forks become the processes of programs.

    Args:
        packages: imported in this order.
        learns: whether programs report what else they import.
    """

    def __init__(self, packages: Sequence[str], *, learns: bool = False) -> None:
        self._environment = dict(os.environ)
        self._command: list[str] = []  # the command of the program, in its process
        self._learns = learns
        self._draws = run_process.KeptDraws()
        self._reports = socket.socketpair(type=socket.SOCK_DGRAM)  # of imports, from the programs to this process
        # Handlers registered before torch is imported run after torch's, as in a new process.
        self._before_torch = contextlib.ExitStack()
        atexit.register(self._before_torch.close)
        for library in ("libcuda.so.1", "libnvidia-ml.so.1"):  # before torch looks for them
            ctypes.CDLL(str(LIBRARIES / library), mode=ctypes.RTLD_GLOBAL)
        self._hidden = HiddenModules(packages, self._check_environment)
        if run_process.SET_BY_TORCH not in self._environment:
            os.environ.pop(run_process.SET_BY_TORCH, None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the programs handle it
        gc.freeze()  # a search through the heap, such as that for models, leaves out what was imported
        gc.callbacks.append(_unfreeze)

    def can_fork(self) -> bool:
        """Returns whether this process has one thread, and the packages have not changed its environment."""
        return len(os.listdir("/proc/self/task")) == 1 and not run_process.has_changed(self._environment)

    def learned(self) -> dict[str, str]:
        """Returns the modules and files that a run which has ended imported beyond the packages; {} if none has."""
        try:
            report: dict[str, str] = json.loads(zlib.decompress(self._reports[0].recv(2**20, socket.MSG_DONTWAIT)))
        except BlockingIOError:
            return {}
        self._learns = not report
        return report

    def import_more(self, modules: Mapping[str, str]) -> bool:
        """Imports and hides further modules. The process must not be used if the result is False.

        Args:
            modules: the files of modules, in the order of their imports.

        Returns:
            Whether the program will find what it finds in a new process: the modules come from the same files, and
            their import changed no random state and no variable of the environment, started no thread and asked for no
            GPU.
        """
        hidden = self._hidden.pending
        asked: list[str] = []
        states = _random_states(hidden)
        try:
            with (
                _noted("_cuda_getDeviceCount", hidden["torch._C"], asked),
                _noted("_device_count_nvml", hidden["torch.cuda"], asked),
            ):
                self._hidden.add(list(modules))
        except Exception:
            return False
        if run_process.SET_BY_TORCH not in self._environment:
            os.environ.pop(run_process.SET_BY_TORCH, None)
        gc.freeze()
        same = all(_file(hidden.get(name, sys.modules.get(name))) == file for name, file in modules.items())
        return same and not asked and self.can_fork() and _random_states(hidden) == states

    def keep_draws(self) -> None:
        """Makes a fork of this process share the random numbers of large tensors on the CPU with the other forks."""
        self._draws.install(self._hidden.pending["torch"])

    def become(self, command: Sequence[str], streams: Sequence[int], changed: Collection[str] = ()) -> None:
        """Turns a fork of this process into one in which a program can begin.

        Args:
            command: starts the program again, if it changes the environment and then imports torch.
            streams: the new standard input, output and error.
            changed: files of which the program reads copies with changes.
        """
        self._environment = dict(os.environ)
        if self._learns:
            self._imports = ImportedModules(self._environment, self._hidden.pending, changed)
            sys.meta_path.insert(0, self._imports)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for target, opened in enumerate(streams):
            os.dup2(opened, target)
        self._command = list(command)
        original = atexit.register

        def register(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
            to = self._before_torch.callback if "torch" in self._hidden.pending else original
            to(function, *args, **kwargs)
            return function

        atexit.register = register  # type: ignore[assignment]

    def run(self, program: Callable[[], object]) -> NoReturn:
        """Runs a program in a process that `become` has prepared, and ends the process.

        Neither modules nor C++ libraries are freed as at the end of Python: that would copy all memory of the server,
        which takes a second.
        """
        code: object = 0
        try:
            program()
        except SystemExit as error:
            code = 0 if error.code is None else error.code
        except BaseException as error:
            print_exception(error)
            code = 1
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
        if self._learns and (imported := self._imports.modules()):
            with contextlib.suppress(OSError):  # others have filled the socket
                self._reports[1].send(zlib.compress(json.dumps(imported).encode()), socket.MSG_DONTWAIT)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)  # what C++ libraries have printed
        os._exit(code & 0xFF)

    def _check_environment(self, name: str) -> None:
        """Starts again in a new process if the program has set variables, which packages read when imported."""
        if run_process.has_changed(self._environment):
            sys.stdout.flush()
            os.execve(self._command[0], self._command, self._environment)


def _unfreeze(phase: str, collection: dict[str, int]) -> None:
    """Makes full collections what they are in a new process; how many objects they see decides when the next one is."""
    if collection["generation"] == 2:
        gc.unfreeze()


def serve(server: ForkServer, requests: socket.socket) -> None:
    """Runs the requested programs, several at once, until the other side of the socket is closed."""
    answering: set[int] = set()
    while select.select([requests], [], []) and not (learned := server.learned()):
        if not _serve_one(server, requests, answering):
            break
    else:
        child = os.fork()
        if child == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if not server.import_more(learned):
                os._exit(_REFUSED)
            answering.clear()  # children of the other process
        if child == 0 or os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == _REFUSED:
            while _serve_one(server, requests, answering):
                pass
    for each in answering:
        os.waitpid(each, 0)


def _serve_one(server: ForkServer, requests: socket.socket, answering: set[int]) -> bool:
    """Starts the next program, in a process that is added to `answering`. Returns False if the socket is closed."""
    descriptors = socket.recv_fds(requests, 1, 1)[1]
    if not descriptors:
        return False
    with socket.socket(fileno=descriptors[0]) as connection:
        child = os.fork()
        if child == 0:
            requests.close()
            _answer(server, connection)
    answering.add(child)
    answering -= {each for each in answering if os.waitpid(each, os.WNOHANG)[0]}
    return True


def _answer(server: ForkServer, connection: socket.socket) -> NoReturn:
    with connection.makefile() as lines:
        configuration, directory, log = json.loads(lines.readline())
    child = os.fork()
    if child == 0:
        connection.close()
        _run(server, configuration, directory, log)
    send_exit_code(child, connection)


def send_exit_code(child: int, connection: socket.socket) -> NoReturn:
    """Sends the exit code of a child when it has ended, and ends this process. Kills it if the connection is closed."""
    ready, _, _ = select.select([connection.fileno(), os.pidfd_open(child)], [], [])
    if connection.fileno() in ready:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):
        connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _run(server: ForkServer, configuration: str, directory: str, log: str) -> NoReturn:
    command = [sys.executable, "-m", run_process.__name__, configuration, directory]
    changed = [change["file"] for change in json.loads(configuration)["changes"] if change["kind"] == "line"]
    server.keep_draws()
    with open(os.devnull, "rb") as nothing, open(log, "ab") as end:
        server.become(command, [nothing.fileno(), end.fileno(), end.fileno()], changed)
    sys.argv = [run_process.__file__, configuration, directory]
    server.run(run_process.main)


def main() -> None:
    """Serves runs; ends at once if this process cannot be forked."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    server = ForkServer(sys.argv[2:], learns=True)
    if server.can_fork():
        serve(server, requests)
    sys.stdout.flush()
    os._exit(0)  # exit handlers of the packages are meant for programs


class HiddenModules(MetaPathFinder):
    """Imported packages that are not in `sys.modules` until a program imports them.

    Modules of the standard library that they have imported stay visible.

    Args:
        packages: imported in this order.
        before: called with the name of the first package before it is revealed.

    Attributes:
        pending: the modules that are hidden, by name.
    """

    def __init__(self, packages: Sequence[str], before: Callable[[str], None]) -> None:
        self.pending: dict[str, ModuleType] = {}
        self._before = before
        self._packages: set[str] = set()
        self._imported_by: dict[str, str] = {}
        self.add(packages)
        sys.meta_path.insert(0, self)

    def add(self, packages: Sequence[str]) -> None:
        """Imports and hides further packages, in this order. A package that another has imported is a part of that."""
        sys.modules.update(self.pending)
        for package in packages:
            known = set(sys.modules)
            importlib.import_module(package)
            for name in set(sys.modules) - known:
                if name.partition(".")[0] not in sys.stdlib_module_names:
                    self._imported_by[name] = package
            if self._imported_by.get(package) == package:
                self._packages.add(package)
        for name in self._imported_by:
            self.pending[name] = sys.modules.pop(name)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Finds a module for the import system, without revealing it yet."""
        if name not in self.pending:
            return None
        module = self.pending[name]
        is_package = hasattr(module, "__path__")
        spec = ModuleSpec(name, _Loader(self), origin=getattr(module, "__file__", None), is_package=is_package)
        if is_package:
            spec.submodule_search_locations = list(module.__path__)
        return spec

    def reveal(self, name: str) -> None:
        """Puts a hidden module into `sys.modules`, with the other modules of its package.

        For a requested package, these are all modules that its import had imported.
        """
        self._before(name)
        importer, package = self._imported_by[name], name.partition(".")[0]
        revealed = [
            other
            for other in self.pending
            if self._imported_by[other] == importer and (name in self._packages or other.partition(".")[0] == package)
        ]
        sys.modules.update({other: self.pending.pop(other) for other in revealed})
        note_modules(set(revealed) - {name})  # of which the import system knows itself


class _Loader(Loader):
    """Loads a hidden module by revealing it."""

    def __init__(self, hidden: HiddenModules) -> None:
        self._hidden = hidden
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = self._hidden.pending[spec.name]
        self._spec = module.__spec__  # which the import system replaces
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
        self._hidden.reveal(module.__name__)


class ImportedModules(MetaPathFinder):
    """Takes note of installed modules that a program imports, while it has changed nothing that they could depend on.

    That is until it sets a variable of the environment or torch's default type, uses the GPU, or replaces a function or
    a class of a module, of which a later import takes what it finds.

    Args:
        environment: the variables at the beginning.
        known: the modules that count as imported, by name.
        changed: files of which the program reads changed copies.
    """

    def __init__(
        self, environment: Mapping[str, str], known: Mapping[str, ModuleType], changed: Collection[str] = ()
    ) -> None:
        self._environment = environment
        self._known = set(known)
        self._changed = {os.path.realpath(file) for file in changed}
        self._names: list[str] = []
        self._before: dict[str, tuple[dict[str, Any], list[tuple[str, Any]]]] = {}  # the callables of modules
        self._look({**sys.modules, **known})
        self._statement: tuple[object, int] = (None, 0)  # of the program, the last one that imported
        self._is_patched = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Finds nothing."""
        if name not in self._known and not self._has_changed():
            self._names.append(name)

    def modules(self) -> dict[str, str]:
        """Returns the files of the modules, in the order of their imports; {} if one of the files is changed."""
        files = {name: _file(sys.modules.get(name)) for name in self._names}
        if self._changed & {os.path.realpath(file) for file in files.values()}:
            return {}
        # The profiler's own would count as used before the fork, where it is installed beside the packages.
        others = {name: file for name, file in files.items() if not file.startswith(_PACKAGE)}
        return {name: file for name, file in others.items() if file.startswith(_INSTALLED)}

    def _look(self, modules: Mapping[str, ModuleType]) -> list[Any]:
        """Takes note of what modules hold that were not seen before, and returns the functions and classes in them."""
        found: list[Any] = []
        for name in modules.keys() - self._before.keys():
            values = getattr(modules[name], "__dict__", {})
            is_installed = _file(modules[name]).startswith(_FOLDERS)
            callables = [(key, value) for key, value in values.items() if callable(value)] if is_installed else []
            self._before[name] = values, callables
            found += [value for _, value in callables]
        return found

    def _has_changed(self) -> bool:
        statement = _statement()
        if statement != self._statement and not self._is_patched:  # since a look takes as long as a short import
            self._statement = statement
            self._is_patched = any(
                key in values and values[key] is not value and not _is_of_library(values[key])
                for values, before in self._before.values()
                for key, value in before
            ) or any(map(_is_foreign, self._look(sys.modules)))
        if self._is_patched:
            return True
        torch = sys.modules.get("torch")
        if torch is not None and (torch.cuda.is_initialized() or torch.get_default_dtype() != torch.float32):
            return True
        return run_process.has_changed(self._environment)


def _statement() -> tuple[object, int]:
    """Returns the innermost running instruction of a file that is not installed: the program's."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_PROGRAM):
        frame = frame.f_back
    return (None, 0) if frame is None else (frame.f_code, frame.f_lasti)


def _is_of_library(value: Any) -> bool:
    """Returns whether the profiler or an installed module has put a value where it is, as it does in each run."""
    return _source(value).startswith(_NOT_THE_PROGRAM) or type(value).__module__.startswith("opacus_memprof.")


def _is_foreign(value: Any) -> bool:
    """Returns whether a function or a class is in an installed module, but was not written in an installed file."""
    source = _source(value)
    return not source.startswith(_NOT_THE_PROGRAM) and os.path.isfile(source)  # Cython's have the names of others


def _source(value: Any) -> str:
    """Returns the file of a function or a class; "" if it is not known."""
    code = getattr(value, "__code__", None)
    if isinstance(code, CodeType):
        return code.co_filename
    return str(getattr(sys.modules.get(value.__module__), "__file__", "")) if isinstance(value, type) else ""


def _file(module: ModuleType | None) -> str:
    """Returns the file that a module was imported from; "" if it was made otherwise."""
    spec = getattr(module, "__spec__", None)
    return str(spec.origin) if spec is not None and spec.has_location else ""


@contextlib.contextmanager
def _noted(name: str, owner: Any, calls: list[str]) -> Iterator[None]:
    """A context in which calls of a function are noted."""
    function = getattr(owner, name)

    def noting() -> Any:
        calls.append(name)
        return function()

    setattr(owner, name, noting)
    try:
        yield
    finally:
        setattr(owner, name, function)


def _random_states(hidden: Mapping[str, ModuleType]) -> list[Any]:
    states = [random.getstate(), hidden["torch"].default_generator.get_state().tolist()]
    return [*states, str(hidden["numpy.random"].get_state()) if "numpy.random" in hidden else None]


if __name__ == "__main__":
    main()
