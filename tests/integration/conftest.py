# SPDX-License-Identifier: Apache-2.0
"""Tests that start where no other has left anything."""

import gc
from collections.abc import Iterator

import pytest

import opacus_memprof
from opacus_memprof.analysis import findings


@pytest.fixture
def clean_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No garbage of an earlier test is released in this one, and its session ends also where it fails.

    What an earlier test has allocated under a session and still keeps counts at this one's peak, so that no share of
    the peak decides here whether a finding is made.
    """
    monkeypatch.setattr(findings.run, "MATERIAL", 0.0)
    gc.collect()
    yield
    if (left := opacus_memprof.session.current()) is not None:
        left.close()
    gc.collect()
