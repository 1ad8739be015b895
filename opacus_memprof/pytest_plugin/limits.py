# SPDX-License-Identifier: Apache-2.0
"""The markers that limit memory. Checks return None, or the message of the failure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.categories import FORWARD_UNDECIDED, REPORTED, reported_name
from opacus_memprof.profiles.profile import Device
from opacus_memprof.profiles.units import format_bytes, parse_size
from opacus_memprof.pytest_plugin import FITS, LIMITS
from opacus_memprof.pytest_plugin.on_virtual_gpu import Fits
from opacus_memprof.recording import native

_TOP = 5  # categories and modules listed in a message


@dataclass(frozen=True)
class Limit:
    """A limit on the bytes at a device's peak, or at the peak of a phase.

    Attributes:
        size: the limit, in bytes.
        category: count this category only.
        module: count this module and those inside it only.
        phase: use the peak of this phase.
        reserved: limit the largest bytes that torch has reserved from a GPU, instead of requested bytes.
    """

    size: int
    category: str | None = None
    module: str | None = None
    phase: str | None = None
    reserved: bool = False

    @classmethod
    def parse(
        cls,
        limit: str | int,
        *,
        category: str | None = None,
        module: str | None = None,
        phase: str | None = None,
        reserved: bool = False,
    ) -> "Limit":
        """Parses a limit such as "1.2 GB". Raises MemprofError if it is not a size, is 0, or a filter is invalid."""
        check_filters(category, module, phase)
        if reserved and (category or module or phase):
            raise MemprofError("torch reserves memory for all uses: limit the reserved bytes without any other filter")
        return cls(_positive(limit), category, module, phase, reserved)

    def check(self, devices: Mapping[str, Device]) -> str | None:
        """Returns a message if a device exceeds the limit: by how much, and in which categories and modules."""
        for name, device in devices.items():
            if self.reserved:
                if message := self._check_reserved(name, device):
                    return message
                continue
            used, sizes, modules, where = select(device, self.category, self.module, self.phase)
            if used > self.size:
                subject = " of ".join(filter(None, [self.category, self.module])) or "memory"
                return "\n".join(
                    [
                        f"{format_bytes(used)} ({used} bytes) of {subject} on {name} {where}, which is "
                        f"{format_bytes(used - self.size)} more than the limit of {format_bytes(self.size)} "
                        f"({self.size} bytes)",
                        *_largest("category", sizes),
                        *_largest("module", modules),
                    ]
                )
        return None

    def _check_reserved(self, name: str, device: Device) -> str | None:
        peak = device.reserved_peak
        if peak is None or peak.bytes <= self.size:
            return None
        requested = device.peak.requested_bytes
        return (
            f"{format_bytes(peak.bytes)} ({peak.bytes} bytes) reserved on {name} in {peak.phase} of step {peak.step}, "
            f"which is {format_bytes(peak.bytes - self.size)} more than the limit of {format_bytes(self.size)} "
            f"({self.size} bytes); at most {format_bytes(requested)} were requested"
        )


def check_filters(category: str | None, module: str | None, phase: str | None) -> None:
    """Raises MemprofError if a category or phase does not exist, or if both a module and a phase are given.

    Modules are known at the peak only.

    Raises:
        MemprofError: a filter is invalid.
    """
    names = native.names()
    categories = sorted({*REPORTED, *(reported_name(name) for name in names["categories"])} - {FORWARD_UNDECIDED})
    if category is not None and category not in categories:
        raise MemprofError(
            f"there is no category {category!r}: use one of {', '.join(categories)}, or name one of your own by "
            f"opacus_memprof.tag({category!r}) where the test's module is imported"
        )
    if phase is not None and phase not in names["phases"]:
        raise MemprofError(f"there is no phase {phase!r}: use one of {', '.join(names['phases'])}")
    if module is not None and (not isinstance(module, str) or not module):
        raise MemprofError(f"{module!r} is not a module: give its name, such as 'encoder.layers.0'")
    if module is not None and phase is not None:
        raise MemprofError("modules are known at the peak only: limit the module or the phase, not both")


def select(
    device: Device, category: str | None, module: str | None, phase: str | None
) -> tuple[int, dict[str, int], dict[str, int], str]:
    """Selects bytes of one device of a profile.

    Returns:
        The total bytes, bytes by category, bytes by module, and a phrase with the time of the peak.

    Raises:
        MemprofError: no such module was ever attached, so that a limit on it could not fail.
    """
    if phase is not None:
        instant = device.phases.get(phase)
        if instant is None:
            return 0, {}, {}, f"in {phase}"
        sizes = _only(instant.categories, category)
        return sum(sizes.values()), sizes, {}, f"at the peak of {phase}, in step {instant.step}"
    peak = device.peak
    inside = {name: _only(by, category) for name, by in peak.modules.items() if _is_in(name, module)}
    if module is not None and not any(_is_in(name, module) for name in native.names()["modules"]):
        raise MemprofError(f"there is no module {module!r}: attach the model, and name modules as it does")
    sizes = {}
    for by in inside.values():
        for name, size in by.items():
            sizes[name] = sizes.get(name, 0) + size
    modules = {name: sum(by.values()) for name, by in inside.items()}
    where = f"at the peak, in {peak.phase} of step {peak.step}"
    return sum(sizes.values()), sizes, modules, where


def check_markers(item: pytest.Item) -> None:
    """Raises pytest's CollectError if a limit marker of the test, or `fits`, is invalid."""
    for name in (*LIMITS, FITS):
        for mark in item.iter_markers(name):
            try:
                _read(mark) if name in LIMITS else Fits.read(mark)
            except (MemprofError, TypeError, ImportError) as error:
                raise pytest.Collector.CollectError(f"{item.nodeid}: @pytest.mark.{name}: {error}") from error


