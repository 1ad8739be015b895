# SPDX-License-Identifier: Apache-2.0
"""The judge finds faults that are planted in clipping, and tells exact programs from others."""

from typing import Any

import pytest
from torch import nn

from opacus_memprof.clipping import DPOptimizerFlashClip
from opacus_memprof.clipping.arguments import ClipRule
from opacus_memprof.errors import MemprofError
from tests.exactness.judge import Verdict, judge
from tests.exactness.messages import lacks
from tests.exactness.program import losses_of_outputs, of_shape


def _judge(**options: Any) -> Verdict:
    return judge(
        lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)),
        of_shape(5, 6, count=2),
        losses_of_outputs,
        **options,
    )


def test_plain_models_are_exact() -> None:
    verdict = _judge(removes=True)
    assert verdict.outcome == "exact"
    assert verdict.error < 1e-12
    assert 0.1 < verdict.contribution <= 1 + 1e-3


def test_factors_that_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    factors = ClipRule.factors
    monkeypatch.setattr(ClipRule, "factors", lambda self, norms: 1.01 * factors(self, norms))
    assert _judge().outcome == "wrong"
    verdict = _judge(removes=True, tolerance=0.5)  # only the contribution shows it
    assert verdict.outcome == "wrong"
    assert 1.009 < verdict.contribution < 1.011


def test_contributions_where_only_checked_programs_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal without checks is no contribution of zero."""
    factors, step = ClipRule.factors, DPOptimizerFlashClip.step
    monkeypatch.setattr(ClipRule, "factors", lambda self, norms: 1.01 * factors(self, norms))

    def refuse_unchecked(self: Any, closure: Any = None) -> None:
        if self._module.situations.check == "off":
            raise MemprofError("checks are off.")
        step(self, closure)

    monkeypatch.setattr(DPOptimizerFlashClip, "step", refuse_unchecked)
    verdict = _judge(removes=True, tolerance=0.5)
    assert verdict.outcome == "wrong"
    assert 1.009 < verdict.contribution < 1.011


def test_a_parameter_without_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    add_noise = DPOptimizerFlashClip.add_noise

    def drop_last(self: Any, divisor: float = 1) -> None:
        add_noise(self, divisor)
        self.params[-1].grad.zero_()

    monkeypatch.setattr(DPOptimizerFlashClip, "add_noise", drop_last)
    assert _judge().outcome == "wrong"


def test_refusals_after_parameters_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    step = DPOptimizerFlashClip.step

    def refuse_late(self: Any, closure: Any = None) -> None:
        step(self, closure)
        raise MemprofError("too late.")

    monkeypatch.setattr(DPOptimizerFlashClip, "step", refuse_late)
    verdict = _judge()
    assert verdict.outcome == "wrong"
    assert "had changed before" in verdict.message


@pytest.mark.parametrize(("error", "outcome"), [(MemprofError, "refused"), (ValueError, "crash")])
def test_errors(monkeypatch: pytest.MonkeyPatch, error: type[Exception], outcome: str) -> None:
    def fail(self: Any, closure: Any = None) -> None:
        raise error("layer 'a' is not known: use another.")

    monkeypatch.setattr(DPOptimizerFlashClip, "step", fail)
    verdict = _judge()
    assert verdict.outcome == outcome
    assert "layer 'a' is not known" in verdict.message


@pytest.mark.parametrize(
    ("message", "missing"),
    [
        ("layer 'a.b' (Linear) mixes samples: use GroupNorm.", ""),
        ("samples mix: use GroupNorm.", "names no module or shape"),
        ("layer 'a.b' (Linear) mixes samples.", "does not say what to change"),
    ],
)
def test_what_refusals_lack(message: str, missing: str) -> None:
    assert lacks(message) == missing
