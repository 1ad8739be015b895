# SPDX-License-Identifier: Apache-2.0
"""What a test that names `memprof` among its arguments gets."""

import math
from typing import Any

import pytest

from opacus_memprof.errors import MemprofError
from opacus_memprof.pytest_plugin import baseline, marks
from opacus_memprof.pytest_plugin.recording import Recording


class Memprof:
    """A test's profile so far. What was there before the test counts only where the test attaches it.

    Whatever any PrivacyEngine's `make_private` returns is followed; attach other models and optimizers.
    """

    def __init__(self, session: Recording, item: pytest.Item) -> None:
        self._session = session
        self._item = item

    def attach(self, *objects: Any) -> None:
        """Follows models and optimizers that are not from `make_private`; see `Session.attach`."""
        self._session.attach(*objects)

    def snapshot(self, name: str) -> dict[str, Any]:
        """All live bytes now, held against what the allocator counts; see `Session.snapshot`."""
        return self._session.snapshot(name)

    def breakdown(self) -> dict[str, dict[str, int]]:
        """The test's live bytes now: device → category → bytes. See `Session.breakdown`."""
        return self._session.breakdown()

    def peak(self, category: str | None = None, *, module: str | None = None, phase: str | None = None) -> int:
        """Bytes at the test's peak so far, or at that of a phase: all, or those of a category and of a module with
        those inside it. With several devices the largest of their figures.

        Raises:
            MemprofError: there is no such category, module or phase, or a module and a phase are given.
        """
        marks.check_filters(category, module, phase)
        devices = self._session.figures().values()
        return max((marks.select(device, category, module, phase)[0] for device in devices), default=0)

    def assert_within(
        self, limit: str | int, *, category: str | None = None, module: str | None = None, phase: str | None = None
    ) -> None:
        """Fails the test if `peak` with these arguments is more than `limit`, such as "1.2 GB", on any device.

        Raises:
            MemprofError: as `peak`, and for a limit that is no size, or 0.
        """
        __tracebackhide__ = True
        bound = marks.Limit.of(limit, category=category, module=module, phase=phase)
        said = bound.check(self._session.figures())
        if said:
            pytest.fail(f"assert_within: {said}")

    def check_baseline(self, name: str, *, rel: float = 0.02) -> None:
        """Fails the test if its peak, or any category at it, has grown by `rel` of the baseline or more.

        Args:
            name: of the baseline, and of its file; letters, digits, `_`, `-` and `.`.
            rel: 0.02 is 2 %; with 0 any growth fails.

        Raises:
            MemprofError: no such baseline for this device, torch, Opacus and mode, one that cannot be read, or a name
                or `rel` that cannot be meant. With --memprof-update-baselines it is written instead.
        """
        __tracebackhide__ = True
        if not isinstance(rel, (int, float)) or not math.isfinite(rel) or rel < 0:
            raise MemprofError(f"rel={rel!r} is no tolerance: give a part of the baseline, such as 0.02 for 2 %")
        file = baseline.file_of(name, self._folder())
        measured = baseline.measure(self._session.figures(), self._session.modes)
        if self._item.config.getoption("--memprof-update-baselines"):
            baseline.update(file, measured)
            return
        said = baseline.compare(baseline.read(file), measured, rel, file)
        if said:
            pytest.fail(said)

    def _folder(self) -> Any:
        given = self._item.config.getoption("--memprof-baseline-dir")
        if given is not None:
            return self._item.config.invocation_params.dir / given
        return self._item.path.parent / "memprof_baselines"
