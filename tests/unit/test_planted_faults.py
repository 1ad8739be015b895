# SPDX-License-Identifier: Apache-2.0
"""The list of planted faults fits the sources: each text occurs once, and the tests that must fail exist."""

import ast
from collections import Counter
from functools import cache

import pytest

from tests.exactness.programs import PROGRAMS
from tests.planted_faults import FAULTS
from tests.planted_faults.__main__ import Result
from tests.planted_faults.fault import ROOT, Fault


def test_faults_can_be_planted_and_their_tests_exist() -> None:
    assert {fault.name: wrong for fault in FAULTS if (wrong := what_is_wrong_with(fault))} == {}


def what_is_wrong_with(fault: Fault) -> str:
    try:
        planted = fault.planted()
        ast.parse(planted)
    except Exception as error:
        return repr(error)
    if planted == fault.source():
        return "it changes nothing"
    return ", ".join(test for test in fault.tests if not is_quick_test(test)) if fault.tests else "it has no tests"


def is_quick_test(test: str) -> bool:
    """Whether there is this test, and `make test` has it."""
    file, _, name = test.partition("::")
    if file == "tests/exactness/test_programs.py":
        program = PROGRAMS.get(name.partition("[")[2].rstrip("]"))
        return program is not None and not program.nightly
    return not name or f"def {name.partition('[')[0]}(" in source_of(file)


@cache
def source_of(file: str) -> str:
    return (ROOT / file).read_text()


def test_names_are_unique_and_enough() -> None:
    counts = Counter(fault.name for fault in FAULTS)
    assert max(counts.values()) == 1
    assert len(FAULTS) >= 250


@pytest.mark.parametrize("name", ["test_it", "test_it[the noise of 0\\\\.weight-ew]"])
@pytest.mark.parametrize("message", ["", " - AssertionError: 1 - 2"])
def test_the_first_failure_is_named_whole(name: str, message: str) -> None:
    printed = f"1 failed\nFAILED tests/test_a.py::{name}{message}\nFAILED tests/test_b.py::test_it\n"
    assert Result(1, printed).first_failure() == f"tests/test_a.py::{name}"
