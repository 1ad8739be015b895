# SPDX-License-Identifier: Apache-2.0
"""The commands of tutorials run one after the other and end as the page says; headings of troubleshooting are messages.

A command ends with exit code 0, unless a comment above it says otherwise. Lines that are shown have to be printed.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = [*sorted((ROOT / "docs" / "tutorials").glob("*.md")), ROOT / "docs" / "zh" / "oom.md"]
BLOCK = re.compile(r"(?:<!-- (?P<note>.+?) -->\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def run(command: str, folder: Path, language: str) -> subprocess.CompletedProcess[str]:
    assert re.match(r"(opacus-memprof|python) ", command), command
    command = command.replace("opacus-memprof", "-m opacus_memprof", 1).removeprefix("python ")
    return subprocess.run(
        [sys.executable, *command.split()],
        cwd=folder,
        env=os.environ | {"COLUMNS": "80", "OPACUS_MEMPROF_LANGUAGE": language},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_a_tutorial_runs(page: Path, tmp_path: Path) -> None:
    from opacus_memprof.recording import native

    text = page.read_text(encoding="utf-8")
    if "t4" in text and not native.HAS_CUDA:
        pytest.skip("built without CUDA: there is no virtual GPU")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    language = "zh" if page.parent.name == "zh" else "en"
    printed = ""
    ran = 0
    for block in BLOCK.finditer(text):
        note = block["note"] or ""
        if block["kind"] == "python" and note.startswith("file "):
            (tmp_path / note.removeprefix("file ")).write_text(block["text"])
        elif (
            block["kind"] == "python" and page.stem == "private"
        ):  # the change that the third step of this tutorial describes
            original = (tmp_path / "train_private.py").read_text()
            changed = original.replace("import opacus_memprof\n", f"import opacus_memprof\n\n\n{block['text']}\n")
            (tmp_path / "train_mixing.py").write_text(changed.replace("nn.ReLU()", "Centered(), nn.ReLU()"))
        elif block["kind"] == "bash":
            completed = run(block["text"].strip(), tmp_path, language)
            expected = re.fullmatch(r"exits with (\d)", note)
            assert completed.returncode == int(expected[1] if expected else 0), completed.stdout
            printed += completed.stdout
            ran += 1
        elif block["kind"] == "text":
            for line in block["text"].splitlines():
                assert "".join(line.split()) in "".join(printed.split()), line
    assert ran > 0


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
