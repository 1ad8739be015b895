# SPDX-License-Identifier: Apache-2.0
"""The hooks around a profiled test, registered once there is one.

A test's profile begins with its first fixture of function scope, after the wider ones, so that its figures do not
depend on which test came first. Limits of memory are checked when the test function has returned, limits of leaks after
teardown.
"""

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from opacus_memprof.directory import DEFAULT_MAX_EVENTS, EVENT_BYTES
from opacus_memprof.errors import MemprofError
from opacus_memprof.pytest_plugin import isolation, marks, recording, summary
from opacus_memprof.pytest_plugin.fixture import Memprof
from opacus_memprof.pytest_plugin.recording import Recording
from opacus_memprof.session import current, one_line, outcome


class TestRecording(Recording):
    """A test's session, how the test went, and the fixture's face of it."""

    __test__ = False

    def __init__(self, item: pytest.Item, directory: Path, *, keep: bool) -> None:
        super().__init__(directory, keep=keep)
        self.error: BaseException | None = None
        self.failed_for = ""
        self.fixture = Memprof(self, item)


_KEY = pytest.StashKey[TestRecording]()


def recording_of(item: pytest.Item) -> TestRecording:
    found = item.stash.get(_KEY, None)
    if found is None:
        raise MemprofError(
            "this test is not profiled: name memprof among its arguments, or use @pytest.mark.usefixtures"
        )
    return found


class Lifecycle:
    """Registered as a plugin; `wants_profile` and `is_isolated` say which tests are profiled, and which of them (or of
    others) in processes of their own."""

    def __init__(
        self,
        config: pytest.Config,
        wants_profile: Callable[[pytest.Item], bool],
        is_isolated: Callable[[pytest.Item], bool],
    ) -> None:
        self._wants_profile = wants_profile
        self._is_isolated = is_isolated
        self._scratch = Path(tempfile.mkdtemp(prefix="memprof_pytest_", dir=_place_of_scratch()))
        self._report = summary.report_folder(config)
        recording.freeze_imported()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if self._is_isolated(item) and not isolation.is_child(item.config):
            isolation.run(item)
            return True
        return None

    @pytest.hookimpl(tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> None:
        if fixturedef.scope == "function":
            self._begin(request.node)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self._begin(item)
        running = item.stash.get(_KEY, None)
        try:
            yield
        except BaseException as error:
            if running is not None and not isinstance(error, pytest.skip.Exception):
                running.error = error
                self._tell_of_failure(item, running)
            raise
        if running is not None:
            try:
                devices = running.figures()
                item.user_properties.extend(summary.properties(devices))
                said = marks.check_memory(item, devices)
            except MemprofError as error:
                said = str(error)
            if said:
                running.failed_for = said
                pytest.fail(said, pytrace=False)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        running = item.stash.get(_KEY, None)
        try:
            yield
        except BaseException as error:
            if running is not None:
                running.error = running.error or error
                self._end(item, running)
            raise
        if running is not None:
            said = self._end(item, running)
            if said:
                pytest.fail(said, pytrace=False)

    def pytest_unconfigure(self) -> None:
        running = current()
        if isinstance(running, TestRecording):  # interrupted: pytest has not torn the test down
            running.end("killed", 130)
        shutil.rmtree(self._scratch, ignore_errors=True)
        recording.unfreeze()

    def _begin(self, item: pytest.Item) -> None:
        if _KEY in item.stash or not self._wants_profile(item):
            return
        folder = self._scratch / "profile" if self._report is None else self._report / folder_of(item.nodeid)
        running = TestRecording(item, folder, keep=self._report is not None)
        try:
            running.start()
        except MemprofError as error:
            pytest.fail(f"opacus-memprof: {error}", pytrace=False)
        item.stash[_KEY] = running

    def _tell_of_failure(self, item: pytest.Item, running: TestRecording) -> None:
        try:
            devices = running.figures()
        except MemprofError as error:
            item.add_report_section("call", "opacus-memprof", str(error))
            return
        item.user_properties.extend(summary.properties(devices))
        said = summary.out_of_memory(devices)
        if said and outcome(running.error)[0] == "out_of_memory":
            item.add_report_section("call", "opacus-memprof", said)

    def _end(self, item: pytest.Item, running: TestRecording) -> str | None:
        """Closes the session; what to say of leaks. A failed test's traceback keeps its frames: that is no leak."""
        del item.stash[_KEY]
        said = None
        try:
            if running.error is None:
                left = running.left()
                if left:  # pytest still holds the values of fixtures
                    getattr(item, "funcargs", {}).clear()
                    recording.empty_caches()
                    left = running.left()
                item.user_properties.extend(summary.leaks(left))
                said = marks.check_leaks(item, left)
        finally:
            status, code = outcome(running.error)
            error = one_line(running.error)
            if problem := running.failed_for or said:
                status, code, error = "failed", 1, problem.partition("\n")[0]
            running.end(status, code, error)
        return said


def _place_of_scratch() -> Path | None:
    """In memory where a whole event file fits: on a disk, making and removing one takes longer than a short test."""
    memory = Path("/dev/shm")
    try:
        fits = shutil.disk_usage(memory).free > 2 * DEFAULT_MAX_EVENTS * EVENT_BYTES
    except OSError:
        return None
    return memory if fits and os.access(memory, os.W_OK) else None


def folder_of(nodeid: str) -> str:
    """A directory's name for a test: readable, short enough, and no other test's."""
    readable = re.sub(r"[^A-Za-z0-9_.-]+", "_", nodeid).strip("._")[-80:]
    return f"{readable}-{hashlib.sha256(nodeid.encode()).hexdigest()[:8]}"
