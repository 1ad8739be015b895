# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium of this machine, driven by Playwright, and what tests ask of a page that it has opened."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> Iterator[Any]:
    """A running browser. Skips the test where there is none."""
    driver = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser: pip install playwright")
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("needs a browser: apt-get install chromium")
    with driver.sync_playwright() as playwright:
        # Chromium's sandbox refuses root and many containers; these pages are our own.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


class Opened:
    """A page that is open, and what it has complained of."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.complaints: list[str] = []
        page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self._requested(request.url))

    def _requested(self, url: str) -> None:
        if not url.startswith("file:"):
            self.complaints.append(f"request of {url}")

    def open(self, path: Path) -> "Opened":
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("footer")
        return self

    def bytes(self, selector: str) -> list[int]:
        """The exact numbers of all sizes within the elements, in their order."""
        found = self.page.locator(f"{selector} [data-bytes]")
        return [int(size) for size in found.evaluate_all("all => all.map((one) => one.dataset.bytes)")]

    def texts(self, selector: str) -> list[str]:
        return [text.strip() for text in self.page.locator(selector).all_inner_texts()]

    def rows(self, label: str) -> list[list[str]]:
        """The cells of a table, all rows shown; a size is its exact number."""
        table = self.page.locator(f'.table:has(table[aria-label="{label}"])')
        for button in table.get_by_role("button", name="Show all").all():
            if button.is_visible():
                button.click()
        cell = "(cell) => cell.querySelector('[data-bytes]')?.dataset.bytes ?? cell.innerText.trim()"
        found: list[list[str]] = table.locator("tbody tr").evaluate_all(
            f"rows => rows.map((row) => [...row.cells].map({cell}))"
        )
        return found

    def view(self) -> tuple[float, float]:
        """The part of the timeline in view."""
        shown = self.page.locator(".chart").evaluate("(chart) => [chart.dataset.from, chart.dataset.to]")
        return float(shown[0]), float(shown[1])
