# SPDX-License-Identifier: Apache-2.0
"""A profiling session: the recording allocator, the hooks and the event file, from a start to an end."""

import html
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from opacus_memprof import virtual_gpu
from opacus_memprof.analysis import job_directory
from opacus_memprof.analysis.profile import build_profile, write_profile
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.directory import (
    DEFAULT_DIRECTORY,
    DEFAULT_MAX_EVENTS,
    MOST_EVENTS,
    SNAPSHOTS,
    ProfileDirectory,
    claim,
)
from opacus_memprof.profiles.job_summary import JobSummary
from opacus_memprof.profiles.json_object import to_json
from opacus_memprof.profiles.live_memory import LivePeak, Snapshot
from opacus_memprof.profiles.profile import Peak, Profile
from opacus_memprof.recording import allocators, hook_facts, live, native, run_metadata, snapshots
from opacus_memprof.recording.stream import Stream, Target, make_sinks
from opacus_memprof.session.out_of_memory import Forensics, is_out_of_memory

if TYPE_CHECKING:
    from opacus_memprof.hooks import Attachment

_current: "Session | None" = None


def current() -> "Session | None":
    """The session that is recording in this process, or None."""
    return _current


def tag(name: str) -> native.Tag:
    """Attributes what is allocated inside to the category `name`, the program's own or a built-in one.

    As `with tag("teacher"):` or as a decorator, `@tag("teacher")`. It holds for the calling thread.

    Raises:
        MemprofError: there are more than 64 categories.
    """
    return native.Tag(category=_category_id(name))


def retag(tensors: Any, name: str) -> int:
    """Gives what is allocated already, under these tensors, the category `name`; returns the bytes that this changed.

    `tensors` is one, an iterable of them, or sequences and mappings that nest some. What another tensor shares with
    them changes as well. Raises MemprofError as `tag` does.
    """
    return native.retag(tensors, _category_id(name))


def _category_id(name: str) -> int:
    try:
        return native.category_id(name)
    except (ValueError, IndexError, RuntimeError) as error:
        raise MemprofError(f'no room for the category "{name}": {error}') from error


def profile(
    directory: str | os.PathLike[str] = DEFAULT_DIRECTORY,
    *,
    device: str = "auto",
    max_events: int = DEFAULT_MAX_EVENTS,
    stream: Target | Iterable[Target] | None = None,
    stream_interval: float = 10.0,
) -> "Session":
    """A session for a `with` block: `with opacus_memprof.profile("memprof_profile") as session:`.

    Args:
        directory: where the profile goes; an earlier profile there is replaced. Of several processes that a launcher
            has started each writes into its own directory in it, `rank_0`, `rank_1` …
        device: "auto" (CUDA if there is a GPU, else the CPU), "cuda" or "cpu".
        max_events: the event file's bound, at 32 bytes an event. What finds no room is counted as dropped.
        stream: where live memory by category, device, step and phase goes while the session runs: a file that ends in
            .jsonl or .prom, an address such as "http://127.0.0.1:9464" for Prometheus, or several of these.
        stream_interval: seconds between two readings.

    Raises:
        MemprofError: on entering, when another session is running, the device is unknown or absent, max_events is out
            of range, the directory cannot be written, is in use or holds other files, or the stream cannot be started.
    """
    return Session(directory, device=device, max_events=max_events, stream=stream, stream_interval=stream_interval)


