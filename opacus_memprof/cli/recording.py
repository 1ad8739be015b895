# SPDX-License-Identifier: Apache-2.0
"""The profile of one program in this process: it begins when torch is imported and ends with the process.

The program's end stays its own: its exit code, its traceback, its exit handlers and the signal that it dies of.
"""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console

from opacus_memprof.cli.blocked import ActInPlace, die_of
from opacus_memprof.cli.program import Program, print_exception
from opacus_memprof.directory import ProfileDirectory
from opacus_memprof.errors import MemprofError
from opacus_memprof.imports import AfterImport
from opacus_memprof.reports.text import print_summary

if TYPE_CHECKING:
    from opacus_memprof.session import Session


class Recording:
    """Records `device` into `directory`; `max_events` as for `opacus_memprof.profile`."""

    def __init__(self, directory: ProfileDirectory, device: str, max_events: int) -> None:
        self._directory = directory
        self._device = device
        self._max_events = max_events
        self._session: Session | None = None
        self._asked = False  # the program has imported torch
        self._refused: MemprofError | None = None
        self._error: BaseException | None = None  # what ended the program
        self._signal: int | None = None  # what it dies of
        self._finished = False
        self._terminating = threading.Event()
        self._pid = os.getpid()

    def of(self, program: Program) -> None:
        """Runs the program and returns at its end, or raises what python should exit with.

        Raises:
            MemprofError: the profile could not begin; the program had got no further than its import of torch.
        """
        atexit.register(self._finish)  # before the program's own handlers, hence run after them
        AfterImport("torch", self._start)
        AfterImport("opacus", self._watch_opacus)
        self._take_exits()
        try:
            program.run()
        except SystemExit as error:
            self._error = error
            raise
        except BaseException as error:
            if self._refused is not None:
                refused, self._refused = self._refused, None
                raise refused from None
            if self._session is None and isinstance(error, MemprofError):
                self._finished = True  # with nothing to close: a virtual GPU could not start
                self._directory.release()
                raise
            self._error = error
            if self._session is not None:
                self._session.explain(error)
            if isinstance(error, KeyboardInterrupt):
                self._signal = signal.SIGINT
            print_exception(error)
            sys.exit(1)

    # --- the beginning ---

    def _start(self) -> None:
        self._asked = True
        try:
            from opacus_memprof.session import Session

            session = Session(self._directory, device=self._device, max_events=self._max_events)
            session.start()
        except (MemprofError, ImportError) as error:  # a script may do without torch, but not without its profile
            self._refused = MemprofError(str(error))
            raise self._refused from None
        self._session = session
        from opacus_memprof.cli.plain import PlainTraining

        PlainTraining(session)

    def _watch_opacus(self) -> None:
        if self._session is None:
            return
        import opacus

        try:
            self._session.attach(opacus.PrivacyEngine)
        except (ImportError, AttributeError) as error:
            self._session.warnings.append(
                f"Opacus {opacus.__version__} is not one that this release knows ({error}): nothing is attributed to it"
            )

    def _take_exits(self) -> None:
        """SIGTERM and os._exit leave a process without its exit handlers."""
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminated)
            if self._directory.launch is not None:  # where a rank dies, the others wait for it in collectives
                ActInPlace(signal.SIGTERM, self._terminating, self._terminate_in_place)
            os.register_at_fork(after_in_child=self._terminate_children_at_once)
        exit_now = os._exit

        def finish_and_exit(status: int) -> NoReturn:
            if status:
                self._error = SystemExit(status)
            try:
                self._finish()
            finally:
                exit_now(status)

        os._exit = finish_and_exit

    def _terminate_children_at_once(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._terminated:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    # --- the end ---

    def _terminated(self, signum: int, frame: FrameType | None) -> None:
        if signal.getsignal(signum) != self._terminated:
            return  # called by a handler of the program's own, which decides what becomes of the process
        self._terminating.set()
        self._signal = signum
        self._finish()

    def _terminate_in_place(self) -> None:
        """The main thread does not come back to Python."""
        if not self._finished:  # else it is at it
            self._signal = signal.SIGTERM
            self._finish()

    def _finish(self) -> None:
        """Closes the session and prints the summary, once; then dies of the signal if there was one."""
        if os.getpid() != self._pid:
            return  # a forked child
        try:
            if not self._finished:
                self._finished = True
                self._close()
        finally:
            if self._signal is not None:
                die_of(self._signal)

    def _close(self) -> None:
        if self._session is None:
            self._directory.release()
            if not self._asked:
                _note("the program did not import torch: there is nothing to profile")
            elif self._refused is not None:
                _note(str(self._refused))
            return
        from opacus_memprof import workload
        from opacus_memprof.session import one_line, outcome

        if not workload.current().modules:
            self._session.warnings.append(
                "no PrivacyEngine.make_private was seen, and no training of a model without it: nothing is attributed "
                "to Opacus or to modules (a model can be passed to opacus_memprof.session.current().attach)"
            )
        status, exit_code = outcome(self._error)
        if self._signal is not None:
            status, exit_code = "killed", 128 + self._signal
        try:
            profile = self._session.close(status, exit_code, one_line(self._error))
        except MemprofError as error:
            _note(str(error))
        else:
            self._tell(self._session, profile)

    def _tell(self, session: "Session", profile: dict[str, Any]) -> None:
        """The summary; of several ranks that of all, and by the last one that ends."""
        launch = self._directory.launch
        if launch is None or launch.played == [launch.rank]:
            _print_summary(print_summary, profile)
            which = "" if launch is None else f" of rank {launch.rank} of {launch.world_size}"
            _note(f"the profile{which} is in {session.directory}")
        elif session.job is not None:
            from opacus_memprof.reports.ranks import print_ranks

            _print_summary(print_ranks, session.job)
            _note(f"the profiles of all ranks are in {session.directory.parent}")
        elif profile["status"] != "finished":
            _note(
                f"rank {launch.rank} ended early ({profile['status'].replace('_', ' ')}), its profile is in "
                f"{session.directory}: `opacus-memprof report {session.directory.parent}` shows all ranks"
            )


def _print_summary(printed: Callable[[Any, Console], None], profile: dict[str, Any]) -> None:
    """To the real stdout, which the program may have replaced, closed, or lost to a pipe that ended."""
    stdout = sys.__stdout__
    console = Console(file=stdout)
    with console.capture() as summary:  # rich would exit with a code of its own at a pipe that ended
        printed(profile, console)
    try:
        sys.stdout.flush()
        if stdout is not None:
            stdout.write(summary.get())
            stdout.flush()
    except BrokenPipeError:  # python tries again at its end: that must not cost the exit code
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except (OSError, ValueError) as error:
        _note(f"the summary could not be printed ({error})")


def _note(sentence: str) -> None:
    print(f"opacus-memprof: {sentence}", file=sys.__stderr__)
