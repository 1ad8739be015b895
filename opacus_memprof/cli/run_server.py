# SPDX-License-Identifier: Apache-2.0
"""The process that planned runs are forked from: `python -m opacus_memprof.cli.run_server PACKAGE...`.

It imports the packages once, which takes most of a short run's time, and forks for each run: before CUDA is
initialised, while there is one thread, and with the packages hidden until the program imports them. Of a run a line of
standard input has the configuration, the directory and the log, and a line of standard output the exit code.
"""

import atexit
import contextlib
import ctypes
import json
import os
import random
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from opacus_memprof.cli import planned_run
from opacus_memprof.cli.hidden_modules import HiddenModules
from opacus_memprof.virtual_gpu.requirements import LIBRARIES


class RunServer:
    """Forks a process for each run."""

    def __init__(self, packages: list[str]) -> None:
        self._environment = dict(os.environ)
        self._arguments: list[str] = []  # of the run, in its process
        # What is registered before torch is imported runs after what torch registers, as in a process of its own.
        self._before_torch = contextlib.ExitStack()
        atexit.register(self._before_torch.close)
        for library in ("libcuda.so.1", "libnvidia-ml.so.1"):  # before torch looks for them
            ctypes.CDLL(str(LIBRARIES / library), mode=ctypes.RTLD_GLOBAL)
        self._hidden = HiddenModules(packages, self._check_environment)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the runs have it

    def can_fork(self) -> bool:
        """Whether this process has one thread, and the packages have not changed its environment."""
        return len(os.listdir("/proc/self/task")) == 1 and dict(os.environ) == self._environment

    def serve(self) -> None:
        """Runs what is asked for, one after the other, until standard input ends."""
        while line := sys.stdin.readline():
            configuration, directory, log = json.loads(line)
            child = os.fork()
            if child == 0:
                self._run(configuration, directory, log)
            _, status = os.waitpid(child, 0)
            print(os.waitstatus_to_exitcode(status), flush=True)

    def _run(self, configuration: str, directory: str, log: str) -> NoReturn:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for source, flags, targets in ((os.devnull, os.O_RDONLY, (0,)), (log, os.O_WRONLY | os.O_APPEND, (1, 2))):
            opened = os.open(source, flags)
            for target in targets:
                os.dup2(opened, target)
            os.close(opened)
        random.seed()
        pending: dict[str, Any] = dict(self._hidden.pending)
        if "numpy.random" in pending:
            pending["numpy.random"].seed()
        pending["torch"].default_generator.seed()  # which a new process begins with a random seed too
        self._arguments = [configuration, directory]
        sys.argv = [planned_run.__file__, *self._arguments]
        original = atexit.register

        def register(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
            to = self._before_torch.callback if "torch" in self._hidden.pending else original
            to(function, *args, **kwargs)
            return function

        atexit.register = register  # type: ignore[assignment]
        planned_run.main()
        sys.exit()

    def _check_environment(self, name: str) -> None:
        """Starts over in a new process where the program has set variables, which packages read when imported."""
        if dict(os.environ) != self._environment:
            command = [sys.executable, "-m", planned_run.__name__, *self._arguments]
            sys.stdout.flush()
            os.execve(sys.executable, command, self._environment)


def main() -> None:
    """Serves runs; ends at once where this process cannot be forked."""
    server = RunServer(sys.argv[1:])
    if server.can_fork():
        server.serve()
    sys.stdout.flush()
    os._exit(0)  # what the packages have registered is for programs


if __name__ == "__main__":
    main()
