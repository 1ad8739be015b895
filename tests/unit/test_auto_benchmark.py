# SPDX-License-Identifier: Apache-2.0
"""benchmarks/clipping/auto_mode.py: when the mode that auto has chosen is the right one."""

from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def benchmark_of_auto() -> ModuleType:
    from benchmarks.clipping import auto_mode

    return auto_mode  # type: ignore[no-any-return]


def row(choice: str, **modes: tuple[float, int | None] | str) -> dict[str, Any]:
    ran = {mode: found for mode, found in modes.items() if not isinstance(found, str)}
    return {
        "configuration": "a model",
        "choice": choice,
        "modes": {
            mode: {"failed": found} if isinstance(found, str) else {"seconds": found[0], "peak_bytes": found[1]}
            for mode, found in modes.items()
        },
        "rounds": [{mode: scale * seconds for mode, (seconds, _) in ran.items()} for scale in (1.0, 1.5, 9.0)],
    }


@pytest.mark.parametrize(
    ("found", "fastest", "right"),
    [
        (row("flash_clip", flash_clip=(1.0, 100), hooks=(1.2, 50)), "flash_clip", True),
        (row("flash_clip", flash_clip=(1.02, 101), hooks=(1.0, 100)), "hooks", True),
        (row("flash_clip", flash_clip=(1.02, 103), hooks=(1.0, 100)), "hooks", False),
        (row("flash_clip", flash_clip=(1.04, 10), hooks=(1.0, 100)), "hooks", False),
        (row("flash_clip", flash_clip=(1.04, None), ghost=(1.0, None)), "ghost", False),
        (row("hooks", hooks="OutOfMemoryError: 1", flash_clip=(1.0, 1)), None, False),
        (row("", auto="OutOfMemoryError: 1", ghost=(1.0, 1)), None, False),
        (row("", auto="OutOfMemoryError: 1", ghost="OutOfMemoryError: 1"), None, True),
    ],
)
def test_which_choice_is_right(
    benchmark_of_auto: ModuleType, found: dict[str, Any], fastest: str | None, right: bool
) -> None:
    judged = benchmark_of_auto.judge(found)
    assert (judged["fastest"], judged["right"]) == (fastest, right)
    table = benchmark_of_auto.markdown({"machine": {"device": "a GPU"}, "rows": [found | judged]})
    assert f"Right in {int(right)} of 1 configurations" in table
