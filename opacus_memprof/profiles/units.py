# SPDX-License-Identifier: Apache-2.0
"""Parses sizes in bytes, and formats sizes, shares, counts, instants, ranks and names for people.

Parsing follows IEC 80000-13: decimal units are powers of 1000 (1 MB = 1 000 000 bytes), binary ones powers of 1024 (1
MiB = 1 048 576 bytes). Formatting uses binary units, as torch and nvidia-smi do.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction

from opacus_memprof.errors import MemprofError

_PREFIXES = "KMGT"
_UNIT_BYTES = (
    {"": 1, "b": 1}
    | {f"{prefix}B".lower(): 1000**power for power, prefix in enumerate(_PREFIXES, 1)}
    | {f"{prefix}iB".lower(): 1024**power for power, prefix in enumerate(_PREFIXES, 1)}
)
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", re.ASCII | re.IGNORECASE)


def parse_size(size: str | int) -> int:
    """Parses a size in bytes from `123`, `"123"`, `"1.2 GB"` or `"512MiB"`.

    Units are case-insensitive, and a fraction of a byte is dropped.

    Raises:
        MemprofError: `size` is not a size, or negative.
    """
    text = str(size)
    match = _SIZE.fullmatch(text)
    unit = _UNIT_BYTES.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise MemprofError(
            f"{text!r} is not a size: write bytes, or a number with B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"
        )
    return int(Fraction(match[1]) * unit)


in_megabytes: ContextVar[bool] = ContextVar("in_megabytes", default=False)
MEGABYTE_NOTE = "1 MB is 2^20 bytes"


@contextmanager
def megabytes() -> Iterator[None]:
    """Makes MB of 2^20 bytes the only unit of a block, or of a function: what the results of experiments count in."""
    token = in_megabytes.set(True)
    try:
        yield
    finally:
        in_megabytes.reset(token)


def format_bytes(size: int) -> str:
    """Formats a size in binary units with two decimals: `0 B`, `512 B`, `1.50 MiB`, `-2.00 GiB`.

    Within `megabytes`: `0.00 MB`, `0.00049 MB`, `1.50 MB`, `-2048.00 MB`.
    """
    if in_megabytes.get():
        value = size / 2**20
        return f"{value:.2f} MB" if round(value, 2) or not size else f"{value:.2g} MB"
    if abs(size) < 1024:
        return f"{size} B"
    value = size / 1024
    for prefix in _PREFIXES[:-1]:
        if abs(round(value, 2)) < 1024:  # as printed: 1023.999 KiB is 1.00 MiB
            return f"{value:.2f} {prefix}iB"
        value /= 1024
    return f"{value:.2f} {_PREFIXES[-1]}iB"


def column_format(sizes: Iterable[int]) -> Callable[[int], str]:
    """Returns a function that formats the sizes of a table in one unit, as `format_bytes` does.

    This is the unit of the largest size, or the next smaller one if small sizes would otherwise be rounded to 0.
    """
    present = [abs(size) for size in sizes if size]
    if in_megabytes.get() or not present:
        return format_bytes
    largest = max(present)
    power = next(power for power in range(5) if round(largest / 1024**power, 2) < 1024 or power == 4)
    if power > 1 and largest < 10 * 1024**power and min(present) < 1024**power / 10:
        power -= 1
    if power == 0:
        return format_bytes
    unit = f"{_PREFIXES[power - 1]}iB"

    def format_size(size: int) -> str:
        value = size / 1024**power
        return f"<0.01 {unit}" if 0 < value < 0.005 else f"{value:.2f} {unit}"

    return format_size


def format_count(count: int, noun: str) -> str:
    """Formats a number of things: `1 step`, `2 steps`, `0 steps`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_signed_bytes(size: int) -> str:
    """Formats a difference of sizes with its sign: `+1.50 MiB`."""
    return f"+{format_bytes(size)}" if size > 0 else format_bytes(size)


def format_share(part: int, whole: int) -> str:
    """Formats a part of a whole in percent: `12.3 %`; "" if the whole is 0."""
    return f"{100 * part / whole:.1f} %" if whole else ""


def format_moment(phase: str, step: int | str, logical_step: int | None = None) -> str:
    """Formats an instant of a run: `backward of step 5 (logical step 2)`.

    The logical step is omitted if it is the same number.
    """
    logical = "" if logical_step is None or logical_step == step else f" (logical step {logical_step})"
    named = {"idle": "idle time", "proof": "flash_clip's proof"}.get(phase, phase.replace("_", " "))
    return f"{named} of step {step}{logical}"


def format_ranges(numbers: Iterable[int], separator: str = ", ") -> str:
    """Formats increasing numbers, with consecutive ones as a range: `0-3, 5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return separator.join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def format_ranks(ranks: Iterable[int]) -> str:
    """Formats ranks, with consecutive ones as a range: `rank 3`, `ranks 0-3, 5`."""
    ordered = sorted(ranks)
    return f"rank{'s' if len(ordered) > 1 else ''} {format_ranges(ordered)}"


def shorten_name(name: str, length: int = 36) -> str:
    """Shortens a module's name to its last `length` characters, with an ellipsis before them."""
    return name if len(name) <= length else "…" + name[-(length - 1) :]
