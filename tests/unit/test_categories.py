# SPDX-License-Identifier: Apache-2.0
"""The table of categories and everything that must agree with it."""

import re
from pathlib import Path

import pytest

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles import core
from opacus_memprof.profiles.categories import BY_NAME, CATEGORIES, FORWARD_UNDECIDED, NOT_IN_CORE, PARTS, REPORTED
from opacus_memprof.pytest_plugin.limits import check_filters
from opacus_memprof.recording import native
from opacus_memprof.reports.figures import category_color

ROOT = Path(__file__).parents[2]


def test_the_core_has_the_categories_that_the_table_says() -> None:
    assert {category.name for category in CATEGORIES if category.core} == set(core.BUILTIN_CATEGORIES)
    assert len(BY_NAME) == len(CATEGORIES)


def test_python_s_own_categories_have_ids_before_hooks_are_imported() -> None:
    first = len(core.BUILTIN_CATEGORIES)
    assert native.names()["categories"][first : first + len(NOT_IN_CORE)] == list(NOT_IN_CORE)


def test_the_document_has_the_table_of_categories() -> None:
    document = (ROOT / "docs" / "categories.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (yes|) \| (yes|) \|$", document, re.MULTILINE)
    mark = {True: "yes", False: ""}
    assert rows == [
        (name, BY_NAME[name].meaning, mark[BY_NAME[name].per_sample], mark[BY_NAME[name].private]) for name in REPORTED
    ]


@pytest.mark.parametrize("name", REPORTED)
def test_every_category_has_a_limit_a_colour_and_a_meaning(name: str) -> None:
    check_filters(name, None, None)
    assert category_color(name) == BY_NAME[name].color
    assert BY_NAME[name].meaning


@pytest.mark.parametrize("name", [FORWARD_UNDECIDED, *PARTS, "teachers"])
def test_what_no_profile_has_cannot_be_limited(name: str) -> None:
    with pytest.raises(MemprofError, match="there is no category"):
        check_filters(name, None, None)
