# SPDX-License-Identifier: Apache-2.0
"""The commands of tutorials print what the page shows; headings of troubleshooting are messages."""

import ast
import re
import runpy
from pathlib import Path

import pytest

from tests.warm_python import interpreter

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = runpy.run_path(str(ROOT / "tools" / "docs_output.py"))


# The commands of other pages are run by test_plan, test_script_check and test_readme, and their screens are those of
# tests/unit; the Chinese page runs what docs/tutorials/fit.md does, and tests/unit/test_language.py has its sentences.
_PAGES = [pytest.param(page, marks=pytest.mark.nightly if page.stem != "fit" else ()) for page in OUTPUT["PAGES"]]


@pytest.mark.slow
@pytest.mark.parametrize("page", _PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_a_page_shows_what_its_commands_print(page: Path, tmp_path: Path) -> None:
    from opacus_memprof.recording import native

    shown = page.read_text(encoding="utf-8")
    if "t4" in shown and not native.HAS_CUDA:
        pytest.skip("built without CUDA: there is no virtual GPU")
    assert OUTPUT["regenerated"](page, tmp_path, interpreter()) == shown


def test_lines_are_replaced_where_numbers_have_changed() -> None:
    printed = ["PEAK 9.00 MiB in step 1", "", "a  1024 B  ███", "largest error 2.1e-07: rounding"]
    anew = OUTPUT["_anew"]
    assert anew("PEAK 800 KiB in step 0\na  1 B  █\n", printed) == "PEAK 9.00 MiB in step 1\na  1024 B  ███\n"
    assert anew("largest error 1.8e-07\n", printed) == "largest error 1.8e-07\n"
    for other in ("PEAK 9.00 MiB in backward\n", "a  1 B  █\nPEAK 9.00 MiB in step 1\n"):
        with pytest.raises(SystemExit, match="nothing has printed this, nor its like"):
            anew(other, printed)


def messages() -> set[str]:
    """All texts of the sources, with … for what is filled in."""
    files = [*(ROOT / "opacus_memprof").rglob("*.py"), *(ROOT / "build_backend").glob("*.py")]
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.add("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
    return found


HEADINGS = re.findall(r"^### (.*)$", (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_headings_of_troubleshooting_are_the_messages() -> None:
    known = {re.sub(r"\s+", " ", message) for message in messages()}
    others = ("A ", "Much ", "No matching distribution")  # situations, and what pip says
    sentences = [heading for heading in HEADINGS if not heading.startswith(others)]
    assert len(sentences) > 15
    for sentence in sentences:
        assert any(sentence in message for message in known), sentence
