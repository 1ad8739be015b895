# SPDX-License-Identifier: Apache-2.0
"""Each command in a block of README or docs is run by a test, or NOT_RUN says why none does.

A test runs it with other values: a smaller model, a directory of its own. tests/test_requirements.py asserts of all of
them that command and options exist.
"""

import re
import runpy
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = runpy.run_path(str(ROOT / "tools" / "docs_output.py"))
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").rglob("*.md")) if "results" not in page.parts)]
PROGRAMS = "opacus-memprof [a-z]|torchrun|accelerate|srun|pytest|python|pip|uvx|make"
COMMAND = re.compile(rf"^(?:\$ )?((?:[A-Z_]+=\S+ )*(?:{PROGRAMS}).*)$")
# By words of the command.
NOT_RUN = {
    "pip install": "needs the repository's address, or wheels: `make wheels` and `make release-check` install both",
    "uvx": "needs the repository's address: `make release-check` runs it with a source distribution",
    "make": "`.ci/run` runs `make test`, which begins with what `make profile` installs; `make try` runs its command",
    "git+https": "needs GitHub: tests/integration/test_bisect.py bisects a repository on this disk",
    "git+file://": "needs a repository of the reader's: the same test makes one",
    "srun": "needs Slurm: tests/unit/test_launch.py sets its variables",
    "accelerate launch": "needs Accelerate's configuration: tests/integration/test_trainers.py trains with Accelerate",
    "--nproc 4": "needs several GPUs: tests/integration/test_sharded_run.py runs two, on the CPU",
    "--executor submitit": "needs Slurm: tests/unit/test_sweep_launcher.py has submitit's own processes instead",
    "python -m torch.cuda._memory_viz": "is torch's own, and its page loads a script from elsewhere",
    "sbatch": "needs Slurm: it stands for what a user starts",
}
TESTS = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}


def shown(page: Path) -> set[str]:
    """The commands in blocks of a page, without their comments, less those that `make docs-output` runs."""
    text, commands, is_block, runs = page.read_text(encoding="utf-8"), set(), False, set()
    if page in OUTPUT["PAGES"]:
        for found in OUTPUT["_PART"].finditer(text):
            runs |= {found["runs"] or (found["kind"] == "bash" and found["text"].strip()) or ""}
    for line in text.replace("\\\n", " ").splitlines():
        is_block ^= line.startswith("```")
        if (is_block or line.startswith("    ")) and (found := COMMAND.match(line.strip())):
            commands.add(" ".join(re.sub(r"\s#.*", "", found[1]).split()))
    return commands - runs


SHOWN = sorted({command for page in PAGES for command in shown(page)})


def runs(test: str, command: str) -> bool:
    """Whether a test's file has the subcommand, or the program, as a word of a command, and all of its options.

    What stands behind a script is the script's.
    """
    words = shlex.split(re.split(r" > | && ", command)[0])
    script = next((at for at, word in enumerate(words) if word.endswith(".py")), len(words))
    name = next((words[at + 1] for at, word in enumerate(words) if re.fullmatch("opacus[-_]memprof", word)), words[0])
    options = {word.partition("=")[0].replace("_", "-") for word in words[:script] if word[:2] == "--"}
    dashed = re.sub("(?<=[a-z])_(?=[a-z])", "-", test)
    return (
        (re.search(rf"""["'` ]{name}["'` ]""", test) is not None or (name == "run" and "*RUN" in test))
        and (words[0] != "torchrun" or "torch.distributed.run" in test)
        and all(re.search(rf"(?<![\w-]){option}(?![\w-])", dashed) for option in options)
    )


def reasons(command: str) -> list[str]:
    return [part for part in NOT_RUN if f" {part}" in f" {command}".replace("'", "").replace("@ ", " ")]


@pytest.mark.parametrize("command", SHOWN)
def test_a_command_that_pages_show_is_run(command: str) -> None:
    assert reasons(command) or any(runs(test, command) for test in TESTS.values())


def test_reasons_are_of_commands_that_are_shown() -> None:
    assert {reason for command in SHOWN for reason in reasons(command)} == NOT_RUN.keys()
    assert len(SHOWN) > 50


def test_a_command_that_no_test_runs_is_found_out() -> None:
    unsaid = "-".join(("no", "such", "word"))  # which this file does not have either
    for command in (f"opacus-memprof {unsaid} DIR --html", f"opacus-memprof report DIR --{unsaid}"):
        assert not any(runs(test, command) for test in TESTS.values())
