# SPDX-License-Identifier: Apache-2.0
"""Several values after one flag."""

import pytest

from opacus_memprof.cli.experiments import repeat_flags
from opacus_memprof.cli.options import current_name
from opacus_memprof.errors import MemprofError

LISTS = {"--sizes", "--lora-ranks", "--mode"}


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--sizes 1 2 3", "--sizes 1 --sizes 2 --sizes 3"),
        ("--sizes 1 --sizes 2", "--sizes 1 --sizes 2"),
        (
            "--sizes 1 2 --steps 5 --lora_ranks 8 16 -x",
            "--sizes 1 --sizes 2 --steps 5 --lora_ranks 8 --lora_ranks 16 -x",
        ),
        ("--sizes 0 -4", "--sizes 0 --sizes -4"),
        ("--sizes=1 --lora-ranks 8", "--sizes=1 --lora-ranks 8"),
        ("--steps 5 6", "--steps 5 6"),
        ("--experiment ghost ew", "--experiment ghost --experiment ew"),
        ("", ""),
    ],
)
def test_a_flag_is_repeated(given: str, meant: str) -> None:
    assert repeat_flags(given.split(), LISTS, current_name) == meant.split()


@pytest.mark.parametrize("given", ["--sizes", "--sizes --lora_ranks 8", "--lora_ranks 8 --sizes"])
def test_a_flag_without_a_value(given: str) -> None:
    with pytest.raises(MemprofError, match="--sizes has no values"):
        repeat_flags(given.split(), LISTS, current_name)
