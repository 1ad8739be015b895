# SPDX-License-Identifier: Apache-2.0
"""Explains out-of-memory errors of a session.

Writes oom_report.json, .txt and .html into its directory, and adds a note to the exception, whose type and message do
not change.

torch constructs its OutOfMemoryError when the error leaves C++, before any handler of the program runs. While a session
is recording, the report is written and the note added at that moment. Both therefore exist for a program that handles
the exception itself. Errors of CPU allocations are plain RuntimeErrors: their report is written when the exception
reaches the session, or at its end.
"""

import contextlib
import io
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from msgspec import UNSET
from rich.console import Console

from opacus_memprof import virtual_gpu
from opacus_memprof.analysis.oom import build_report
from opacus_memprof.profiles import core
from opacus_memprof.profiles.directory import OOM_REPORTS
from opacus_memprof.profiles.files import write_text
from opacus_memprof.profiles.json_object import to_json
from opacus_memprof.profiles.oom_report import OomReport
from opacus_memprof.profiles.plan import add_trials
from opacus_memprof.profiles.profile import NameLists
from opacus_memprof.recording import faults, native, observations
from opacus_memprof.recording.attachment import Attachment
from opacus_memprof.recording.faults import CallHook, observe
from opacus_memprof.reports.oom import build_oom_page, exception_note, print_oom
from opacus_memprof.reports.summary import print_failure
from opacus_memprof.virtual_gpu.devices import GPUS

_TIMELINE_POINTS = 16384  # enough to show what a forward pass has saved at its end


class Forensics:
    """Explains the failed allocations of a session.

    Attributes:
        report: the report of the latest explained failure, or None.
    """

    def __init__(self, directory: Path) -> None:
        self.report: OomReport | None = None
        self._directory = directory
        self._explained = 0  # number of failures
        self._pid = os.getpid()
        self._is_explaining = False
        self._printed = False

    def patch(self, attachment: Attachment) -> None:
        """Makes torch.OutOfMemoryError explain itself when it is constructed, until `attachment` is detached."""
        error_class: Any = torch.OutOfMemoryError
        is_inherited = "__init__" not in vars(error_class)
        original = error_class.__init__

        def observation(error: BaseException, *args: Any, **kwargs: Any) -> CallHook:
            yield
            self.explain(error)

        init_and_explain = observe(original, observation)

        def restore() -> None:
            if vars(error_class).get("__init__") is not init_and_explain:
                return  # another patch has wrapped ours and still calls it
            if is_inherited:
                del error_class.__init__
            else:
                error_class.__init__ = original

        attachment.on_detach(restore)
        error_class.__init__ = init_and_explain

    def explain(self, error: BaseException | None = None) -> None:
        """Writes a report of the allocations that have failed since the last call, if any.

        Also adds a note to `error` if it is an out-of-memory error or was caused by one. Never raises, so that the
        program's own error is not hidden.
        """
        if self._is_explaining or os.getpid() != self._pid:
            return
        self._is_explaining = True
        try:
            if error is not None:
                _explain_error_of_opacus(error)
            failed = native.failures()
            explained = error if is_out_of_memory(error) else None
            if explained is None:
                # Without an exception, failures on a GPU are trials of torch, such as for cuDNN's workspaces.
                failed = [failure for failure in failed if failure["device"] == "cpu"]
            if failed and failed[-1]["number"] >= self._explained:
                self._explained = failed[-1]["number"] + 1
                self.report = self._build(failed)
                self._write(self.report)
                if explained is not None:
                    _attach(explained, exception_note(self.report, str(self._directory / OOM_REPORTS[0])))
        except Exception as trouble:
            faults.record(f"the failed allocation could not be explained ({faults.describe(trouble)})")
        finally:
            self._is_explaining = False

    def print(self) -> None:
        """Prints the report to the process' stderr, once."""
        if self.report is None or self._printed:
            return
        self._printed = True
        with contextlib.suppress(OSError, ValueError):  # it may be closed
            print_failure(self.report, Console(file=sys.__stderr__))

    def _build(self, failed: list[dict[str, Any]]) -> OomReport:
        with contextlib.suppress(OSError):  # the disk is full as well
            native.write_meta()
        try:
            replayed = core.replay(str(self._directory), _TIMELINE_POINTS)
        except RuntimeError:  # the event file cannot be read: the report uses the data of the failure itself
            replayed = None
        piled_up = any(each["kind"] == "captures" for each in observations.recorded())
        captures = observations.captures() if piled_up else None
        device = failed[-1]["device"]
        if device != "cpu":
            observations.record_gpu(device)
        diagnosis = sys.modules.get("opacus_memprof.hooks.diagnosis")
        if diagnosis is not None:
            from opacus_memprof.hooks import forward_shapes, inputs

            diagnosis.observe_program(observations.layer_shapes())
            inputs.observe_what_comes(observations.layer_shapes(), forward_shapes.watched_model())
        virtual = virtual_gpu.describe_run()
        report = build_report(
            failed, observations.layer_shapes(), captures, replayed, NameLists(**native.names()), virtual or UNSET
        )
        report.plan = _plan_command(device) or UNSET
        add_trials(report)
        return report

    def _write(self, report: OomReport) -> None:
        text = io.StringIO()
        print_oom(report, Console(file=text, width=100))
        contents = (text.getvalue(), to_json(report, indent=1), build_oom_page(report))
        for name, content in zip(OOM_REPORTS, contents, strict=True):
            write_text(self._directory / name, content)


def _plan_command(device: str) -> str:
    """Returns the command that plans this program on a virtual GPU like this one; "" if it has no file, or no GPU."""
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    name = "" if spec is None else spec.name.removesuffix(".__main__")
    if device == "cpu" or file is None or name.startswith(("opacus_memprof", "pytest")):
        return ""
    properties = torch.cuda.get_device_properties(device)
    memory = properties.total_memory
    kinds = [kind for kind, gpu in GPUS.items() if gpu.name == properties.name]
    running = virtual_gpu.active()
    kind = running.kind if running is not None else (kinds or ["h100"])[0]
    command = ["opacus-memprof", "plan", "--gpu", kind]
    if abs(memory - GPUS[kind].total_memory) > 0.01 * GPUS[kind].total_memory:  # it differs between drivers
        command += ["--memory", f"{memory // 2**20}MiB"]
    target = ["-m", name] if name else [os.path.relpath(file) if Path(file).is_relative_to(Path.cwd()) else file]
    return shlex.join([*command, *target, *sys.argv[1:]])


def is_out_of_memory(error: BaseException | None) -> bool:
    """Returns whether this exception, or one of its causes, is an out-of-memory error."""
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


def _explain_error_of_opacus(error: BaseException) -> None:
    """Records what led to an error of Opacus, for the profile's findings. Nothing if Opacus was not used."""
    diagnosis = sys.modules.get("opacus_memprof.hooks.diagnosis")
    if diagnosis is not None:
        diagnosis.explain(error)


def _attach(error: BaseException, text: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:  # Python 3.10 does not print notes, but tools read this attribute
        error.__notes__ = [*getattr(error, "__notes__", []), text]  # type: ignore[attr-defined]
