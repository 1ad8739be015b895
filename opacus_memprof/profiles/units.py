# SPDX-License-Identifier: Apache-2.0
"""Parses and formats sizes in bytes; formats numbers of things.

Read: decimal units are powers of 1000 (1 MB = 1 000 000 bytes), binary ones powers of 1024 (1 MiB = 1 048 576
bytes), as IEC 80000-13 has them. Written: always binary, as torch and nvidia-smi do.
"""

import re
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
    """A size in bytes from `123`, `"123"`, `"1.2 GB"` or `"512MiB"`; the unit's case does not matter.

    A fraction of a byte is dropped. Raises MemprofError for anything else, negative sizes included.
    """
    text = str(size)
    match = _SIZE.fullmatch(text)
    unit = _UNIT_BYTES.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise MemprofError(
            f"{text!r} is not a size: write bytes, or a number with B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"
        )
    return int(Fraction(match[1]) * unit)


def format_bytes(size: int) -> str:
    """A size for people, in binary units with two decimals: `0 B`, `512 B`, `1.50 MiB`, `-2.00 GiB`."""
    if abs(size) < 1024:
        return f"{size} B"
    value = size / 1024
    for prefix in _PREFIXES[:-1]:
        if abs(round(value, 2)) < 1024:  # as printed: 1023.999 KiB is 1.00 MiB
            return f"{value:.2f} {prefix}iB"
        value /= 1024
    return f"{value:.2f} {_PREFIXES[-1]}iB"


def format_count(count: int, noun: str) -> str:
    """A number of things: `1 step`, `2 steps`, `0 steps`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