def check_memory(item: pytest.Item, devices: Mapping[str, Device]) -> str | None:
    """Checks the markers limit_gpu_memory and `fits` of a completed test. Returns a message if a limit is exceeded."""
    for mark in item.iter_markers("limit_gpu_memory"):
        limit = _read(mark)
        message = limit.check(devices)
        if message:
            return f"limit_gpu_memory: {message}"
    fits = Fits.from_item(item)
    return None if fits is None else fits.check(devices)


def check_leaks(item: pytest.Item, leaked: Iterable[Mapping[str, Any]]) -> str | None:
    """Checks the limit_gpu_leaks markers against the blocks that outlive a test and its fixtures.

    Returns a message if a limit is exceeded.
    """
    by_device: dict[str, list[Mapping[str, Any]]] = {}
    for block in leaked:
        by_device.setdefault(block["device"], []).append(block)
    for mark in item.iter_markers("limit_gpu_leaks"):
        limit = _read(mark).size
        for device, blocks in by_device.items():
            size = sum(block["bytes"] for block in blocks)
            if size > limit:
                kinds: dict[str, int] = {}
                for block in blocks:
                    where = f" of {block['module']}" if block["module"] else ""
                    key = f"{block['category']}{where}, made in {block['phase']} of step {block['step']}"
                    kinds[key] = kinds.get(key, 0) + block["bytes"]
                return "\n".join(
                    [
                        f"limit_gpu_leaks: {format_bytes(size)} ({size} bytes, {len(blocks)} blocks) on {device} "
                        f"outlive the test and its fixtures, which is {format_bytes(size - limit)} more than the "
                        f"limit of {format_bytes(limit)} ({limit} bytes)",
                        *_largest("what", kinds),
                    ]
                )
    return None


def _read(mark: pytest.Mark) -> Limit:
    if mark.name == "limit_gpu_leaks":
        return _leak_limit(*mark.args, **mark.kwargs)
    return Limit.parse(*mark.args, **mark.kwargs)


def _leak_limit(limit: str | int) -> Limit:
    return Limit(_positive(limit))


def _positive(limit: str | int) -> int:
    size = parse_size(limit)
    if size == 0:
        raise MemprofError(f"a limit of {limit!r} is 0 bytes, which every test exceeds: give at least 1 B")
    return size


def _is_in(name: str, module: str | None) -> bool:
    return module is None or name == module or name.startswith(f"{module}.")


def _only(sizes: Mapping[str, int], category: str | None) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if size and category in (None, name)}


def _largest(title: str, sizes: Mapping[str, int]) -> list[str]:
    """Returns the largest entries, one per line."""
    ranked = sorted(((name, size) for name, size in sizes.items() if size), key=lambda row: (-row[1], row[0]))
    rows = [f"  {format_bytes(size):>11}  {name or '(no module)'}" for name, size in ranked[:_TOP]]
    more = [f"  {format_bytes(sum(size for _, size in ranked[_TOP:])):>11}  others"] if ranked[_TOP:] else []
    return [f"by {title}:", *rows, *more] if rows else []
