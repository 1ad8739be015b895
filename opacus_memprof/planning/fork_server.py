# SPDX-License-Identifier: Apache-2.0
"""The process from which planned runs are forked: `python -m opacus_memprof.planning.fork_server PACKAGE...`.

It imports the packages once, which takes most of a short run's time, and forks for each run: before CUDA is
initialised, while there is one thread, and with the packages hidden until the program imports them. For each run, a
line of standard input has the configuration, the directory and the log, and a line of standard output has the exit
code.
"""

import atexit
import contextlib
import ctypes
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from opacus_memprof.planning import run_process
from opacus_memprof.planning.hidden_modules import HiddenModules
from opacus_memprof.running.program import print_exception
from opacus_memprof.virtual_gpu.requirements import LIBRARIES


class ForkServer:
    """A process with the libraries of a virtual GPU and with packages, which are hidden until a program imports them.

    Its forks become the processes of programs.

    Args:
        packages: imported in this order.
    """

    def __init__(self, packages: Sequence[str]) -> None:
        self._environment = dict(os.environ)
        self._command: list[str] = []  # the command of the program, in its process
        # Handlers registered before torch is imported run after torch's, as in a new process.
        self._before_torch = contextlib.ExitStack()
        atexit.register(self._before_torch.close)
        for library in ("libcuda.so.1", "libnvidia-ml.so.1"):  # before torch looks for them
            ctypes.CDLL(str(LIBRARIES / library), mode=ctypes.RTLD_GLOBAL)
        self._hidden = HiddenModules(packages, self._check_environment)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the programs handle it

    def can_fork(self) -> bool:
        """Returns whether this process has one thread, and the packages have not changed its environment."""
        return len(os.listdir("/proc/self/task")) == 1 and not run_process.has_changed(self._environment)

    def become(self, command: Sequence[str], streams: Sequence[int]) -> None:
        """Turns a fork of this process into one in which a program can begin.

        Args:
            command: starts the program again, if it changes the environment and then imports torch.
            streams: the new standard input, output and error.
        """
        self._environment = dict(os.environ)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for target, opened in enumerate(streams):
            os.dup2(opened, target)
        random.seed()
        pending: dict[str, Any] = dict(self._hidden.pending)
        if "numpy.random" in pending:
            pending["numpy.random"].seed()
        pending["torch"].default_generator.seed()  # a new process begins with a random seed, too
        self._command = list(command)
        original = atexit.register

        def register(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
            to = self._before_torch.callback if "torch" in self._hidden.pending else original
            to(function, *args, **kwargs)
            return function

        atexit.register = register  # type: ignore[assignment]

    def run(self, program: Callable[[], object]) -> NoReturn:
        """Runs a program in a process that `become` has prepared, and ends the process.

        Modules are not freed as at the end of Python: that would copy all memory of the server, which takes a second.
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
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        ctypes.CDLL(None).exit(code)  # after handlers that C++ libraries have registered
        os._exit(code)

    def _check_environment(self, name: str) -> None:
        """Starts again in a new process if the program has set variables, which packages read when imported."""
        if run_process.has_changed(self._environment):
            sys.stdout.flush()
            os.execve(self._command[0], self._command, self._environment)


def serve(server: ForkServer) -> None:
    """Runs the requested programs, one after the other, until standard input ends."""
    while line := sys.stdin.readline():
        configuration, directory, log = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(server, configuration, directory, log)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(server: ForkServer, configuration: str, directory: str, log: str) -> NoReturn:
    command = [sys.executable, "-m", run_process.__name__, configuration, directory]
    with open(os.devnull, "rb") as nothing, open(log, "ab") as end:
        server.become(command, [nothing.fileno(), end.fileno(), end.fileno()])
    sys.argv = [run_process.__file__, configuration, directory]
    server.run(run_process.main)


def main() -> None:
    """Serves runs; ends at once if this process cannot be forked."""
    server = ForkServer(sys.argv[1:])
    if server.can_fork():
        serve(server)
    sys.stdout.flush()
    os._exit(0)  # exit handlers of the packages are meant for programs


if __name__ == "__main__":
    main()
