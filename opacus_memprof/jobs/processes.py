# SPDX-License-Identifier: Apache-2.0
"""Child processes that can be killed together."""

import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Processes:
    """Runs child processes, from any thread. If waiting for one raises, such as KeyboardInterrupt, it is killed."""

    def __init__(self) -> None:
        self._children: set[subprocess.Popen[Any]] = set()
        self._killed = threading.Event()

    def run(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        """Runs a command with its output in the file `log`.

        Returns:
            The exit code; if negative, the number of the signal that killed the process.
        """
        with (
            open(log, "w", encoding="utf-8") as output,
            subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            ) as child,
            self._tracked(child),
        ):
            return child.wait()

    @contextmanager
    def lines(self, command: Sequence[str], environment: Mapping[str, str]) -> "Iterator[subprocess.Popen[str]]":
        """A context manager that starts a command and returns its process, whose `stdout` yields lines of text."""
        with (
            subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="backslashreplace",
            ) as child,
            self._tracked(child),
        ):
            yield child

    def kill(self) -> None:
        """Kills all processes, including later ones."""
        self._killed.set()
        for child in list(self._children):
            child.kill()  # does nothing if it has ended

    @contextmanager
    def _tracked(self, child: "subprocess.Popen[Any]") -> Iterator[None]:
        self._children.add(child)
        try:
            if self._killed.is_set():  # `kill` may not have seen it
                child.kill()
            yield
        except BaseException:
            child.kill()
            raise
        finally:
            self._children.discard(child)
