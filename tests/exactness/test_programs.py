# SPDX-License-Identifier: Apache-2.0
"""Programs made to break flash_clip are exact, or refused with a sentence that says where and what to change."""

import pytest

from tests.exactness.messages import lacks
from tests.exactness.programs import PROGRAMS


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if each.nightly else ()) for name, each in PROGRAMS.items()]
)
def test_outcome(name: str) -> None:
    program = PROGRAMS[name]
    verdict = program.verdict()
    assert program.accepts(verdict), f"{verdict.outcome} where {program.allowed} is allowed: {verdict.message}"
    if verdict.outcome == "refused":
        assert not lacks(verdict.message), f"{lacks(verdict.message)}: {verdict.message}"
