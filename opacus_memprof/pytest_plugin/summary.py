# SPDX-License-Identifier: Apache-2.0
"""The summary of all tests: a table in the terminal, as Markdown and as JSON, made from properties of each test.

The properties are part of pytest's reports: pytest-xdist passes them on, and JUnit XML contains them.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.files import write_text
from opacus_memprof.profiles.profile import Device
from opacus_memprof.profiles.units import format_bytes

Properties = list[tuple[str, object]]

_PREFIX = "memprof."
_SUMMARY = "summary"
_TITLES = ("test", "device", "peak", "in", "mostly", "left", "outcome")


def properties(devices: Mapping[str, Device]) -> Properties:
    """Returns the properties of a test, from the devices of its profile.

    They are `memprof.cuda:0.peak_bytes`, `.phase`, `.step`, and the bytes of each category at the peak as
    `memprof.cuda:0.categories.gradients`.
    """
    result: Properties = []
    for name, device in devices.items():
        peak = device.peak
        result += [
            (f"{_PREFIX}{name}.peak_bytes", peak.requested_bytes),
            (f"{_PREFIX}{name}.phase", peak.phase),
            (f"{_PREFIX}{name}.step", peak.step),
        ]
        result += [(f"{_PREFIX}{name}.categories.{key}", size) for key, size in peak.categories.items() if size]
    return result


def leaks(blocks: Iterable[Mapping[str, Any]]) -> Properties:
    """Returns the property `memprof.cuda:0.left_bytes`, from blocks that outlive a test and its fixtures, if any."""
    sizes: dict[str, int] = {}
    for block in blocks:
        sizes[block["device"]] = sizes.get(block["device"], 0) + block["bytes"]
    return [(f"{_PREFIX}{name}.left_bytes", size) for name, size in sizes.items()]


def out_of_memory(devices: Mapping[str, Device]) -> str | None:
    """Returns a text about the last failed allocation and the live memory at that instant, or None."""
    for name, device in devices.items():
        if device.out_of_memory:
            last = device.out_of_memory[-1]
            module = f" of {last.module}" if last.module else ""
            sizes = sorted(last.categories.items(), key=lambda row: -row[1])
            return "\n".join(
                [
                    f"{name} ran out of memory: {format_bytes(last.requested_bytes)} of {last.category}{module} in "
                    f"{last.phase} of step {last.step}, with {format_bytes(last.live_bytes)} of the test live",
                    *(f"  {format_bytes(size):>11}  {category}" for category, size in sizes),
                ]
            )
    return None


def report_folder(config: pytest.Config) -> Path | None:
    """Returns the directory of --memprof-report, or None."""
    option = config.getoption("--memprof-report")
    return None if option is None else config.invocation_params.dir / option


class Summary:
    """A pytest plugin that collects properties and writes the summary. With pytest-xdist, it runs in the controller.

    Raises:
        pytest.UsageError: the directory of the report cannot be created.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._in_terminal = config.getoption("--memprof")
        self._folder = report_folder(config)
        self._problem: str | None = None
        self._tests: dict[str, dict[str, Any]] = {}
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise pytest.UsageError(
                    f"--memprof-report: {self._folder} is not a directory ({error.strerror})"
                ) from error

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._tests.setdefault(report.nodeid, {"outcome": "passed", "devices": {}})
        if not report.passed and test["outcome"] == "passed":
            test["outcome"] = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        for key, value in report.user_properties:
            if key.startswith(_PREFIX):
                device, _, field = key.removeprefix(_PREFIX).partition(".")
                entry = test["devices"].setdefault(device, {"categories": {}})
                group, _, category = field.partition(".")
                (entry if not category else entry[group])[category or field] = value

    @pytest.hookimpl(tryfirst=True)  # before the terminal's own summary
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._folder is None:
            return
        try:
            write_text(self._folder / f"{_SUMMARY}.md", _markdown(self._rows()))
            content = {"format": 1, "tests": self._tests}
            write_text(self._folder / f"{_SUMMARY}.json", json.dumps(content, indent=1) + "\n")
        except MemprofError as error:
            self._problem = str(error)
            session.exitstatus = session.exitstatus or pytest.ExitCode.USAGE_ERROR

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._in_terminal:
            terminalreporter.section("memory")
            for line in _aligned([_TITLES, *self._rows()]):
                terminalreporter.write_line(line)
        if self._problem is not None:
            terminalreporter.write_line(f"the summary of memory is missing: {self._problem}")
        elif self._folder is not None:
            terminalreporter.write_line(f"profiles and summary of memory: {self._folder}")

    def _rows(self) -> list[tuple[str, ...]]:
        """Returns a row for each test and device, the highest peak first."""
        rows = []
        for test, found in self._tests.items():
            for device, entry in found["devices"].items():
                sizes = entry["categories"]
                mostly = max(sizes, key=lambda name: (sizes[name], name), default="")
                rows.append(
                    (
                        -entry.get("peak_bytes", 0),
                        test,
                        device,
                        format_bytes(entry.get("peak_bytes", 0)),
                        str(entry.get("phase", "")),
                        f"{mostly} {format_bytes(sizes[mostly])}" if mostly else "",
                        format_bytes(entry["left_bytes"]) if entry.get("left_bytes") else "",
                        found["outcome"],
                    )
                )
        return [row[1:] for row in sorted(rows)]


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _markdown(rows: list[tuple[str, ...]]) -> str:
    cells = [_TITLES, tuple("---" for _ in _TITLES), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells) + "\n"
