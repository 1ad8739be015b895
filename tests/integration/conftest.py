# SPDX-License-Identifier: Apache-2.0
"""Tests that start where no other has left anything."""

import gc
from collections.abc import Iterator

import pytest

import opacus_memprof


@pytest.fixture
def no_remains() -> Iterator[None]:
    """No garbage of an earlier test is released in this one, and its session ends also where it fails."""
    gc.collect()
    yield
    if (left := opacus_memprof.session.current()) is not None:
        left.close()
    gc.collect()
