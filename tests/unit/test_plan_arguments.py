# SPDX-License-Identifier: Apache-2.0
"""Values for the arguments of the program that is planned, and changes of what it gives Opacus."""

from collections.abc import Iterator
from typing import Any

import opacus
import pytest
from opacus.utils.uniform_sampler import UniformWithReplacementSampler

from opacus_memprof.planning.changes import OpacusSetup
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


def test_a_program_of_ghost_clipping_gets_its_criterion_in_the_same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_private(engine: Any, *, criterion: str, grad_sample_mode: str) -> tuple[str, ...]:
        return ("model", "optimizer", "loader") if grad_sample_mode == "hooks" else ("model",)

    monkeypatch.setattr(opacus.PrivacyEngine, "make_private", make_private)
    OpacusSetup([{"kind": "grad_sample_mode", "value": "hooks"}])
    engine: Any = opacus.PrivacyEngine()
    prepared = engine.make_private(criterion="criterion", grad_sample_mode="ghost")
    assert prepared == ("model", "optimizer", "criterion", "loader")


def test_drawn_batches_have_the_size_that_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(sampler: Any) -> Iterator[list[int]]:
        raise AssertionError

    monkeypatch.setattr(UniformWithReplacementSampler, "__iter__", drawn)
    monkeypatch.setattr(opacus.PrivacyEngine, "make_private", opacus.PrivacyEngine.make_private)
    OpacusSetup([{"kind": "drawn_batch", "value": 7}])
    for samples, size in ((100, 7), (5, 5)):
        sampler = UniformWithReplacementSampler(num_samples=samples, sample_rate=0.5, steps=3)
        assert [*sampler] == [[*range(size)]] * 3
