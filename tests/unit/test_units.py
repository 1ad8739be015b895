# SPDX-License-Identifier: Apache-2.0
"""Sizes: known pairs, written by hand, and the bounds that a printed size must keep. Numbers of things."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.units import column_format, format_bytes, format_count, megabytes, parse_size

MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (123, 123),
        ("0", 0),
        ("123", 123),
        ("123 B", 123),
        ("1KB", 1_000),
        ("1 KiB", 1_024),
        ("1.2 GB", 1_200_000_000),
        ("512MiB", 536_870_912),
        (" 1.5gib ", 1_610_612_736),
        ("2 TB", 2_000_000_000_000),
        ("2 TiB", 2_199_023_255_552),
        (".5 KB", 500),
        ("0.0009 KiB", 0),
        # Binary floating point would read one byte less.
        ("0.29 KB", 290),
        ("9007199254740993", 9_007_199_254_740_993),
    ],
)
def test_sizes_are_read_exactly(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1", -1, "1 M", "1 Gbit", "1e9", "1,5 GB", "1 2 MB", "1.2.3", "nan", "٣"])
def test_anything_else_is_refused_in_one_sentence(text: str | int) -> None:
    with pytest.raises(MemprofError, match="is not a size") as raised:
        parse_size(text)
    assert repr(str(text)) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert raised.value.exit_code == 2


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1_572_864, "1.50 MiB"),
        (1_048_575, "1.00 MiB"),
        (1_073_741_824, "1.00 GiB"),
        (32_900_000_000, "30.64 GiB"),
        (5 * 1024**4, "5.00 TiB"),
        (2048 * 1024**4, "2048.00 TiB"),
        (-1_572_864, "-1.50 MiB"),
        (-3, "-3 B"),
    ],
)
def test_sizes_are_written_in_binary_units(size: int, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(min_value=0, max_value=2**50))
def test_what_is_written_reads_back_to_half_a_hundredth(size: int) -> None:
    text = format_bytes(size)
    unit = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[text.split()[1]]
    assert abs(parse_size(text) - size) <= 0.005 * unit + 1
    assert float(text.split()[0]) < 1024 or unit == 2**40


def test_one_of_a_thing_is_no_plural() -> None:
    assert [format_count(count, "step") for count in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0.00 MB"),
        (512, "0.00049 MB"),
        (2**20 * 3 // 2, "1.50 MB"),
        (-(2**31), "-2048.00 MB"),
        (5 * 2**40, "5242880.00 MB"),
    ],
)
def test_results_of_experiments_have_one_unit(size: int, text: str) -> None:
    with megabytes():
        with megabytes():
            pass
        assert format_bytes(size) == text
    assert "MB" not in format_bytes(size)


@pytest.mark.parametrize(
    ("sizes", "printed"),
    [
        ([3 * GIB // 2, 300 * MIB], ["1.50 GiB", "0.29 GiB"]),
        ([3 * GIB // 2, 30 * MIB], ["1536.00 MiB", "30.00 MiB"]),  # 0.03 GiB would have one digit
        ([30 * GIB, 30 * MIB], ["30.00 GiB", "0.03 GiB"]),  # 30720.00 MiB would be long
        ([30 * GIB, 1], ["30.00 GiB", "<0.01 GiB"]),
        ([GIB - 1, 0], ["1.00 GiB", "0.00 GiB"]),
        ([700, 3], ["700 B", "3 B"]),
        ([], []),
    ],
)
def test_a_column_has_one_unit(sizes: list[int], printed: list[str]) -> None:
    assert [column_format(sizes)(size) for size in sizes] == printed
