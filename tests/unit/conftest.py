# SPDX-License-Identifier: Apache-2.0
"""Pages in a real browser, for tests of HTML."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Opened, chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Opened]]:
    """Opens a page. None may have written to the console or asked for anything when the test ends."""
    opened: list[Opened] = []

    def opening(path: Path, **context: Any) -> Opened:
        opened.append(Opened(browser.new_page(**{"viewport": {"width": 1200, "height": 900}, **context})))
        return opened[-1].open(path)

    yield opening
    complaints = [complaint for page in opened for complaint in page.complaints]
    for page in opened:
        page.page.close()
    assert complaints == []