class Session:
    """Records from `start` to `close`, or for the length of a `with` block. One at a time in a process.

    Attributes:
        directory: the profile's directory.
        result: the content of profile.json, once the session has ended.
        device: "cuda" or "cpu", once started.
        warnings: sentences on what this profile cannot know; they end up in profile.json.
        job: the content of ranks.json, after the end, in that process of a distributed job which ended last; else None.
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
        self._attachments: list[Attachment] = []
        self._follows_engines = False
        self._stream_to = stream
        self._stream_interval = stream_interval
        self._stream: Stream | None = None
        self._live_at_end: dict[str, dict[str, int]] | None = None
        self._built: tuple[tuple[int, int], Profile] | None = None  # by events written and dropped until then

    # --- the whole ---

    def start(self) -> None:
        """Starts recording; see `profile` for what is refused."""
        global _current
        if _current is not None:
            raise MemprofError(
                f"a profile is being recorded into {_current.directory} already: one session at a time "
                "(opacus_memprof.session.current() is the running one)"
            )
        if not 1 <= self._max_events <= MOST_EVENTS:
            raise MemprofError(f"max_events must be between 1 and {MOST_EVENTS}, not {self._max_events}")
        self.device = allocators.resolve_device(self.device)
        claimed = self._target if isinstance(self._target, ProfileDirectory) else claim(self._target)
        self._installed_here = not allocators.is_installed(self.device)
        self.warnings += run_metadata.allocator_warnings(self.device)
        try:
            allocators.install(self.device)
            self._start_events(claimed)
        except MemprofError:
            if self._installed_here:
                allocators.uninstall_device(self.device)
            claimed.release()
            raise
        native.reset_peaks()
        hook_facts.clear()
        virtual_gpu.begin_run()
        self._claimed = claimed
        self._pid = os.getpid()
        self.directory = claimed.path
        self._forensics = Forensics(self.directory)
        self._forensics.start()
        _current = self
        if self._stream_to is not None:
            try:
                self._stream = Stream(make_sinks(self._stream_to), self._stream_interval, self._warn)
            except MemprofError:
                self._stop()
                claimed.clear()
                claimed.release()
                raise

    def close(self, status: str = "finished", exit_code: int = 0, error: str | None = None) -> Profile:
        """Stops recording, takes everything out again, writes profile.json and returns its content.

        Args:
            status: "finished", "failed", "out_of_memory" or "killed".
            exit_code: the program's, as a shell would see it.
            error: what ended the program, in a line.

        Raises:
            MemprofError: profile.json could not be written. Everything is stopped and taken out all the same.
        """
        peaks, facts = self._stop()
        try:
            result = build_profile(
                self.directory,
                status=status,
                exit_code=exit_code,
                error=error,
                peaks=peaks,
                warnings=[*self.warnings, *virtual_gpu.describe_limits()],
                facts=facts,
                virtual=virtual_gpu.describe_run(),
            )
            write_profile(result, self.directory)
            self.result = result
        except OSError as error:
            raise MemprofError(f"the profile could not be written to {self.directory}: {error}") from error
        finally:
            self._claimed.release()
            self._forensics.print()
        self._finish_job()
        return result

    def discard(self) -> None:
        """Stops recording and takes everything out again, as `close`, but makes no profile.json of it."""
        try:
            self._stop()
        finally:
            self._claimed.release()

    def __enter__(self) -> "Session":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if os.getpid() != self._pid:
            return  # a forked child that leaves the block; the profile is its parent's
        status, exit_code = outcome(error)
        if error is not None:
            self.explain(error)
        try:
            self.close(status, exit_code, one_line(error))
        except MemprofError as failure:  # the training is done, and its result must not be lost over this
            warnings.warn(str(failure), RuntimeWarning, stacklevel=2)

    # --- what to look at ---

    def attach(self, *objects: Any) -> None:
        """Follows these until the session ends.

        Args:
            objects: a PrivacyEngine (follows whatever make_private will return, of any engine), a model, an
                optimizer, or all that make_private has returned. A criterion or a data loader needs nothing.

        Raises:
            MemprofError: an object of another kind.
        """
        from opacus_memprof.hooks import dispatch  # loads Opacus, which a session that attaches nothing does not need

        for thing in objects:
            attachment = None
            if not dispatch.is_privacy_engine(thing):
                attachment = dispatch.attach(thing)
            elif not self._follows_engines:  # all of them at once
                self._follows_engines = True
                attachment = dispatch.attach_privacy_engine_class()
            if attachment is not None:
                self._attachments.append(attachment)

    def snapshot(self, name: str) -> Snapshot:
        """Counts every live byte by category now, reconciles the sum with what the allocator counts, and appends
        the result to snapshots.jsonl.

        Returns:
            The snapshot: `taken.devices["cuda:0"].categories`, or by keys. Its `remainder` is 0 unless one of the
            session's warnings says why.

        Raises:
            MemprofError: the session is not recording.
        """
        if _current is not self:
            raise MemprofError("a snapshot is of a session that records: take it between its start and its end")
        return self._snapshot(name)

    def breakdown(self) -> dict[str, dict[str, int]]:
        """The bytes that are live now: device → category → bytes, without the categories that have none. It costs
        microseconds. After the end of the session, what was live then.

        Whether what a forward pass has made is an activation or a temporary shows only when it dies; until then
        it is `forward_undecided`.
        """
        return live.read_breakdown() if self._live_at_end is None else self._live_at_end

    def peak(self) -> dict[str, Peak]:
        """The instant of each device's highest requested bytes so far: `session.peak()["cuda:0"].categories`, or by
        keys. It is the `peak` of profile.json, during the session and after its end.

        While the session records, a call reads all events again if there are new ones, which takes some tenths of a
        second for each million: in a loop use `breakdown`, or `profile(stream=...)`, which has the highest bytes too.

        Raises:
            MemprofError: the session has not started, or was discarded.
        """
        if _current is not self and not hasattr(self, "result"):
            raise MemprofError("there is no peak of a session that has not started, or has left no profile")
        return {name: device.peak for name, device in self._so_far().devices.items()}

    def _repr_html_(self) -> str | None:
        """For notebooks: the report of the session, or of the part so far, in a frame of its own."""
        if not hasattr(self, "directory"):
            return None
        from opacus_memprof.reports.html.page import build_html  # only a notebook needs it

        source = html.escape(build_html(self._so_far(), self.directory))
        return f'<iframe srcdoc="{source}" sandbox="allow-scripts" style="width:100%;height:48em;border:0"></iframe>'

    def explain(self, error: BaseException) -> None:
        """Where memory has run out since the last call: writes oom_report.txt, .json and .html, and attaches a note to
        the exception. torch.OutOfMemoryError needs no call; `close` prints the report to stderr."""
        self._forensics.explain(error)

    # --- beginning, end, and what goes wrong ---

    def _start_events(self, claimed: ProfileDirectory) -> None:
        claimed.clear()
        try:
            run = run_metadata.describe_run(self.device, claimed.launch)
            if (gpus := virtual_gpu.describe_gpus()) is not None:
                run["virtual"] = gpus
            native.start_events(str(claimed.path), self._max_events, to_json(run))
        except OSError as error:
            claimed.clear()
            raise MemprofError(f"cannot record events in {claimed.path}: {error}") from error

    def _stop(self) -> tuple[dict[str, LivePeak], list[dict[str, Any]]]:
        """The live counters' peaks, and what the hooks have noticed."""
        global _current
        _current = None
        self._forensics.explain()
        self._forensics.stop()
        try:
            if self._stream is not None:
                self._stream.stop()
            self._last_snapshot()
            self._live_at_end = live.read_breakdown()
            for attachment in reversed(self._attachments):
                attachment.detach()
            events = native.events_status()
            if events["error"] and events["dropped"]:
                self._warn(f"the event file could not grow ({events['error']}): later events are missing")
            return live.read_peaks(), hook_facts.recorded()
        finally:
            native.stop_events()
            native.set_phase(native.phase_id("idle"))  # a forward that failed never said that it was over
            if self._installed_here:
                allocators.uninstall_device(self.device)

    def _so_far(self) -> Profile:
        """The result, or before the end what it would be now."""
        if hasattr(self, "result"):
            return self.result
        events = native.events_status()
        count = events["written"], events["dropped"]
        if self._built is None or self._built[0] != count:
            native.write_meta()
            profile = build_profile(
                self.directory,
                status="running",
                exit_code=None,
                peaks=live.read_peaks(),
                warnings=virtual_gpu.describe_limits(),
                virtual=virtual_gpu.describe_run(),
                dropped=events["dropped"],
            )
            self._built = count, profile
        return self._built[1]

    def _snapshot(self, name: str) -> Snapshot:
        self._look_for_swap()
        taken = snapshots.take(name)
        try:
            with open(self.directory / SNAPSHOTS, "a", encoding="utf-8") as file:
                file.write(to_json(taken))
        except OSError as error:
            self._warn(f"a snapshot could not be written ({error.strerror})")
        return taken

    def _finish_job(self) -> None:
        """What the other ranks have left must not cost this one's result."""
        try:
            self.job = job_directory.write_job_summary(self._claimed)
        except MemprofError as error:
            warnings.warn(f"the ranks' profiles could not be merged ({error})", RuntimeWarning, stacklevel=2)

    def _last_snapshot(self) -> None:
        """So that every profile has been reconciled at least once; a broken device must not cost the profile."""
        try:
            self._snapshot("end")
        except RuntimeError as error:
            self._warn(f"the last snapshot failed ({error})")

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


def outcome(error: BaseException | None) -> tuple[str, int]:
    """A program's status and exit code, from the exception that ended it (None: it came to its end)."""
    code = 1
    if error is None:
        code = 0
    elif isinstance(error, KeyboardInterrupt):
        return "killed", 130
    elif isinstance(error, SystemExit):
        code = 0 if error.code is None else error.code & 0xFF if isinstance(error.code, int) else 1
    if code == 0:
        return "finished", 0
    return "out_of_memory" if is_out_of_memory(error) else "failed", code


def one_line(error: BaseException | None) -> str | None:
    """What went wrong, for people: the exception's kind and its message's first line."""
    if error is None or (isinstance(error, SystemExit) and not isinstance(error.code, str)):
        return None
    message = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
