# SPDX-License-Identifier: Apache-2.0
"""A profiling session: starts and stops the recording allocator, the hooks and the event file."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from opacus_memprof import virtual_gpu
from opacus_memprof.analysis.job import write_job_summary
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.directory import (
    DEFAULT_DIRECTORY,
    DEFAULT_MAX_EVENTS,
    MOST_EVENTS,
    PRIVACY_CHECK,
    SNAPSHOTS,
    ProfileDirectory,
    claim,
)
from opacus_memprof.profiles.job_summary import JobSummary
from opacus_memprof.profiles.json_object import to_json
from opacus_memprof.profiles.live_memory import Snapshot
from opacus_memprof.profiles.privacy_check import write_privacy_checks
from opacus_memprof.profiles.profile import Finding, Peak, Profile
from opacus_memprof.recording import allocators, faults, live, native, observations
from opacus_memprof.recording.attachment import Attachment
from opacus_memprof.recording.faults import contain
from opacus_memprof.recording.stream import Stream, Target, make_sinks
from opacus_memprof.session.out_of_memory import Forensics
from opacus_memprof.session.result import Result, describe_run, one_line, outcome

_current: "Session | None" = None


def _registered_models() -> list[Any]:
    """Returns the records of models that Opacus' own functions have made private, if flash_clip is registered there."""
    functions = sys.modules.get("opacus_memprof.clipping.opacus_functions")
    return [] if functions is None else list(functions.made_private)


def current() -> "Session | None":
    """Returns the session that is recording in this process, or None."""
    session = _current
    if session is None or session._result is None or session._result.pid != os.getpid():  # the parent's, after a fork
        return None
    return session


def profile(
    directory: str | os.PathLike[str] = DEFAULT_DIRECTORY,
    *,
    device: str = "auto",
    max_events: int = DEFAULT_MAX_EVENTS,
    stream: Target | Iterable[Target] | None = None,
    stream_interval: float = 10.0,
) -> "Session":
    """Returns a session for a `with` block: `with opacus_memprof.profile("memprof_profile") as session:`.

    Args:
        directory: the directory of the profile; an earlier profile there is replaced. If a launcher has started several
            processes, each writes into its own subdirectory: `rank_0`, `rank_1` …
        device: "auto" (CUDA if there is a GPU, otherwise the CPU), "cuda" or "cpu".
        max_events: the maximum number of events in the event files, at 32 bytes each. For a longer run they contain the
            beginning, the peak and the end.
        stream: the destination of live memory by category, device, step and phase during the session: a file that ends
            in .jsonl or .prom, an address such as "http://127.0.0.1:9464" for Prometheus, or several of these.
        stream_interval: seconds between two readings.

    Raises:
        MemprofError: raised on entering. Another session is running, the device is unknown or absent, max_events is out
            of range, the directory cannot be written, is in use or holds other files, the stream cannot be started, or
            the process was forked from one that had used opacus_memprof.
    """
    return Session(directory, device=device, max_events=max_events, stream=stream, stream_interval=stream_interval)


