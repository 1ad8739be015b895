# SPDX-License-Identifier: Apache-2.0
"""The list of planted faults fits the sources: each text occurs once, and the tests that must fail exist."""

import ast
from collections import Counter

import pytest

from tests.exactness.programs import PROGRAMS
from tests.planted_faults import FAULTS
from tests.planted_faults.__main__ import Result
from tests.planted_faults.fault import ROOT, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted_and_its_tests_exist(fault: Fault) -> None:
    planted = fault.planted()
    assert planted != fault.source()
    ast.parse(planted)
    assert fault.tests
    for test in fault.tests:
        file, _, name = test.partition("::")
        source = (ROOT / file).read_text()
        assert not name or f"def {name.partition('[')[0]}(" in source, test
        if file == "tests/exactness/test_programs.py":
            assert name.partition("[")[2].rstrip("]") in PROGRAMS, test


def test_names_are_unique_and_enough() -> None:
    counts = Counter(fault.name for fault in FAULTS)
    assert max(counts.values()) == 1
    assert len(FAULTS) >= 250


@pytest.mark.parametrize("name", ["test_it", "test_it[the noise of 0\\\\.weight-ew]"])
@pytest.mark.parametrize("message", ["", " - AssertionError: 1 - 2"])
def test_the_first_failure_is_named_whole(name: str, message: str) -> None:
    printed = f"1 failed\nFAILED tests/test_a.py::{name}{message}\nFAILED tests/test_b.py::test_it\n"
    assert Result(1, printed).first_failure() == f"tests/test_a.py::{name}"
