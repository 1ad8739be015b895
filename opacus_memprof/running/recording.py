# SPDX-License-Identifier: Apache-2.0
"""Records a program that runs in this process, from its import of torch until the process ends.

The end of the program does not change: its exit code, its traceback, its exit handlers and the signal that ends it.
"""

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from rich.console import Console

from opacus_memprof.errors import MemprofError
from opacus_memprof.language import tr_sentence
from opacus_memprof.profiles.directory import RANK_DIRECTORY, ProfileDirectory, copy_rank, rank_directories
from opacus_memprof.profiles.launch import Launch
from opacus_memprof.profiles.profile import Profile
from opacus_memprof.recording.startup import AfterImport
from opacus_memprof.running.program import (
    Program,
    before_init_process_group,
    print_exception,
    record_started_ranks,
    variables,
)

if TYPE_CHECKING:
    from opacus_memprof.session import Session

T = TypeVar("T")


class ProgramRecording:
    """The recording of a program.

    Args:
        directory: the directory of the profile.
        device: "auto", "cuda" or "cpu".
        max_events: see `opacus_memprof.profile`.
        address: where fsspec copies the profile of each rank at the end, if given.
        improves: whether the profile names changes that lower the peak; these are computed from another forward pass,
            without memory, of the program's model.
    """

    def __init__(
        self,
        directory: ProfileDirectory,
        device: str,
        max_events: int,
        address: str | None = None,
        *,
        improves: bool = True,
    ) -> None:
        self._directory = directory
        self._device = device
        self._max_events = max_events
        self._address = address
        self._improves = improves
        self._session: Session | None = None
        self._torch_imported = False
        self._start_error: MemprofError | None = None  # why the session could not start
        self._error: BaseException | None = None  # the exception that ended the program
        self._signal: int | None = None  # the signal that must end the process
        self._finished = False
        self._sigterm_handled = threading.Event()
        self._pid = os.getpid()

    def record(self, program: Program) -> None:
        """Runs and records the program.

        Raises:
            SystemExit: the program exits with another code than 0, or has raised.
            MemprofError: recording could not start; the program has ended at its import of torch.
        """
        atexit.register(self._finish)  # registered before the program's own exit handlers, so it runs after them
        AfterImport("torch", self._on_torch_import)
        AfterImport("opacus", self._on_opacus_import)
        self._intercept_exits()
        if self._directory.launch is None:
            record_started_ranks(self._directory.path, self._device, self._max_events)
        try:
            program.run()
            self._look_back()
        except SystemExit as error:
            self._error = error
            self._look_back()
            raise
        except BaseException as error:
            if self._start_error is not None:
                start_error, self._start_error = self._start_error, None
                raise start_error from None
            if self._session is None and isinstance(error, MemprofError):  # such as a virtual GPU that cannot start
                self._finished = True
                self._directory.release()
                raise
            self._error = error
            if self._session is not None:
                self._session.explain(error)
            if isinstance(error, KeyboardInterrupt):
                self._signal = signal.SIGINT
            print_exception(error)
            sys.exit(1)

    def record_rank(self) -> None:
        """Records this process, whose program runs already, from now on until it ends.

        Raises:
            MemprofError: recording could not start.
        """
        atexit.register(self._finish)
        self._on_torch_import()
        AfterImport("opacus", self._on_opacus_import)
        self._intercept_exits()

    def note_error(self, error: BaseException) -> None:
        """Takes note of the exception that ends the program of `record_rank`."""
        self._error = error
        if self._session is not None and not isinstance(error, SystemExit):
            self._session.explain(error)

    def _look_back(self) -> None:
        """Repeats the model's forward pass while it can be: fake tensors cannot be used when Python exits."""
        if self._session is not None and self._improves:
            from opacus_memprof.recording import observations
            from opacus_memprof.recording.faults import contain

            with contain("repeating the forward pass"):
                observations.layer_shapes().whole_forward()

    # --- begin of the recording ---

    def _on_torch_import(self) -> None:
        self._torch_imported = True
        try:
            from opacus_memprof.session import Session

            session = Session(self._directory, device=self._device, max_events=self._max_events)
            session.start()
        except (MemprofError, ImportError) as error:
            # Kept, because a program may catch an ImportError of torch and continue, but must not continue without
            # recording.
            self._start_error = MemprofError(str(error))
            raise self._start_error from None
        except Exception as error:  # a fault of the profiler, which must not end the program
            _print_note(f"recording could not start ({type(error).__name__}: {error}): the program runs without it")
            return
        self._session = session
        from opacus_memprof.recording.faults import contain

        with contain("looking for models that train without Opacus"):
            from opacus_memprof.running.plain_models import FollowWithoutEngine

            FollowWithoutEngine(session)

    def _on_opacus_import(self) -> None:
        if self._session is None:
            return
        from opacus_memprof.recording.faults import contain

        with contain("following Opacus"):
            import opacus

            self._session.attach(opacus.PrivacyEngine)

    def _intercept_exits(self) -> None:
        """Finishes the recording also on SIGTERM and in os._exit, which skip exit handlers."""
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_sigterm)
            BackgroundSignalHandler(signal.SIGTERM, self._sigterm_handled, self._on_unhandled_sigterm)
            os.register_at_fork(after_in_child=self._reset_sigterm_in_child)
        original_exit = os._exit

        def finish_and_exit(status: int) -> NoReturn:
            if status:
                self._error = SystemExit(status)
            try:
                self._finish()
            finally:
                original_exit(status)

        os._exit = finish_and_exit

    def _reset_sigterm_in_child(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    # --- the end of the recording ---

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        if signal.getsignal(signum) != self._on_sigterm:
            return  # the program's own handler has called this one, and decides whether the process ends
        self._sigterm_handled.set()
        self._signal = signum
        self._finish()

    def _on_unhandled_sigterm(self) -> None:
        """Finishes in another thread, because the main thread does not return from a library call."""
        is_ours = signal.getsignal(signal.SIGTERM) == self._on_sigterm  # the program's own handler takes its time
        if is_ours and not self._finished:  # otherwise the main thread is finishing already
            self._signal = signal.SIGTERM
            self._finish()

    def _finish(self) -> None:
        """Closes the session and prints the summary, once; then ends the process by the signal, if there was one."""
        if os.getpid() != self._pid:
            return  # a forked child
        try:
            if not self._finished:
                self._finished = True
                self._close()
        finally:
            if self._signal is not None:
                end_by_signal(self._signal)

    def _close(self) -> None:
        if self._session is None:
            self._directory.release()
            if not self._torch_imported:
                _print_note("the program did not import torch: there is nothing to profile")
            elif self._start_error is not None:
                _print_note(str(self._start_error))
            return
        from opacus_memprof.analysis.job import has_started_ranks
        from opacus_memprof.recording import observations
        from opacus_memprof.session import one_line, outcome

        if self._directory.launch is None and has_started_ranks(self._directory):
            return self._leave_to_ranks(self._session)
        if not observations.layer_shapes().modules:
            raised = any(each["kind"] == "make_private_raised" for each in observations.recorded())
            status, _ = outcome(self._error)
            self._session.warnings.append(
                "PrivacyEngine.make_private failed: nothing is attributed to Opacus or to modules"
                if raised
                else "the program failed before its first training step: nothing is attributed to modules"
                if status == "failed"
                else "an optimizer updates tensors that are in no module: these, their gradients and the optimizer's "
                "states are attributed, and what is computed from them is not"
                if observations.layer_shapes().optimizer
                else "no PrivacyEngine.make_private was seen, and no training of a model without it: nothing is "
                "attributed to Opacus or to modules (a model can be passed to "
                "opacus_memprof.session.current().attach)"
            )
        status, exit_code = outcome(self._error)
        if self._signal is not None:
            status, exit_code = "killed", 128 + self._signal
        try:
            profile = self._session.close(status, exit_code, one_line(self._error))
        except MemprofError as error:
            _print_note(str(error))
        else:
            self._print_result(self._session, profile)
            self._copy(self._session.directory)

    def _leave_to_ranks(self, session: "Session") -> None:
        """Prints the summary of the ranks that this process has started, and leaves no profile of its own."""
        from opacus_memprof.analysis.job import write_summary_of_started_ranks
        from opacus_memprof.analysis.job_view import view_job
        from opacus_memprof.reports.summary import print_summary

        session.discard()
        self._directory.remove_files()
        try:
            view = view_job(write_summary_of_started_ranks(session.directory), session.directory)
        except MemprofError as error:
            return _print_note(str(error))
        _print_summary(print_summary, view)
        _print_note(f"the profiles of all ranks are in {session.directory}")
        for rank in rank_directories(session.directory).values():
            self._copy(rank)

    def _copy(self, profile: Path) -> None:
        """Copies the profile of a rank to the address of `run --gather`. Without success it stays where it is."""
        if self._address is None:
            return
        if not RANK_DIRECTORY.fullmatch(profile.name):
            return _print_note(f"one process has no ranks: nothing was copied to {self._address}")
        try:
            copy_rank(profile, self._address)
        except MemprofError as error:
            _print_note(f"{error}, and copy it by `opacus-memprof merge {profile.parent} -o {self._address}`")
        else:
            if profile.name == "rank_0":
                _print_note(f"ranks are copied to {self._address}: `opacus-memprof merge {self._address}` shows all")

    def _print_result(self, session: "Session", profile: Profile) -> None:
        """Prints the summary. With several ranks, the last one to end prints the summary of all."""
        from opacus_memprof.analysis.job_view import view_job
        from opacus_memprof.analysis.profile_view import view_profile  # not before the program itself is imported
        from opacus_memprof.reports.summary import print_summary

        launch = self._directory.launch
        if launch is None or launch.played == [launch.rank]:
            show = partial(print_summary, has_shown_failure=True)  # by the session's end
            _print_summary(show, view_profile(profile, session.directory))
            if launch is None:
                _print_note(f"the profile is in {session.directory}")
            else:
                _print_note(f"the profile of rank {launch.rank} of {launch.world_size} is in {session.directory}")
        elif session.job is not None:
            _print_summary(print_summary, view_job(session.job, session.directory.parent))
            _print_note(f"the profiles of all ranks are in {session.directory.parent}")
        elif profile.status != "finished":
            _print_note(
                f"rank {launch.rank} ended early ({profile.status.replace('_', ' ')}), its profile is in "
                f"{session.directory}: `opacus-memprof report {session.directory.parent}` shows all ranks"
            )


def _print_summary(render: Callable[[T, Console], None], view: T) -> None:
    """Prints to the original stdout. The program may have replaced or closed sys.stdout, or its pipe may be broken."""
    stdout = sys.__stdout__
    console = Console(file=stdout)
    with console.capture() as summary:  # written below, because rich would exit the process at a broken pipe
        render(view, console)
    try:
        sys.stdout.flush()
        if stdout is not None:
            stdout.write(summary.get())
            stdout.flush()
    except BrokenPipeError:  # Python flushes stdout again at exit, which must not change the exit code
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except (OSError, ValueError) as error:
        _print_note(f"the summary could not be printed ({error})")


def _print_note(sentence: str) -> None:
    print(f"opacus-memprof: {tr_sentence(sentence, least_words=2)}", file=sys.__stderr__)


GRACE_SECONDS = 5.0  # torchrun sends SIGKILL 30 s after SIGTERM


class BackgroundSignalHandler:
    """Calls `callback` in another thread if `signum` arrives and `handled` is not set within GRACE_SECONDS.

    Must be constructed in the main thread. Does nothing if the program sets a wakeup descriptor of its own.
    """

    def __init__(self, signum: int, handled: threading.Event, callback: Callable[[], object]) -> None:
        self._signum, self._handled, self._callback = signum, handled, callback
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        existing = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        if existing != -1:
            signal.set_wakeup_fd(existing)
            return
        # Signals that a forked child receives must not be handled in this process.
        os.register_at_fork(after_in_child=lambda: _unset_wakeup_fd(write))
        threading.Thread(target=self._wait_for_signals, name="opacus-memprof signals", daemon=True).start()

    def _wait_for_signals(self) -> None:
        while number := os.read(self._read, 1):
            if number[0] == self._signum and not self._handled.wait(GRACE_SECONDS):
                self._callback()


def _unset_wakeup_fd(descriptor: int) -> None:
    with contextlib.suppress(ValueError):  # not in the main thread
        if (current := signal.set_wakeup_fd(-1)) != descriptor:
            signal.set_wakeup_fd(current)


def end_by_signal(signum: int) -> None:
    """Ends this process by a signal, from any thread.

    Uses C's `signal` to reset the handler, because Python's function works in the main thread only.
    """
    ctypes.CDLL(None).signal(signum, 0)  # SIG_DFL
    os.kill(os.getpid(), signum)


def record_if_rank(directory: str, device: str, max_events: int) -> None:
    """Makes this process record a profile from its first call of init_process_group on."""
    recordings: list[ProgramRecording] = []

    def record(arguments: Mapping[str, Any]) -> None:
        if recordings:
            return
        launch = Launch.from_environment(os.environ | variables(arguments))
        claimed = ProfileDirectory(Path(directory) / f"rank_{0 if launch is None else launch.rank}", launch)
        recordings.append(ProgramRecording(claimed, device, max_events))
        recordings[0].record_rank()

    before_init_process_group(record)
    run = BaseProcess.run

    def run_and_note_error(self: BaseProcess) -> None:
        try:
            run(self)
        except BaseException as error:
            for recording in recordings:
                recording.note_error(error)
            raise

    BaseProcess.run = run_and_note_error  # type: ignore[method-assign]
