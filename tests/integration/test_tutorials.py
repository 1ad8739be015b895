# SPDX-License-Identifier: Apache-2.0
"""The commands of tutorials print what the page shows; headings of troubleshooting are messages."""

import ast
import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.warm_python import interpreter

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = runpy.run_path(str(ROOT / "tools" / "docs_output.py"))
PICTURE = runpy.run_path(str(ROOT / "tools" / "readme_picture.py"))


# Of other pages tests/test_requirements.py asserts that commands and options exist; test_plan, test_script_check and
# test_readme run those that matter most. The Chinese page runs what docs/tutorials/fit.md does.
_PAGES = [pytest.param(page, marks=pytest.mark.nightly if page.stem != "fit" else ()) for page in OUTPUT["PAGES"]]


@pytest.mark.slow
@pytest.mark.parametrize("page", _PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_a_page_shows_what_its_commands_print(page: Path, tmp_path: Path) -> None:
    from opacus_memprof.recording import native

    shown = page.read_text(encoding="utf-8")
    if "t4" in shown and not native.HAS_CUDA:
        pytest.skip("built without CUDA: there is no virtual GPU")
    assert OUTPUT["regenerated"](page, tmp_path, interpreter()) == shown


@pytest.mark.nightly
def test_readme_s_picture_is_what_its_commands_print() -> None:
    from opacus_memprof.recording import native

    if not native.HAS_CUDA:
        pytest.skip("built without CUDA: there is no virtual GPU")
    assert PICTURE["shown"](PICTURE["drawn"]()) == PICTURE["shown"](PICTURE["PICTURE"].read_text(encoding="utf-8"))


_IS_INPUT = re.compile(
    r"(?:opacus-memprof|python|pytest|torchrun|accelerate|srun|pip|export|options:|%|loss) ?"  # mkdocstrings; IPython
)
# Blocks that are neither commands nor printed: what a diagram shows, and what stands for the user's own.
_SHOWN_ELSEWHERE = {"docs/format.md", "docs/how_it_works.md", "docs/experiments.md"}


def test_every_output_that_a_page_shows_is_regenerated() -> None:
    """A text block, or an indented one that begins with no command, is on a page that `make docs-output` writes."""
    written = {page.relative_to(ROOT).as_posix() for page in OUTPUT["PAGES"]} | _SHOWN_ELSEWHERE
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT).as_posix()
        if name not in written and not name.startswith("docs/results/"):
            parts = OUTPUT["_PART"].finditer(page.read_text(encoding="utf-8"))
            shown = [(it["text"] if it["kind"] == "text" else it["indented"]) or "" for it in parts]
            assert [block for block in shown if block and not _IS_INPUT.match(block.strip())] == [], name


def test_lines_are_replaced_where_numbers_have_changed() -> None:
    printed = ["PEAK 9.00 MiB in step 1", "", "a  1024 B  ███", "largest error 2.1e-07: rounding"]
    anew = OUTPUT["_anew"]
    assert anew("PEAK 800 KiB in step 0\na  1 B  █\n", printed) == "PEAK 9.00 MiB in step 1\na  1024 B  ███\n"
    assert anew("largest error 1.8e-07\n", printed) == "largest error 1.8e-07\n"
    for other in ("PEAK 9.00 MiB in backward\n", "a  1 B  █\nPEAK 9.00 MiB in step 1\n"):
        with pytest.raises(SystemExit, match="nothing has printed this, nor its like"):
            anew(other, printed)


def test_old_addresses_lead_to_new_ones(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    from mkdocs.exceptions import PluginError

    hooks = runpy.run_path(str(ROOT / "tools" / "docs_hooks.py"))
    config = SimpleNamespace(site_dir=tmp_path)
    found = [{"title": words, "text": "", "location": page} for words, page in hooks["SEARCHED"].items()]
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "search_index.json").write_text(json.dumps({"docs": found}))
    (tmp_path / "404.html").write_text('<link href="/opacus-memprof/assets/main.css">')
    (tmp_path / "results").mkdir()
    targets = {new.partition("#")[0] for new in hooks["MOVED"].values()}
    for page in targets:
        anchors = {new.partition("#")[2] for new in hooks["MOVED"].values() if new.startswith(page)}
        (tmp_path / page).write_text("".join(f'<h2 id="{anchor}">' for anchor in anchors))
    hooks["on_post_build"](config)
    moved = (tmp_path / "results" / "overhead_h200_small.html").read_text()
    assert 'content="0; url=index.html#what-profiling-costs"' in moved
    page = SimpleNamespace(url="install.html")
    assert '"does-it-work-here": "install.html#check-the-installation"' in hooks["on_page_content"](
        "", page=page, config=config, files=None
    )
    (tmp_path / "virtual_gpu.html").write_text("")
    with pytest.raises(PluginError, match=r"virtual_gpu.html#the-mark has moved to .*, which is not there"):
        hooks["on_post_build"](config)


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
