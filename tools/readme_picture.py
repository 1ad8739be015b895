# SPDX-License-Identifier: Apache-2.0
"""Makes the terminal picture at the top of README.md, docs/images/out_of_memory.svg, from two runs on a virtual GPU.

    python tools/readme_picture.py

The first run of examples/train_transformer.py runs out of memory, the second makes the change that the first suggests.
"""

import html
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "out_of_memory.svg"
WIDTH = 106
COMMAND = "opacus-memprof run --virtual-gpu t4 train.py --batch-size 128 --steps 2"
CHANGE = "--max-physical-batch-size"


def screen(command: str, folder: str) -> str:
    """What a command prints, with its colours."""
    words = [sys.executable, "-m", "opacus_memprof", *command.split()[1:]]
    environment = {"PYTHONPATH": str(ROOT), "FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        words, cwd=folder, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return ran.stdout


def part(printed: str, first: str, last: str) -> str:
    """The lines from the one that has the first text to the one before the last text."""
    lines = printed.splitlines()
    plain = [Text.from_ansi(line).plain for line in lines]
    start = next(number for number, line in enumerate(plain) if first in line)
    end = next(number for number, line in enumerate(plain) if number > start and last in line)
    return "\n".join(lines[start:end])


def drawn() -> str:
    """The picture, from runs."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").symlink_to(ROOT / "examples" / "train_transformer.py")
        failed = screen(COMMAND, folder)
        suggested = re.search(r"max_physical_batch_size=(\d+)", failed)
        assert suggested is not None, failed
        changed = f"{COMMAND} {CHANGE} {suggested[1]}"
        fits = screen(changed, folder)
    for command, shown in (
        (COMMAND, part(failed, "OUT OF MEMORY", "MODULES")),
        (changed, part(fits, "opacus-memprof  train.py", "COULD BE")),
    ):
        console.print(Text(f"$ {command}", style="bold"), soft_wrap=False)
        console.print(Text("…", style="dim"))
        console.print(Text.from_ansi(shown))
    frame = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)  # fonts of another server
    return console.export_svg(title="opacus-memprof", code_format=frame, unique_id="memprof")


def shown(picture: str) -> list[str]:
    """Its pieces of text."""
    return [html.unescape(text).rstrip() for text in re.findall(r"<text [^>]*>([^<]*)</text>", picture)]


if __name__ == "__main__":
    PICTURE.write_text(drawn())
