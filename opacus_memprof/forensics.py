# SPDX-License-Identifier: Apache-2.0
"""Explains out-of-memory errors of one session: oom_report.json, .txt and .html in its directory, and a note on the
exception, whose type and message stay torch's.

torch makes its OutOfMemoryError when the failure has left C++ and before any handler of the program runs. While a
session records, that is when the report is written and the note attached, so that both are there for a program that
handles the exception itself. Failures of CPU allocations are plain RuntimeErrors: their report is written when the
exception passes the session, or at its end.
"""

import contextlib
import io
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from opacus_memprof import _native, core, observations, virtual_gpu, workload
from opacus_memprof.analysis.oom import build_report
from opacus_memprof.directory import OOM_REPORTS
from opacus_memprof.files import write_text
from opacus_memprof.reports.html.oom import oom_page
from opacus_memprof.reports.oom_text import note, print_oom

_ROWS = 16384  # of the timeline: fine enough to see what a forward pass has saved at its end


class Forensics:
    """Of one session, from `start` to `stop`.

    Attributes:
        report: of the latest failure that was explained; None while there was none.
    """

    def __init__(self, directory: Path) -> None:
        self.report: dict[str, Any] | None = None
        self._directory = directory
        self._explained = 0  # failures
        self._pid = os.getpid()
        self._running = False
        self._printed = False

    def start(self) -> None:
        self._inherited = "__init__" not in vars(torch.OutOfMemoryError)
        self._before = before = torch.OutOfMemoryError.__init__

        def explained(error: BaseException, *args: Any, **kwargs: Any) -> None:
            before(error, *args, **kwargs)
            self.explain(error)

        self._ours = explained
        torch.OutOfMemoryError.__init__ = explained  # type: ignore[method-assign, assignment]

    def stop(self) -> None:
        """Puts torch's class back as it was."""
        if vars(torch.OutOfMemoryError).get("__init__") is not self._ours:
            return  # somebody patched on top, and their patch needs ours
        if self._inherited:
            del torch.OutOfMemoryError.__init__
        else:
            torch.OutOfMemoryError.__init__ = self._before  # type: ignore[method-assign]

    def explain(self, error: BaseException | None = None) -> None:
        """Writes the reports of what has failed since the last call, and attaches the note to `error` if memory having
        run out led to it. Harmless where nothing has failed. Never raises: the program's own error is what matters."""
        if self._running or os.getpid() != self._pid:
            return
        self._running = True
        try:
            failed = _native.failures()
            explained = error if is_out_of_memory(error) else None
            if explained is None:
                # What reached no handler on a GPU was torch's own trial, as cuDNN's of its workspaces.
                failed = [one for one in failed if one["device"] == "cpu"]
            if failed and failed[-1]["number"] >= self._explained:
                self._explained = failed[-1]["number"] + 1
                self.report = self._build(failed)
                self._write(self.report)
                if explained is not None:
                    _attach(explained, note(self.report, str(self._directory / OOM_REPORTS[0])))
        except Exception as trouble:
            warnings.warn(f"the failure could not be explained ({trouble!r})", RuntimeWarning, stacklevel=2)
        finally:
            self._running = False

    def print(self) -> None:
        """The report, to the process' stderr, once."""
        if self.report is None or self._printed:
            return
        self._printed = True
        with contextlib.suppress(OSError, ValueError):  # it may be closed
            print_oom(self.report, Console(file=sys.__stderr__))

    def _build(self, failed: list[dict[str, Any]]) -> dict[str, Any]:
        try:
            replayed = core.replay(str(self._directory), _ROWS)
        except RuntimeError:  # no event file that can be read: what the failure itself tells remains
            replayed = None
        piled_up = any(fact["kind"] == "captures" for fact in observations.noted())
        captures = observations.captures() if piled_up else None
        device = failed[-1]["device"]
        if device != "cpu":
            workload.current().processors = torch.cuda.get_device_properties(device).multi_processor_count
        report = build_report(failed, workload.current(), captures, replayed, _native.names())
        gpus = virtual_gpu.describe_run()
        return report if gpus is None else {**report, "virtual": gpus}

    def _write(self, report: dict[str, Any]) -> None:
        text = io.StringIO()
        print_oom(report, Console(file=text, width=100))
        contents = (text.getvalue(), json.dumps(report, indent=1) + "\n", oom_page(report))
        for name, content in zip(OOM_REPORTS, contents, strict=True):
            write_text(self._directory / name, content)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether this exception, or one that led to it, says that memory ran out."""
    chain, seen = [error], set[int]()
    while chain:
        link = chain.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        if isinstance(link, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator: " in str(link):
            return True
        chain += [link.__cause__, link.__context__]
    return False


def _attach(error: BaseException, text: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:  # python 3.10 has the attribute's name by convention, and prints no notes
        error.__notes__ = [*getattr(error, "__notes__", []), text]  # type: ignore[attr-defined]
