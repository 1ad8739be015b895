# SPDX-License-Identifier: Apache-2.0
"""Drawn models: clean ones are exact, ones with planted mixing are refused, and hard ones are exact or refused."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.exactness.judge import Batch, Step, Verdict, judge, step
from tests.exactness.messages import lacks
from tests.exactness.pieces import CLEAN, HARD, MIXING, WIDTH, Drawn, Piece
from tests.exactness.program import floats, losses_of_outputs


@dataclass(frozen=True)
class Draw:
    """A drawn program.

    Attributes:
        pieces: names of pieces, in order.
        skips: whether there is a connection around each.
        lengths: valid tokens of each sample, by step.
        shared: whether the first piece is used once more at the end.
        passes: flash_clip_passes.
        seed: of weights and data.
    """

    pieces: Sequence[str]
    skips: Sequence[bool]
    lengths: Sequence[Sequence[int]]
    shared: bool
    passes: int
    seed: int

    def verdict(self) -> Verdict:
        """Runs the program."""
        known: dict[str, Piece] = {**MIXING, **HARD, **CLEAN}
        build: Callable[[], Any] = lambda: Drawn([known[n]() for n in self.pieces], list(self.skips), self.shared)  # noqa: E731
        return judge(build, self.steps, losses_of_outputs, self.seed, passes=self.passes)

    def steps(self) -> list[Step]:
        """The batches, of one step each."""
        return [step(_batch(lengths)) for lengths in self.lengths]


def _batch(lengths: Sequence[int]) -> Batch:
    mask = torch.arange(4).unsqueeze(0) < torch.tensor(lengths).unsqueeze(1)
    return floats(len(lengths), 4, WIDTH, mask=mask)


@st.composite
def draws(draw: Any, extra: Sequence[str] = (), sizes: tuple[int, int] = (1, 9)) -> Draw:
    """Programs of clean pieces, with one of the extra ones among them if there are any."""
    pieces = draw(st.lists(st.sampled_from(list(CLEAN)), min_size=0 if extra else 1, max_size=4))
    if extra:
        pieces.insert(draw(st.integers(0, len(pieces))), draw(st.sampled_from(list(extra))))
    batch = st.lists(st.integers(1, 4), min_size=sizes[0], max_size=sizes[1])
    return Draw(
        pieces,
        [draw(st.booleans()) for _ in pieces],
        draw(st.lists(batch, min_size=1, max_size=3)),
        draw(st.booleans()),
        draw(st.sampled_from([1, 1, 2])),
        draw(st.integers(0, 99)),
    )


_EXAMPLES: dict[str, Any] = {
    "derandomize": True,
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


@pytest.mark.parametrize("examples", [12, pytest.param(220, marks=pytest.mark.nightly)])
def test_clean_programs_are_exact(examples: int) -> None:
    @settings(max_examples=examples, **_EXAMPLES)
    @given(draws())
    def is_exact(drawn: Draw) -> None:
        verdict = drawn.verdict()
        assert verdict.outcome == "exact", f"{verdict.outcome}: {verdict.message}"

    is_exact()


@pytest.mark.parametrize("examples", [40, pytest.param(80, marks=pytest.mark.nightly)])
def test_planted_mixing_is_refused(examples: int) -> None:
    @settings(max_examples=examples, **_EXAMPLES)
    @given(draws(list(MIXING), (3, 9)))
    def is_refused(drawn: Draw) -> None:
        verdict = drawn.verdict()
        assert verdict.outcome == "refused", f"{verdict.outcome}: {verdict.message}"
        assert not lacks(verdict.message), f"{lacks(verdict.message)}: {verdict.message}"

    is_refused()


@pytest.mark.parametrize("examples", [12, pytest.param(80, marks=pytest.mark.nightly)])
def test_hard_pieces_are_exact_or_refused(examples: int) -> None:
    @settings(max_examples=examples, **_EXAMPLES)
    @given(draws(list(HARD)))
    def is_exact_or_refused(drawn: Draw) -> None:
        verdict = drawn.verdict()
        assert verdict.outcome in ("exact", "refused"), f"{verdict.outcome}: {verdict.message}"
        if verdict.outcome == "refused":
            assert not lacks(verdict.message), f"{lacks(verdict.message)}: {verdict.message}"

    is_exact_or_refused()
