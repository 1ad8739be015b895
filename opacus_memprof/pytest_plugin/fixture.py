# SPDX-License-Identifier: Apache-2.0
"""The object that a test gets as its argument `memprof`."""

import math
from typing import Any

import pytest

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.live_memory import Snapshot
from opacus_memprof.pytest_plugin import baseline, limits
from opacus_memprof.pytest_plugin.clean_session import CleanSession


class Memprof:
    """The profile of a test so far. Blocks from before the test count only if the test attaches them.

    Whatever any PrivacyEngine's `make_private` returns is attached automatically; attach other models and optimizers.
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
        """The test's live bytes now.

        Returns:
            {device: {category: bytes}}, as `Session.breakdown`.

        Raises:
            MemprofError: the test's events cannot be read.
        """
        return self._session.breakdown()

    def peak(self, category: str | None = None, *, module: str | None = None, phase: str | None = None) -> int:
        """The requested bytes at the test's peak so far, or at the peak of a phase; the highest of several devices.

        Args:
            category: count this category only.
            module: count this module and those inside it only.
            phase: at the peak of this phase.

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

        Raises:
            MemprofError: as `peak`; or the limit is not a size, or is 0.
        """
        __tracebackhide__ = True
        parsed = limits.Limit.parse(limit, category=category, module=module, phase=phase)
        message = parsed.check(self._session.devices_so_far())
        if message:
            pytest.fail(f"assert_within: {message}")

    def check_baseline(self, name: str, *, rel: float = 0.02) -> None:
        """Fails the test if its peak, or any category at the peak, has grown by `rel` of the baseline or more. With
        --memprof-update-baselines it writes the baseline instead.

        Args:
            name: of the baseline and of its file: letters, digits, `_`, `-` and `.`.
            rel: 0.02 is 2 %; with 0 any growth fails.

        Raises:
            MemprofError: there is no such baseline for this device, torch, Opacus and mode; it cannot be read; or
                `name` or `rel` is invalid.
        """
        __tracebackhide__ = True
        if not isinstance(rel, (int, float)) or not math.isfinite(rel) or rel < 0:
            raise MemprofError(f"rel={rel!r} is no tolerance: give a part of the baseline, such as 0.02 for 2 %")
        file = baseline.path_of(name, self._folder())
        measured = baseline.measure(self._session.devices_so_far(), self._session.modes)
        if self._item.config.getoption("--memprof-update-baselines"):
            baseline.update(file, measured)
            return
        message = baseline.compare(baseline.read(file), measured, rel, file)
        if message:
            pytest.fail(message)

    def _folder(self) -> Any:
        given = self._item.config.getoption("--memprof-baseline-dir")
        if given is not None:
            return self._item.config.invocation_params.dir / given
        return self._item.path.parent / "memprof_baselines"
