# SPDX-License-Identifier: Apache-2.0
"""A profiling session: the recording allocator, the hooks and the event file, from a start to an end."""

import html
import json
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from opacus_memprof import _native, adaptors, conditions, observations, snapshots, virtual_gpu
from opacus_memprof.analysis import ranks
from opacus_memprof.analysis.profile import build_profile, write_profile
from opacus_memprof.directory import (
    DEFAULT_DIRECTORY,
    DEFAULT_MAX_EVENTS,
    MOST_EVENTS,
    SNAPSHOTS,
    ProfileDirectory,
    claim,
)
from opacus_memprof.errors import MemprofError
from opacus_memprof.forensics import Forensics, is_out_of_memory
from opacus_memprof.stream import Stream, Target, sinks_of

if TYPE_CHECKING:
    from opacus_memprof.hooks import Attachment

_current: "Session | None" = None


def current() -> "Session | None":
    """The session that is recording in this process, or None."""
    return _current


def tag(name: str) -> _native.Tag:
    """Attributes what is allocated inside to the category `name`, the program's own or a built-in one.

    As `with tag("teacher"):` or as a decorator, `@tag("teacher")`. It holds for the calling thread.

    Raises:
        MemprofError: there are more than 64 categories.
    """
    return _native.Tag(category=_category_id(name))


def retag(tensors: Any, name: str) -> int:
    """Gives what is allocated already, under these tensors, the category `name`; returns the bytes that this changed.

    `tensors` is one, an iterable of them, or sequences and mappings that nest some. What another tensor shares with
    them changes as well. Raises MemprofError as `tag` does.
    """
    return _native.retag(tensors, _category_id(name))


