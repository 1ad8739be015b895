# SPDX-License-Identifier: Apache-2.0
"""Runs in processes that are forked from one which has imported torch and Opacus already."""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


class ForkedRuns:
    """A process that forks one for each run, one after the other.

    Args:
        packages: what the runs import.
        environment: of the runs.
    """

    def __init__(self, packages: Sequence[str], environment: dict[str, str]) -> None:
        self._closed = False
        # Not an import: the command line stands above this.
        self._server = subprocess.Popen(
            [sys.executable, "-m", "opacus_memprof.planning.fork_server", *packages],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, configuration: str, directory: Path, log: Path) -> int | None:
        """Runs a configuration and returns the exit code, as subprocess has it; None where that cannot be done here."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        try:
            request = [configuration, str(directory.absolute()), str(log.absolute())]
            self._server.stdin.write(json.dumps(request) + "\n")
            self._server.stdin.flush()
            answer = self._server.stdout.readline()
        except OSError:
            answer = ""
        if answer:
            return int(answer)
        return -signal.SIGKILL if self._closed else None

    def close(self) -> None:
        """Ends the process. A run that is going on is not waited for."""
        self._closed = True
        self._server.kill()
        self._server.wait()
