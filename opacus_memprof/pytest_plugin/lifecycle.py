# SPDX-License-Identifier: Apache-2.0
"""pytest's hooks around each profiled test, and its `memprof` fixture. They are registered if any test is profiled.

The profile of a test begins with its first fixture of function scope, after fixtures of wider scope, so that it does
not depend on which test ran first. Memory limits are checked when the test function has returned, leak limits after
teardown.
"""

import hashlib
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.directory import DEFAULT_MAX_EVENTS, EVENT_BYTES
from opacus_memprof.profiles.live_memory import Snapshot
from opacus_memprof.profiles.profile import Device
from opacus_memprof.pytest_plugin import baseline, clean_session, isolation, limits, summary
from opacus_memprof.pytest_plugin.clean_session import CleanSession
from opacus_memprof.reports.summary import format_verdict
from opacus_memprof.session import current, one_line, outcome


class Memprof:
    """The profile of a test so far. Blocks from before the test count only if the test attaches them.

    Results of any PrivacyEngine's `make_private` are attached automatically; attach other models and optimizers.
    """

    def __init__(self, session: CleanSession, item: pytest.Item) -> None:
        self._session = session
        self._item = item

    def attach(self, *objects: Any) -> None:
        """Attaches models and optimizers that are not from `make_private`; see `Session.attach`."""
        self._session.attach(*objects)

    def snapshot(self, name: str) -> Snapshot:
        """Takes a snapshot of all live bytes, compared with the allocator's own figures. See `Session.snapshot`."""
        return self._session.snapshot(name)

    def breakdown(self) -> dict[str, dict[str, int]]:
        """Returns the test's live bytes now.

        Returns:
            {device: {category: bytes}}, as `Session.breakdown` does.

        Raises:
            MemprofError: the test's events cannot be read.
        """
        return self._session.breakdown()

    def peak(self, category: str | None = None, *, module: str | None = None, phase: str | None = None) -> int:
        """Returns the requested bytes at the test's peak so far, or at the peak of a phase.

        With several devices, returns the highest value.

        Args:
            category: count this category only.
            module: count this module and those inside it only.
            phase: use the peak of this phase.

        Raises:
            MemprofError: there is no such category, module or phase, or both a module and a phase are given.
        """
        limits.check_filters(category, module, phase)
        devices = self._session.devices_so_far().values()
        return max((limits.select(device, category, module, phase)[0] for device in devices), default=0)

    def assert_within(
        self, limit: str | int, *, category: str | None = None, module: str | None = None, phase: str | None = None
    ) -> None:
        """Fails the test if `peak` with these arguments is more than `limit`, such as "1.2 GB", on any device.

        Args:
            limit: the limit in bytes, or with a unit.
            category: see `peak`.
            module: see `peak`.
            phase: see `peak`.

        Raises:
            MemprofError: there is no such category, module or phase; or the limit is not a size, or is 0.
        """
        __tracebackhide__ = True
        parsed = limits.Limit.parse(limit, category=category, module=module, phase=phase)
        message = parsed.check(self._session.devices_so_far())
        if message:
            pytest.fail(f"assert_within: {message}")

    def check_baseline(self, name: str, *, rel: float = 0.02) -> None:
        """Fails the test if its peak, or any category at the peak, has grown by `rel` of the baseline or more.

        With --memprof-update-baselines it writes the baseline instead, and with --memprof-compare it reads the baseline
        of that commit.

        Args:
            name: the name of the baseline and of its file: letters, digits, `_`, `-` and `.`.
            rel: 0.02 is 2 %; with 0 any growth fails.

        Raises:
            MemprofError: there is no such baseline for this device, torch, Opacus and mode; it cannot be read; or
                `name` or `rel` is invalid.
        """
        __tracebackhide__ = True
        if not isinstance(rel, (int, float)) or not math.isfinite(rel) or rel < 0:
            raise MemprofError(f"rel={rel!r} is not a tolerance: give a fraction of the baseline, such as 0.02 for 2 %")
        file = baseline.path_of(name, self._folder())
        measured = baseline.measure(self._session.devices_so_far(), self._session.modes)
        if self._item.config.getoption("--memprof-update-baselines"):
            baseline.update(file, measured)
            return
        commit = self._item.config.getoption("--memprof-compare")
        entries = baseline.read(file) if commit is None else baseline.read_at(commit, file)
        message = baseline.compare(entries, measured, rel, file)
        if message:
            pytest.fail(message)

    def _folder(self) -> Any:
        given = self._item.config.getoption("--memprof-baseline-dir")
        if given is not None:
            return self._item.config.invocation_params.dir / given
        return self._item.path.parent / "memprof_baselines"


class ProfiledTest(CleanSession):
    """The session of a test, its outcome so far, and its `memprof` fixture."""

    __test__ = False

    def __init__(self, item: pytest.Item, directory: Path, *, keep: bool) -> None:
        super().__init__(directory, keep=keep)
        self.error: BaseException | None = None
        self.failure_message = ""
        self.fixture = Memprof(self, item)


_KEY = pytest.StashKey[ProfiledTest]()