def _category_id(name: str) -> int:
    try:
        return _native.category_id(name)
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
        self.result: dict[str, Any]  # once closed
        self.warnings: list[str] = []
        self.job: dict[str, Any] | None = None
        self._target = directory
        self._max_events = max_events
        self._attachments: list[Attachment] = []
        self._follows_engines = False
        self._stream_to = stream
        self._stream_interval = stream_interval
        self._stream: Stream | None = None

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
        self.device = adaptors.resolve_device(self.device)
        claimed = self._target if isinstance(self._target, ProfileDirectory) else claim(self._target)
        self._installed_here = not adaptors.installed(self.device)
        self.warnings += conditions.allocator_warnings(self.device)
        try:
            adaptors.install(self.device)
            self._start_events(claimed)
        except MemprofError:
            if self._installed_here:
                adaptors.remove(self.device)
            claimed.release()
            raise
        _native.reset_peaks()
        observations.clear()
        virtual_gpu.begin_run()
        self._claimed = claimed
        self._pid = os.getpid()
        self.directory = claimed.path
        self._forensics = Forensics(self.directory)
        self._forensics.start()
        _current = self
        if self._stream_to is not None:
            try:
                self._stream = Stream(sinks_of(self._stream_to), self._stream_interval, self._warn)
            except MemprofError:
                self._stop()
                claimed.clear()
                claimed.release()
                raise

    def close(self, status: str = "finished", exit_code: int = 0, error: str | None = None) -> dict[str, Any]:
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
        from opacus_memprof import attaching  # loads Opacus, which a session that attaches nothing does not need

        for thing in objects:
            attachment = None
            if not attaching.is_engine(thing):
                attachment = attaching.attach(thing)
            elif not self._follows_engines:  # all of them at once
                self._follows_engines = True
                attachment = attaching.attach_engines()
            if attachment is not None:
                self._attachments.append(attachment)

    def snapshot(self, name: str) -> dict[str, Any]:
        """Counts every live byte by category now, reconciles the sum with what the allocator counts, and appends
        the result to snapshots.jsonl.

        Returns:
            {"index", "name", "unix_ns", "step", "logical_step", "devices": {"cuda:0": {"requested_bytes",
            "categories": {name: bytes}, "rounding", "cached", "outside_pytorch", "remainder", ...}}}; bytes each,
            None where nobody counts. `remainder` is 0 unless a warning says why.
        """
        self._look_for_swap()
        taken = snapshots.take(name)
        try:
            with open(self.directory / SNAPSHOTS, "a", encoding="utf-8") as file:
                file.write(json.dumps(taken) + "\n")
        except OSError as error:
            self._warn(f"a snapshot could not be written ({error.strerror})")
        return taken

    def breakdown(self) -> dict[str, dict[str, int]]:
        """The bytes that are live now: device → category → bytes, without the categories that have none.

        Whether what a forward pass has made is an activation or a temporary shows only when it dies; until then
        it is `forward_undecided`.
        """
        return snapshots.breakdown()

    def peak(self) -> dict[str, dict[str, Any]]:
        """The instant of each device's highest requested bytes so far, as in profile.json: "requested_bytes",
        "step", "phase", "categories" and, from the event file, "modules" and more."""
        status = _native.events_status()
        if not status["recording"] or status["dropped"]:
            return _native.peaks()
        return {device: found["peak"] for device, found in self._so_far()["devices"].items()}

    def _repr_html_(self) -> str | None:
        """For notebooks: the report of the session, or of the part so far, in a frame of its own."""
        if not hasattr(self, "directory"):
            return None
        from opacus_memprof.reports.html.page import html_of  # only a notebook needs it

        so_far = self.result if hasattr(self, "result") else self._so_far()
        source = html.escape(html_of(so_far, self.directory))
        return f'<iframe srcdoc="{source}" sandbox="allow-scripts" style="width:100%;height:48em;border:0"></iframe>'

    def explain(self, error: BaseException) -> None:
        """Where memory has run out since the last call: writes oom_report.txt, .json and .html, and attaches a note to
        the exception. torch.OutOfMemoryError needs no call; `close` prints the report to stderr."""
        self._forensics.explain(error)

    # --- beginning, end, and what goes wrong ---

    def _start_events(self, claimed: ProfileDirectory) -> None:
        claimed.clear()
        try:
            _native.start_events(
                str(claimed.path), self._max_events, json.dumps(conditions.describe_run(self.device, claimed.launch))
            )
        except OSError as error:
            claimed.clear()
            raise MemprofError(f"cannot record events in {claimed.path}: {error}") from error

    def _stop(self) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
        """The live counters' peaks, and what the hooks have noticed."""
        global _current
        _current = None
        self._forensics.explain()
        self._forensics.stop()
        try:
            if self._stream is not None:
                self._stream.stop()
            self._last_snapshot()
            for attachment in reversed(self._attachments):
                attachment.detach()
            events = _native.events_status()
            if events["error"] and events["dropped"]:
                self._warn(f"the event file could not grow ({events['error']}): later events are missing")
            return _native.peaks(), observations.noted()
        finally:
            _native.stop_events()
            _native.set_phase(_native.phase_id("idle"))  # a forward that failed never said that it was over
            if self._installed_here:
                adaptors.remove(self.device)

    def _so_far(self) -> dict[str, Any]:
        _native.write_meta()
        return build_profile(
            self.directory,
            status="running",
            exit_code=None,
            peaks=_native.peaks(),
            warnings=virtual_gpu.describe_limits(),
            virtual=virtual_gpu.describe_run(),
        )

    def _finish_job(self) -> None:
        """What the other ranks have left must not cost this one's result."""
        try:
            self.job = ranks.finish(self._claimed)
        except MemprofError as error:
            warnings.warn(f"the ranks' profiles could not be merged ({error})", RuntimeWarning, stacklevel=2)

    def _last_snapshot(self) -> None:
        """So that every profile has been reconciled at least once; a broken device must not cost the profile."""
        try:
            self.snapshot("end")
        except RuntimeError as error:
            self._warn(f"the last snapshot failed ({error})")

    def _look_for_swap(self) -> None:
        if not adaptors.installed(self.device):
            name = _native.cuda_current_name() if self.device == "cuda" else "another one"
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
