# SPDX-License-Identifier: Apache-2.0
"""Starts programs without the 3 s in which Python imports torch and Opacus.

The command of `interpreter()` is this file, which has a server fork the process that runs the program. The server has
imported torch, Opacus and the command line, with nothing started and one thread, and hides them until the program
imports them, as that of planned runs does (opacus_memprof.planning.fork_server). Arguments, directory, environment,
standard streams and exit code are those of the command.
"""

import gc
import json
import os
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": ROOT,
    "PYTHONWARNINGS": "ignore",
    "COLUMNS": "200",  # so that no path is broken in two
    "PYDANTIC_DISABLE_PLUGINS": "1",  # typer sets it whenever it imports a part of pydantic
}
# Variables that importing torch or Opacus does not read. A command that changes any other becomes a real process.
LATE = {"COLUMNS", "HF_HUB_OFFLINE", "LOCAL_WORLD_SIZE", "PYTEST_CURRENT_TEST", "RANK", "WORLD_SIZE"}
LATE |= {"OPACUS_MEMPROF_PYTEST_REPORTS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD", "SEQ_LEN"}
ANOTHER_ENVIRONMENT = b"another environment"


@cache
def interpreter() -> list[str]:
    """The command of a Python, to be started with ENVIRONMENT: a real one where there is a GPU, or no virtual one."""
    import torch

    from opacus_memprof import virtual_gpu
    from opacus_memprof.virtual_gpu.requirements import LIBRARIES

    has_gpu = torch.cuda.is_available() and virtual_gpu.active() is None
    if has_gpu or not (LIBRARIES / "libcuda.so.1").is_file():
        return [sys.executable]
    address = f"opacus-memprof-tests-{os.getpid()}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{address}")
    listener.listen()
    command = [sys.executable, "-m", "tests.warm_python", "--serve", str(listener.fileno())]
    # Its standard input ends with this process. All are pipes, as those of the programs: Python asks when it starts.
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    interpreter.server = subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT, pass_fds=[listener.fileno()], **streams)
    return [sys.executable, "-I", "-S", __file__, address]


def executable(folder: Path) -> str:
    """A file that is the command of a warm Python, for what starts `sys.executable` with ENVIRONMENT."""
    file = folder / "python"
    file.write_text(f'#!/bin/sh\nexec {shlex.join(interpreter())} "$@"\n')
    file.chmod(0o755)
    return str(file)


def ask(address: str, arguments: list[str]) -> None:
    """Has the server run the program, and ends as it does."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{address}")
        request = json.dumps([arguments, os.getcwd(), dict(os.environ)]).encode()
        socket.send_fds(connection, [struct.pack("=I", len(request))], [0, 1, 2])
        connection.sendall(request)
        answer = connection.recv(100)
    if answer == ANOTHER_ENVIRONMENT:
        os.execv(sys.executable, [sys.executable, *arguments])
    code = int(answer)  # fails where the server has ended
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def serve(listener: socket.socket) -> None:
    """Forks a process for each connection, until standard input ends."""
    from opacus_memprof.planning.fork_server import ForkServer
    from opacus_memprof.planning.virtual_run import PACKAGES

    packages = [*PACKAGES, "opacus_memprof.cli"]
    if find_spec("typer._adapters"):  # imports pydantic at a command's first option: half of a short command's time
        packages.append("typer._adapters")
    server = ForkServer(packages)
    assert server.can_fork()
    gc.callbacks.clear()  # collections pass over what was imported, for good: to look through it takes 0.3 s
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for these processes
    while True:
        ready, _, _ = select.select([0, listener], [], [])
        if 0 in ready:
            os._exit(0)
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return answer(server, connection)
        connection.close()


def answer(server, connection: socket.socket) -> None:
    """Forks the process of one program, waits for it, and ends it where the other side of the connection is ended."""
    from opacus_memprof.planning.fork_server import send_exit_code

    size, streams, _, _ = socket.recv_fds(connection, 4, 3)
    with connection.makefile("rb") as file:
        arguments, directory, environment = json.loads(file.read(*struct.unpack("=I", size)))
    if any(environment.get(name) != os.environ.get(name) for name in {*environment, *os.environ} - LATE):
        connection.sendall(ANOTHER_ENVIRONMENT)
        os._exit(0)
    child = os.fork()
    if child == 0:
        connection.close()
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)
        server.become([sys.executable, *arguments], streams)
        for stream in streams:
            os.close(stream)
        server.run(partial(run_program, arguments))
    for stream in streams:
        os.close(stream)
    send_exit_code(child, connection)


def run_program(arguments: list[str]) -> None:
    """Runs what follows `python` on a command line: SCRIPT ..., -m MODULE ... or -c CODE ..."""
    from opacus_memprof.running.program import Program, print_exception

    option, *rest = arguments
    try:
        if option == "-c":
            sys.argv, sys.path[0] = arguments[:1] + rest[1:], ""
            sys.modules["__main__"] = main = ModuleType("__main__")
            exec(compile(rest[0], "<string>", "exec", dont_inherit=True), vars(main))
        elif option == "-m":
            Program(rest[0], rest[1:], module=True).run()
        else:
            Program(option, rest, module=False).run()
    except Exception as error:
        print_exception(error.with_traceback(error.__traceback__.tb_next))  # type: ignore[union-attr]
        sys.exit(1)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(socket.socket(fileno=int(sys.argv[2])))
    else:
        ask(sys.argv[1], sys.argv[2:])
