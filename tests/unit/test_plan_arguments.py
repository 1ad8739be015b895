# SPDX-License-Identifier: Apache-2.0
"""Values for the arguments of the program that is planned."""

import pytest

from opacus_memprof.planning.configuration import Range, parse_modes, parse_range, with_argument


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ("", "--batch-size 7"),
        ("--lr 1", "--lr 1 --batch-size 7"),
        ("--batch-size 3 --lr 1", "--batch-size 7 --lr 1"),
        ("--batch_size 3", "--batch_size 7"),
        ("--batch-size=3 x", "--batch-size=7 x"),
        ("batch_size=3", "batch_size=7"),
        ("--batch-size", "--batch-size --batch-size 7"),
        ("batch-size 3", "batch-size 3 --batch-size 7"),  # words of the program's own
    ],
)
def test_an_argument_is_changed_where_it_is_given(given: str, changed: str) -> None:
    assert with_argument(given.split(), "batch-size", 7) == tuple(changed.split())


def test_a_short_flag_is_itself() -> None:
    assert with_argument(["-b", "3"], "-b", 7) == ("-b", "7")
    assert with_argument([], "-b", 7) == ("-b", "7")


def test_ranges_and_modes() -> None:
    assert parse_range("batch-size=1..4096") == Range("batch-size", 1, 4096)
    assert parse_modes("hooks, ghost,hooks") == ("mode", ["hooks", "ghost"])
    assert parse_modes("clipping=ew") == ("clipping", ["ew"])