class Session:
    """Records from `start` to `close`, or during a `with` block. A process has one running session at a time.

    Attributes:
        directory: the profile's directory.
        result: the content of profile.json, once the session has ended.
        device: "cuda" or "cpu", once started.
        warnings: sentences about the limits of this profile, which are also in profile.json.
        job: the content of ranks.json, after the end of the last process of a distributed job; otherwise None.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | ProfileDirectory,
        *,
        device: str = "auto",
        max_events: int,
        stream: Target | Iterable[Target] | None = None,
        stream_interval: float = 10.0,
    ) -> None:
        self.device = device
        self.directory: Path  # once started
        self.result: Profile  # once closed
        self.warnings: list[str] = []
        self.job: JobSummary | None = None
        self._target = directory
        self._max_events = max_events
        self._stream_to = stream
        self._stream_interval = stream_interval
        self._changes = Attachment("what the session has changed")  # of the process, and of attached objects
        self._claim = Attachment("the claim of the profile's directory")
        self._follows_engines = False
        self._privacy_checks: list[Callable[[], dict[str, Any]]] = []
        self._registered_before: list[Any] = []
        self._forensics: Forensics | None = None
        self._result: Result | None = None  # once started

    # --- begin and end ---

    def start(self) -> None:
        """Starts recording.

        A failure other than MemprofError does not end the program: the profile contains a sentence about it.

        Raises:
            MemprofError: see `profile`.
        """
        global _current
        if (running := current()) is not None:
            raise MemprofError(
                f"a profile is being recorded into {running.directory} already: one session at a time "
                "(opacus_memprof.session.current() is the running one)"
            )
        if not 1 <= self._max_events <= MOST_EVENTS:
            raise MemprofError(f"max_events must be between 1 and {MOST_EVENTS}, not {self._max_events}")
        allocators.refuse_after_fork()
        faults.clear()
        self.device = allocators.resolve_device(self.device)
        self._claimed = self._target if isinstance(self._target, ProfileDirectory) else claim(self._target)
        self._claim.on_detach(self._claimed.release)
        self.directory = self._claimed.path
        self._result = Result(self.directory, self.warnings)
        with contain("finding the private models of earlier trainings"):
            self._registered_before = _registered_models()
        with contain("looking for what torch's allocator cannot count"):
            self.warnings += allocators.allocator_warnings(self.device)
        apply = self._changes.apply
        is_empty = False
        try:
            apply("torch's allocator", self._install_allocator)
            with _directory_errors(self.directory):
                self._claimed.clear()
            is_empty = True
            apply("the event file", self._start_events)
            for reset in (native.reset_peaks, observations.clear, virtual_gpu.begin_run):
                with contain("beginning a recording"):
                    reset()
            apply("torch.OutOfMemoryError", self._start_forensics)
            apply("the stream", self._start_stream)
        except BaseException:
            self._changes.detach()
            if is_empty:  # an earlier profile stays if this session was refused before
                self._claimed.clear()
            self._claim.detach()
            raise
        _current = self

    def close(self, status: str = "finished", exit_code: int = 0, error: str | None = None) -> Profile:
        """Stops recording, undoes all changes, writes profile.json and returns its content.

        Args:
            status: "finished", "failed", "out_of_memory" or "killed".
            exit_code: the program's exit code, as a shell would see it.
            error: the reason why the program ended, in one line.

        Raises:
            MemprofError: profile.json could not be written. Recording is stopped and all changes are undone.
        """
        global _current
        _current = None
        try:  # not in a method of its own: a fault there would keep the session
            with contain("ending the recording"):
                self._keep_figures()
        finally:
            self._changes.detach()
        with contain("writing what was proved of private models"):
            for record in _registered_models():
                if record not in self._registered_before:
                    self.follow_privacy_check(record.to_data)
            write_privacy_checks([check() for check in self._privacy_checks], self.directory / PRIVACY_CHECK)
        try:
            assert self._result is not None  # of a session that was started
            with contain("building the profile"):
                self.result = self._result.write(status, exit_code, error)
                return self.result
            self.result = self._result.write_from_counters(status, exit_code, error)
            return self.result
        finally:
            self._claim.detach()
            with contain("printing the report of a failed allocation"):
                if self._forensics is not None:
                    self._forensics.print()
            with contain("merging the ranks' profiles"):
                self._finish_job()

    def findings(self) -> list[Finding]:
        """Returns the findings of the closed session, with sentences in the current unit (profiles.units.megabytes)."""
        assert self._result is not None  # of a session that was started
        with contain("writing the findings in another unit"):
            return self._result.findings()
        return self.result.findings

    def discard(self) -> None:
        """Stops recording and undoes all changes, as `close` does, but writes no profile.json."""
        global _current
        _current = None
        try:
            with contain("ending the recording"):
                self._keep_figures()
        finally:
            self._changes.detach()
        self._claim.detach()

    def __enter__(self) -> "Session":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._result is None or self._result.pid != os.getpid():
            return  # a forked child leaves the block; the profile belongs to its parent
        status, exit_code, line = ("finished", 0, None) if error is None else ("failed", 1, type(error).__name__)
        with contain("describing how the program has ended"):
            status, exit_code = outcome(error)
            line = one_line(error)
        if error is not None:
            self.explain(error)
        try:
            self.close(status, exit_code, line)
        except MemprofError as failure:  # the training is done, and its result must not be lost because of this
            faults.record(str(failure))

    # --- attached objects and live figures ---

    def attach(self, *objects: Any) -> None:
        """Follows these objects until the session ends.

        Args:
            objects: a PrivacyEngine (follows the results of every engine's make_private), a model, an optimizer, or all
                results of make_private. A criterion or a data loader has no effect.

        Raises:
            MemprofError: an object has another type.
        """
        changes: list[tuple[str, Callable[[Attachment], None]]] = []
        try:
            from opacus_memprof import hooks

            for target in objects:
                if hooks.is_privacy_engine(target):
                    if self._follows_engines:  # all of them at once
                        continue
                    self._follows_engines = True
                changes.append((f"a {type(target).__name__}", hooks.change_for(target)))
        except MemprofError:
            raise
        except Exception as error:
            faults.record_fault("choosing the hooks for what is attached", error)
        for name, change in changes:
            self._changes.apply(name, change)

    def follow_privacy_check(self, check: Callable[[], dict[str, Any]]) -> None:
        """Writes the result of `check`, the content of privacy_check.json, into the directory at the end."""
        if check not in self._privacy_checks:
            self._privacy_checks.append(check)

    def snapshot(self, name: str) -> Snapshot:
        """Counts every live byte by category now, and compares the sum with the allocator's count.

        Appends the result to snapshots.jsonl.

        Returns:
            The snapshot: `taken.devices["cuda:0"].categories`, or by keys. Its `remainder` is 0, unless one of the
            session's warnings explains it.

        Raises:
            MemprofError: the session is not recording.
        """
        if _current is not self or self._result is None or self._result.pid != os.getpid():
            raise MemprofError("a snapshot needs a session that records: take it between its start and its end")
        with contain("taking a snapshot"):
            return self._snapshot(name)
        return Snapshot(name=name, index=-1, unix_ns=time.time_ns(), step=0, logical_step=0, devices={})

    def breakdown(self) -> dict[str, dict[str, int]]:
        """Returns the bytes that are live now, by device and category, without empty categories.

        A call takes microseconds. After the end of the session, it returns the bytes that were live at the end. A
        tensor of a forward pass is known to be an activation or a temporary only when it is freed. Until then it is
        `forward_undecided`.
        """
        if self._result is not None and self._result.live_at_end is not None:
            return self._result.live_at_end
        with contain("reading the live bytes"):
            return live.read_breakdown()
        return {}

    def peak(self) -> dict[str, Peak]:
        """Returns the peak of each device so far: the instant of its highest requested bytes.

        Use it as `session.peak()["cuda:0"].categories`, or by keys. It equals `peak` in profile.json, during the
        session and after its end.

        While the session records, a call reads all events again if there are new ones. This takes some tenths of a
        second for each million events. In a loop use `breakdown`, or `profile(stream=...)`, which includes the highest
        bytes too.

        Raises:
            MemprofError: the session has not started, or was discarded.
        """
        if self._result is None or (_current is not self and self._result.profile is None):
            raise MemprofError("a session that has not started, or has left no profile, has no peak")
        return {name: device.peak for name, device in self._result.so_far().devices.items()}

    def _repr_html_(self) -> str | None:
        """Returns the report of the session so far, in a separate frame, for notebooks."""
        if self._result is None:
            return None
        from opacus_memprof.analysis.profile_view import view_profile  # only a notebook needs it
        from opacus_memprof.reports.html.report_page import framed

        return framed(view_profile(self._result.so_far(), self.directory))

    def explain(self, error: BaseException) -> None:
        """Writes oom_report.* if memory ran out since the last call, with a note on `error`. `close` prints it."""
        with contain("explaining a failed allocation"):
            if self._forensics is not None:
                self._forensics.explain(error)

    # --- begin, end, and failures ---

    def _install_allocator(self, changes: Attachment) -> None:
        if not allocators.is_installed(self.device):
            changes.on_detach(lambda: allocators.uninstall_device(self.device))
        allocators.install(self.device)

    def _start_events(self, changes: Attachment) -> None:
        run: dict[str, Any] = {}
        with contain("describing the run"):
            run.update(describe_run(self.device, self._claimed.launch))
            if (gpus := virtual_gpu.describe_gpus()) is not None:
                run["virtual"] = gpus
        with contain("telling the program's own code apart"):
            allocators.tell_program()
        changes.on_detach(native.stop_events)
        changes.on_detach(lambda: native.set_phase(native.phase_id("idle")))  # a forward that failed has left its phase
        with _directory_errors(self.directory):
            native.start_events(str(self.directory), self._max_events, to_json(run))

    def _start_forensics(self, changes: Attachment) -> None:
        self._forensics = Forensics(self.directory)
        self._forensics.patch(changes)

    def _start_stream(self, changes: Attachment) -> None:
        if self._stream_to is not None:
            changes.on_detach(Stream(make_sinks(self._stream_to), self._stream_interval, self._warn).stop)

    def _keep_figures(self) -> None:
        """Keeps the figures that are lost with the recording, and takes the last snapshot, which every profile has."""
        with contain("explaining a failed allocation"):
            if self._forensics is not None:
                self._forensics.explain()
        if (hooks := sys.modules.get("opacus_memprof.hooks")) is not None:  # which only attaching imports
            hooks.search_owners()
        with contain("taking the last snapshot"):
            self._snapshot("end")
        if self._result is not None:
            self._result.read_figures()

    def _snapshot(self, name: str) -> Snapshot:
        self._look_for_swap()
        snapshot = live.take_snapshot(name)
        try:
            with open(self.directory / SNAPSHOTS, "a", encoding="utf-8") as file:
                file.write(to_json(snapshot))
        except OSError as error:
            self._warn(f"a snapshot could not be written ({error.strerror})")
        return snapshot

    def _finish_job(self) -> None:
        """Writes the job's summary, if possible. Damaged files of other ranks must not lose this rank's result."""
        try:
            self.job = write_job_summary(self._claimed)
        except MemprofError as error:
            faults.record(f"the ranks' profiles could not be merged ({error})")

    def _look_for_swap(self) -> None:
        if not allocators.is_installed(self.device):
            name = native.cuda_current_name() if self.device == "cuda" else "another one"
            self._warn(
                f"the {self.device} allocator was replaced by {name} during the run: what it has handed out since is "
                "missing here, so start the profile after the replacement"
            )

    def _warn(self, sentence: str) -> None:
        if sentence not in self.warnings:
            self.warnings.append(sentence)


@contextlib.contextmanager
def _directory_errors(directory: Path) -> Iterator[None]:
    """Converts OSError to MemprofError, because the user can choose another directory."""
    try:
        yield
    except OSError as error:
        raise MemprofError(f"cannot record events in {directory}: {error}") from error