def profiled_test_of(item: pytest.Item) -> ProfiledTest:
    """Returns the ProfiledTest of a pytest item. Raises MemprofError if the test is not profiled."""
    test = item.stash.get(_KEY, None)
    if test is None:
        raise MemprofError(
            "this test is not profiled: name memprof among its arguments, or use @pytest.mark.usefixtures"
        )
    return test


class Lifecycle:
    """A pytest plugin that starts, checks and ends the profile of each test.

    Args:
        config: pytest's configuration.
        wants_profile: returns whether a test is profiled.
        is_isolated: returns whether a test runs in a new process.
    """

    def __init__(
        self,
        config: pytest.Config,
        wants_profile: Callable[[pytest.Item], bool],
        is_isolated: Callable[[pytest.Item], bool],
    ) -> None:
        self._wants_profile = wants_profile
        self._is_isolated = is_isolated
        self._scratch = Path(tempfile.mkdtemp(prefix="memprof_pytest_", dir=_scratch_parent()))
        self._report = summary.report_folder(config)
        clean_session.freeze_imported_objects()

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
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._record_error(item, "setup", error)
            raise

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self._begin(item)
        running = item.stash.get(_KEY, None)
        try:
            yield
        except BaseException as error:
            self._record_error(item, "call", error)
            raise
        if running is not None:
            try:
                devices = running.devices_so_far()
                item.user_properties.extend(summary.properties(devices))
                message = limits.check_memory(item, devices)
                if message:
                    message += _what_to_change(running, devices)
            except MemprofError as error:
                message = str(error)
            if message:
                running.failure_message = message
                pytest.fail(message, pytrace=False)

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
            message = self._end(item, running)
            if message:
                pytest.fail(message, pytrace=False)

    def pytest_unconfigure(self) -> None:
        running = current()
        if isinstance(running, ProfiledTest):  # pytest was interrupted before it could tear the test down
            running.end("killed", 130)
        shutil.rmtree(self._scratch, ignore_errors=True)
        clean_session.unfreeze()

    def _begin(self, item: pytest.Item) -> None:
        if _KEY in item.stash or not self._wants_profile(item):
            return
        folder = self._scratch / "profile" if self._report is None else self._report / folder_of(item.nodeid)
        running = ProfiledTest(item, folder, keep=self._report is not None)
        try:
            running.start()
        except MemprofError as error:
            pytest.fail(f"opacus-memprof: {error}", pytrace=False)
        item.stash[_KEY] = running

    def _record_error(self, item: pytest.Item, when: str, error: BaseException) -> None:
        """Records that the test, or a fixture of it, has failed.

        Adds the test's memory to the report of that phase (`when`: "setup" or "call").
        """
        running = item.stash.get(_KEY, None)
        if running is None or isinstance(error, pytest.skip.Exception):
            return
        running.error = error
        try:
            devices = running.devices_so_far()
        except MemprofError as trouble:
            item.add_report_section(when, "opacus-memprof", str(trouble))
            return
        item.user_properties.extend(summary.properties(devices))
        message = summary.out_of_memory(devices)
        if message and outcome(error)[0] == "out_of_memory":
            item.add_report_section(when, "opacus-memprof", message + _what_to_change(running, devices))

    def _end(self, item: pytest.Item, running: ProfiledTest) -> str | None:
        """Closes the session. Returns a message if the test leaks more than its limit.

        A failed test is not checked, because its traceback keeps frames, and with them tensors, alive.
        """
        del item.stash[_KEY]
        message = None
        try:
            if running.error is None:
                leaked = running.leaked_blocks()
                if leaked:  # pytest still refers to the values of fixtures
                    getattr(item, "funcargs", {}).clear()
                    clean_session.empty_caches()
                    leaked = running.leaked_blocks()
                item.user_properties.extend(summary.leaks(leaked))
                message = limits.check_leaks(item, leaked)
        finally:
            status, code = outcome(running.error)
            error = one_line(running.error)
            if problem := running.failure_message or message:
                status, code, error = "failed", 1, problem.partition("\n")[0]
            running.end(status, code, error)
        return message


def _what_to_change(running: CleanSession, devices: Mapping[str, Device]) -> str:
    return "".join(f"\n\n{format_verdict(verdict)}" for verdict in running.verdicts(devices))


def _scratch_parent() -> Path | None:
    """Returns the parent of the scratch directory, or None for the default.

    It is /dev/shm if event files fit into it, because creating and removing one on a disk takes longer than a short
    test.
    """
    shared_memory = Path("/dev/shm")
    try:
        fits = shutil.disk_usage(shared_memory).free > 2 * DEFAULT_MAX_EVENTS * EVENT_BYTES
    except OSError:
        return None
    return shared_memory if fits and os.access(shared_memory, os.W_OK) else None


def folder_of(nodeid: str) -> str:
    """Returns the name of a test's profile directory: readable, short and unique."""
    readable = re.sub(r"[^A-Za-z0-9_.-]+", "_", nodeid).strip("._")[-80:]
    return f"{readable}-{hashlib.sha256(nodeid.encode()).hexdigest()[:8]}"
