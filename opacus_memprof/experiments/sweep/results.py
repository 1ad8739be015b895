# SPDX-License-Identifier: Apache-2.0
"""The directory of configurations that are run side by side. It says what it holds, so that nothing else is mixed in.

manifest.json   the command, what all configurations share, and their names
runs/NAME/      of each: configuration.json, result.json, log.txt, profile/
"""

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opacus_memprof.directory import LOCK, lock
from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments.files import read_json, refuse_damaged, write_json
from opacus_memprof.experiments.process import RESULT
from opacus_memprof.experiments.sweep.grid import VARIED, Cell

FORMAT = 1
MANIFEST = "manifest.json"
RUNS = "runs"

_DONE = ("finished", "out_of_memory")


def run_directory(path: Path, name: str) -> Path:
    """Where the run of a cell leaves everything, in a results directory."""
    return path / RUNS / name


class ResultsDirectory:
    """The directory of `cells` for the length of a `with` block, in which nobody else writes to it.

    Args:
        path: made where it is not there.
        command: "sweep" or "single-gpu", which has written it or will.
        cells: what is to be run; they share all that is not in grid.VARIED.
        grows: other cells may be there already, and stay. Otherwise the directory is of these cells alone.
        resume: results that are there are kept, and not run again. Without it they are run again where the directory
            grows, and refused where it does not.

    Attributes:
        path: absolute.
        names: of all cells that the directory is of, in the order in which they were asked for.

    Raises:
        MemprofError: on entering, when the directory holds anything else, another process writes to it, or it cannot be
            written. What is there has not been changed then.
    """

    def __init__(self, path: Path, command: str, cells: Sequence[Cell], *, grows: bool, resume: bool) -> None:
        self.path = path.absolute()
        self.names = [cell.name for cell in cells]
        self._command, self._cells, self._grows, self._resume = command, cells, grows, resume
        shared = cells[0].configuration.to_json()
        self._shared = {key: value for key, value in shared.items() if key not in VARIED}

    def __enter__(self) -> "ResultsDirectory":
        self._refuse_others()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = lock(self.path)
            try:
                self._refuse_others()  # which another process may have written until now
                self._new = not (self.path / MANIFEST).exists()
                manifest = {"format": FORMAT, "command": self._command, "shared": self._shared, "names": self.names}
                write_json(self.path / MANIFEST, manifest)
            except BaseException:
                self._release()
                raise
        except OSError as error:
            raise MemprofError(
                f"cannot write results to {self.path} ({error.strerror}): choose another --results-dir"
            ) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        refused = kind is not None and issubclass(kind, MemprofError)
        if refused and self._new and not self.any_done():  # then the next call may have other settings
            shutil.rmtree(self.path / RUNS, ignore_errors=True)
            (self.path / MANIFEST).unlink(missing_ok=True)
        self._release()
        if refused:
            with contextlib.suppress(OSError):
                self.path.rmdir()  # where it is empty

    def _release(self) -> None:
        with contextlib.suppress(OSError):
            (self.path / LOCK).unlink()
        os.close(self._lock)

    def run_directory(self, name: str) -> Path:
        return run_directory(self.path, name)

    def missing(self) -> list[Cell]:
        """The cells that are to be run now. A run that failed or was killed is run again."""
        return [cell for cell in self._cells if not (self._resume and self._status(cell.name) in _DONE)]

    def results(self) -> dict[str, dict[str, Any]]:
        """The results that are there, by name, in the order of `names`."""
        return {name: found for name in self.names if (found := self._result(name)) is not None}

    def any_done(self) -> bool:
        """Whether any cell has finished or run out of memory."""
        return any(self._status(name) in _DONE for name in self.names)

    def _result(self, name: str) -> dict[str, Any] | None:
        path = self.run_directory(name) / RESULT
        if not path.exists():
            return None
        result = read_json(path)
        refuse_damaged(path, result)
        return result

    def _status(self, name: str) -> str | None:
        found = self._result(name)
        return None if found is None else found.get("status")

    # --- what is there already ---

    def _refuse_others(self) -> None:
        if not self.path.is_dir() or not any(entry.name != LOCK for entry in self.path.iterdir()):
            return
        there = read_json(self.path / MANIFEST) if (self.path / MANIFEST).is_file() else {}
        if there.get("format", FORMAT) != FORMAT:
            raise MemprofError(
                f"{self.path} holds results of format {there['format']!r}, and this release writes {FORMAT}: "
                "choose another --results-dir"
            )
        if not there.keys() >= {"format", "command", "shared", "names"}:
            raise MemprofError(
                f"{self.path} holds files that are no results, which stay as they are: choose another --results-dir"
            )
        if there["command"] != self._command:
            raise MemprofError(
                f"{self.path} holds results of `opacus-memprof {there['command']}`: choose another --results-dir"
            )
        self._refuse_other_settings(there["shared"])
        if self._grows:
            self.names = list(dict.fromkeys([*there["names"], *self.names]))
        elif there["names"] != self.names:
            raise MemprofError(
                f"{self.path} holds another grid, of {len(there['names'])} configurations: "
                "give the same sizes and ranks as then, or choose another --results-dir"
            )
        elif not self._resume:
            raise MemprofError(f"{self.path} holds results: add --resume to go on, or choose another --results-dir")

    def _refuse_other_settings(self, there: dict[str, Any]) -> None:
        differs = [key for key in self._shared if there.get(key) != self._shared[key]]
        if differs:
            key = differs[0]
            raise MemprofError(
                f"{self.path} holds results with {key} {there.get(key)!r}, and this call has {self._shared[key]!r}: "
                "they cannot be compared, so choose another --results-dir"
            )
