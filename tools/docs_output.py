# SPDX-License-Identifier: Apache-2.0
"""Runs the commands of pages of the documentation, and writes anew what they print: `docs_output.py [PAGE ...]`.

A page's commands run one after the other in a folder: its bash blocks, and those of comments such as

    <!-- runs opacus-memprof report memprof_profile --full -->
    <!-- runs opacus-memprof plan --gpu t4 examples/train_transformer.py --batch-size 128, exits with 3 -->

Another comment stands above a block: `<!-- exits with 1 -->` above a command, `<!-- file train.py -->` above a program.
A program that the page does not show stands in a comment itself, below `<!-- file train.py` and above `-->`.
Each line of a text block, or of an indented one, is a line that a command above it has printed, or a part of one. Where
its numbers have changed, it is replaced by the line that is printed now; where its words have, a person has to write it
anew.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
_GUIDES = ("flash_clip", "oom", "planning", "pytest", "reading", "virtual_gpu")
PAGES = [
    *sorted((DOCS / "tutorials").glob("*.md")),
    DOCS / "zh" / "oom.md",
    *(DOCS / f"{name}.md" for name in _GUIDES),
]
_PART = re.compile(
    r"^<!-- runs (?P<runs>.+?)(?:, exits with (?P<exits>\d+))? -->\n"
    r"|^<!-- file (?P<hidden>\S+)\n(?P<program>.*?)^-->\n"
    r"|(?:^<!-- (?P<note>[^\n]+?) -->\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```\n"
    r"|(?P<indented>(?:^    [^\n]*\n)+)",
    re.MULTILINE | re.DOTALL,
)
_COMMAND = re.compile(r"(opacus-memprof [a-z]+|python|pytest|torchrun) ")
_ROUNDING = re.compile(r"\d\.\de-\d\d")  # differs between processors


def _printed_by(
    command: str, folder: Path, environment: dict[str, str], exit_code: int, python: Sequence[str]
) -> list[str]:
    assert _COMMAND.match(command), command
    words = command.replace("opacus-memprof", "-m opacus_memprof", 1).removeprefix("python ").split()
    ran = subprocess.run(
        [*python, *words], cwd=folder, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=600,
    )  # fmt: skip
    assert ran.returncode == exit_code, (command, ran.stdout)
    return ran.stdout.replace(f"{folder}/", "").splitlines()


def _without_numbers(line: str) -> str:
    line = re.sub(r"\d[\d.,]*( [KMG]iB\b)?", "#", _ROUNDING.sub("#", line))
    return " ".join(re.sub("█+", "█", line).split())


def _anew(shown: str, printed: list[str]) -> str:
    """The lines of a block as they have been printed now, in the same order."""
    lines, position = [], 0
    for line in shown.splitlines():
        wanted = _without_numbers(line)
        likes = (number for number in range(position, len(printed)) if wanted in _without_numbers(printed[number]))
        number = next(likes, None)
        if number is None:
            raise SystemExit(f"nothing has printed this, nor its like: {line}")
        position = number + 1
        same = _ROUNDING.sub("#", line) in _ROUNDING.sub("#", printed[number])
        lines.append(line if same else printed[number].rstrip())
    return "".join(f"{line}\n" for line in lines)


def regenerated(page: Path, folder: Path, python: Sequence[str] = (sys.executable,)) -> str:
    """The text of a page whose commands have run in this empty folder, with `python` as the command of a Python."""
    for name in ("examples", "tests"):
        (folder / name).symlink_to(ROOT / name)
    environment = os.environ | {
        "COLUMNS": "80",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    environment.pop("OPACUS_MEMPROF_LANGUAGE", None)
    if page.parent.name == "zh":
        environment["OPACUS_MEMPROF_LANGUAGE"] = "zh"
    printed: list[str] = []
    before = ""  # the program that the page has last saved

    def part(found: re.Match[str]) -> str:
        nonlocal before
        whole, note, text = found[0], found["note"] or "", found["text"]
        if command := found["runs"] or (found["kind"] == "bash" and text.strip()):
            exits = int(found["exits"] or note.removeprefix("exits with ") or 0)
            printed.extend(_printed_by(command, folder, environment, exits, python))
        elif found["hidden"]:
            (folder / found["hidden"]).write_text(found["program"])
        elif note.startswith("file "):
            before = text
            (folder / note.removeprefix("file ")).write_text(text)
        elif note.startswith("into a copy, "):  # docs/tutorials/private.md says where it has to stand
            changed = before.replace("import opacus_memprof\n", f"import opacus_memprof\n\n\n{text}\n")
            (folder / note.removeprefix("into a copy, ")).write_text(
                changed.replace("nn.ReLU()", "Centered(), nn.ReLU()")
            )
        elif found["kind"] == "text":
            return whole.replace(text, _anew(text, printed))
        elif found["indented"] and not _COMMAND.match(found["indented"].strip()):
            shown = re.sub("^    ", "", found["indented"], flags=re.MULTILINE)
            return re.sub("^(?=.)", "    ", _anew(shown, printed), flags=re.MULTILINE)
        return whole

    return _PART.sub(part, page.read_text(encoding="utf-8"))


def main(pages: list[Path]) -> None:
    for page in pages:
        with tempfile.TemporaryDirectory() as folder:
            page.write_text(regenerated(page, Path(folder)), encoding="utf-8")


if __name__ == "__main__":
    main([Path(name).resolve() for name in sys.argv[1:]] or PAGES)
