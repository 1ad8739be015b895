# SPDX-License-Identifier: Apache-2.0
"""What docs/requirements.md says to keep a promise exists, and so does every command that any page shows."""

import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from opacus.utils import batch_memory_manager

import opacus_memprof
from opacus_memprof.cli import app
from opacus_memprof.toolkit import debugger, training

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "requirements.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (.*) \| (.*) \|$", PAGE, re.MULTILINE)
ROWS = [row for row in ROWS if row[0] != "promise"]
NAMES = sorted({name for _, kept_by in ROWS for name in re.findall(r"`([^`]+)`", kept_by)})
GROUP = typer.main.get_command(app)
COMMANDS: dict[str, Any] = GROUP.commands  # type: ignore[attr-defined]
SOURCE = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "opacus_memprof").rglob("*.py")))
OWNERS = (
    opacus_memprof,
    opacus_memprof.GPUMemoryProfiler,
    debugger.MemoryDebugger,
    training.TrainingProfiler,
    batch_memory_manager,
)
# What a program writes itself.
ELSEWHERE = (
    "except",
    "torch.nn.Module",
    "torch.cuda.empty_cache()",
    "setLevel",
    'pandas.DataFrame(result["breakdown"]',
)


def options_of(name: str) -> set[str]:
    return {option for parameter in COMMANDS[name].params for option in (*parameter.opts, *parameter.secondary_opts)}


def has_option(command: str, option: str) -> bool:
    """Whether a command takes an option, by this name or an older one."""
    normalize = COMMANDS[command].context_settings.get("token_normalize_func") or (lambda text: text.replace("_", "-"))
    return option in options_of(command) or "--" + normalize(option.removeprefix("--")) in options_of(command)


def is_command(text: str) -> bool:
    command, *rest = shlex.split(text.removeprefix("opacus-memprof "))
    return command in COMMANDS and all(has_option(command, word) for word in rest if word.startswith("--"))


def is_call(text: str) -> bool:
    """Whether a Python name exists and takes the keyword arguments that are named."""
    path, _, arguments = text.partition("(")
    *parents, last = path.removeprefix("opacus_memprof.").split(".")
    owners: list[Any] = list(OWNERS)
    for parent in parents:
        owners = [getattr(owner, parent) for owner in (*owners, opacus_memprof.toolkit) if hasattr(owner, parent)]
    found = [getattr(owner, last) for owner in owners if hasattr(owner, last)]
    words = re.findall(r"(\w+)=", arguments)
    return (
        any(set(words) <= set(inspect.signature(callable_).parameters) for callable_ in found) if words else bool(found)
    )


def exists(name: str) -> bool:
    if name.startswith(ELSEWHERE) or name in ("opacus_memprof", "opacus_memprof.toolkit"):
        return True
    if name.startswith(("pytest ", "python ")):
        return (ROOT / name.split()[-1]).exists()
    if name.startswith("opacus-memprof ") or name.split()[0] in COMMANDS:
        return is_command(name)
    if name.startswith("--"):
        return any(has_option(command, name.split()[0]) for command in COMMANDS)
    if re.search(r"\.(png|json|jsonl|csv|txt|tex|log|py)$", name):
        stem = re.split(r"NAME|YYYYMMDD|\*|\.", name)[0].rstrip("_")
        files = [path.name for path in (*ROOT.iterdir(), *ROOT.glob("tests/*/*.py"))]
        return name in files or f'"{stem}' in SOURCE  # a string that begins like it, to which the rest is added
    if re.fullmatch(r"[\w.]+(\(.*\))?", name) and is_call(name):
        return True
    return name.isidentifier() and re.search(rf"\b{name}\b", SOURCE) is not None  # a key, a category or an attribute


@pytest.mark.parametrize("name", NAMES)
def test_what_keeps_a_promise_exists(name: str) -> None:
    assert exists(name)


@pytest.mark.parametrize(
    "name",
    [
        "sweep --no_such_option",
        "no-such-command",
        "opacus-memprof nothing",
        "--nothing",
        "no_such_picture.png",
        "GPUMemoryProfiler(nothing=…)",
        "GPUMemoryProfiler.nothing",
        "generate_nothing",
    ],
)
def test_what_does_not_exist_is_found_out(name: str) -> None:
    assert not exists(name)


def links() -> Iterator[str]:
    yield from re.findall(r"\]\(([^)]+)\)", PAGE)


@pytest.mark.parametrize("link", sorted(set(links())))
def test_links_lead_somewhere(link: str) -> None:
    page, _, anchor = link.partition("#")
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    headings = [
        re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", text, re.M)
    ]
    assert not anchor or anchor in headings


def test_no_promise_is_listed_twice() -> None:
    for section in PAGE.split("\n## ")[1:]:
        promises = [promise for promise, _ in re.findall(r"^\| (.*) \| (.*) \|$", section, re.MULTILINE)]
        assert len(promises) == len(set(promises))


MIGRATION, CHINESE = (
    (ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("migration.md", "zh/migration.md")
)


def replacements(page: str) -> list[str]:
    """The code in the last column of the tables."""
    rows = re.findall(r"^\| .* \| (.*) \|$", page, re.MULTILINE)
    return [code for row in rows for code in re.findall(r"`([^`]+)`", row)]


def test_scripts_are_replaced_by_the_same_in_both_languages() -> None:
    assert replacements(MIGRATION) == replacements(CHINESE)
    assert len(replacements(MIGRATION)) > 25


@pytest.mark.parametrize("code", sorted(set(replacements(MIGRATION))))
def test_what_replaces_a_script_exists(code: str) -> None:
    if imported := re.fullmatch(r"from opacus_memprof import (\w+)", code):
        assert hasattr(opacus_memprof, imported[1])
    elif re.match(r"OPACUS_MEMPROF_|[A-Z_]+=", code):
        assert code.partition("=")[0] in SOURCE
    else:
        assert exists(code)


DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
]
# In a block or a span of code, up to its end, a comment or the shell's next word.
WRITTEN = re.compile(r"(?:`|^ *|-m )opacus[-_]memprof ([a-z-]+(?: [^`\n]*?)?)(?=`|$|  #| && | > )", re.MULTILINE)


def written_commands(page: Path) -> list[str]:
    return WRITTEN.findall(page.read_text(encoding="utf-8").replace("\\\n", " "))


def options_that_are_not_there(line: str) -> list[str]:
    """Those of the program's own command: what stands behind a script is the script's."""
    name, *words = shlex.split(line)
    script = next((at for at, word in enumerate(words) if word.endswith(".py")), len(words))
    options = [word.partition("=")[0] for word in words[:script] if word.startswith("--")]
    return [option for option in options if not has_option(name, option)]


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_pages_show_exist(page: Path) -> None:
    for line in written_commands(page):
        assert line.split()[0] in COMMANDS, line
        assert options_that_are_not_there(line) == [], line


def test_shown_commands_are_found() -> None:
    assert sum(len(written_commands(page)) for page in DOCUMENTS) > 150
    assert options_that_are_not_there("report DIR --no-such-option") == ["--no-such-option"]
    assert options_that_are_not_there("run --virtual-gpu t4 train.py --no-such-option") == []
