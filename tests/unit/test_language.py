# SPDX-License-Identifier: Apache-2.0
"""The catalogue has every message, and what the documents in Chinese show is said exactly so."""

import ast
import gettext
import io
import itertools
import re
import string
import sys
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from babel.messages import mofile, pofile
from made_profiles import a_device
from msgspec import UNSET
from rich.cells import cell_len
from rich.console import Console
from torch import nn
from typer import rich_utils

import opacus_memprof
from opacus_memprof import cli, language
from opacus_memprof.analysis.diff import GrowthLimit, compare_virtual, diff_profiles, dp_tax, exceeded_limits
from opacus_memprof.analysis.profile_view import unattributed_parts, view_profile
from opacus_memprof.errors import MemprofError
from opacus_memprof.language import in_language, set_language, tr
from opacus_memprof.profiles.categories import CATEGORIES
from opacus_memprof.profiles.profile import VirtualGpus
from opacus_memprof.reports.diff import diff_markdown, print_diff, print_tax
from opacus_memprof.reports.oom import print_oom
from opacus_memprof.reports.text import print_report, print_unattributed, privacy_sentence
from opacus_memprof.running.program import print_exception
from opacus_memprof.toolkit import anomalies, output, readings, snapshots
from tests.unit.test_summary import out_of_memory, private_profile
from tests.unit.test_tax import private_file, profile_in, vanilla_file

PACKAGE = Path(opacus_memprof.__file__).parent
CATALOGUE = PACKAGE / "locale" / "zh.po"


@cache
def nodes_of_the_package() -> list[list[ast.AST]]:
    """The nodes of each of the package's sources."""
    return [list(ast.walk(ast.parse(path.read_text(encoding="utf-8")))) for path in PACKAGE.rglob("*.py")]


@cache
def strings_of_the_package() -> list[tuple[str, bool]]:
    """Every string in the package's sources, and whether it is the message of a `tr`."""
    found = []
    for node in itertools.chain(*nodes_of_the_package()):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "tr":
            if isinstance(node.args[0], ast.Constant):
                found.append((node.args[0].value, True))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append((node.value, False))
    return found


def places(message: str) -> set[tuple[str | None, str | None, str | None]]:
    return {(name, spec, conversion) for _, name, spec, conversion in string.Formatter().parse(message) if name}


@pytest.fixture(autouse=True)
def language_of_nobody(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(language.VARIABLE, raising=False)
    yield
    set_language(None)


def test_no_message_is_missing() -> None:
    catalogue = language._catalogue("zh")
    assert sorted({message for message, is_said in strings_of_the_package() if is_said} - catalogue.keys()) == []


def test_no_translation_is_left_over() -> None:
    used = {text for text, _ in strings_of_the_package()}
    kinds = {text.replace("_", " ") for text in used}
    assert sorted(language._catalogue("zh").keys() - used - kinds - {""}) == []
    scripts = [path.read_text(encoding="utf-8") for path in (PACKAGE / "reports/html").glob("*.js")]
    told = "\n".join([*scripts, *kinds]).lower()  # kinds: phases and statuses
    texts = "\n".join(used | kinds)
    for context, message, _ in language._entries("zh"):
        fragments = re.split(r"^1 |\{\w+\}| · ", message.removesuffix("s") if "{count}" in message else message)
        if context == "page":
            own = re.findall("[A-Za-z]{3,}", re.sub(r"\{\w+\}", "", message))
            assert all(word.lower().removesuffix("s") in told for word in own), message
        if context == "sentence":
            assert all(fragment.strip(" .,:") in texts for fragment in fragments), message


def test_no_label_of_a_page_is_missing() -> None:
    found = set()
    for path in (PACKAGE / "reports/html").glob("*.js"):
        text = path.read_text(encoding="utf-8")
        found.update(
            re.findall(r'(?:title: |"aria-label": |card\("[a-z]+", |"summary", {}, |"h3", {}, )"([^"]*)"', text)
        )
    assert len(found) > 60
    with in_language("zh"):
        known = language.page_labels()
    assert sorted(label for label in found if re.search("[a-z]", label) and label not in known) == []
    assert language.page_labels() == {}


def sentences_of(tree: ast.AST) -> Iterator[ast.expr]:
    """What findings and suggestions are made with: sentences as they stand there, and constants with sentences."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            arguments = {keyword.arg: keyword.value for keyword in node.keywords}
            if node.func.id == "Finding":
                yield from node.args[3:5]
                yield from (arguments[name] for name in ("evidence", "remedy") if name in arguments)
            elif node.func.id == "suggest":
                yield node.args[3]
            elif node.func.id == "Suggestion":
                yield arguments["title"]
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if re.fullmatch("[A-Z_]+|remedy|title|consequence", node.targets[0].id):
                yield node.value
        elif isinstance(node, ast.FunctionDef) and node.name == "_remedy":
            yield from (each.value for each in ast.walk(node) if isinstance(each, ast.Return) and each.value)


def as_printed(expression: ast.expr) -> str:
    """The text of a sentence, with 7 for what varies; "" for another expression."""
    match expression:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(part.value if isinstance(part, ast.Constant) else "7" for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return as_printed(left) + as_printed(right)
        case ast.IfExp(body=body):
            return as_printed(body)
        case ast.Call(func=ast.Attribute(value=text, attr="rstrip")):
            return as_printed(text)
    return ""


@pytest.mark.parametrize(
    "file", ["findings.py", "defects.py", "job.py", "oom/advice/changes.py", "oom/advice/waste.py"]
)
def test_no_sentence_of_a_finding_or_a_suggestion_is_missing(file: str) -> None:
    tree = ast.parse((PACKAGE / "analysis" / file).read_text(encoding="utf-8"))
    found = [as_printed(expression) for expression in sentences_of(tree)]
    sentences = [text for text in found if re.match("[^.]*[a-z]+ [a-z]+ [a-z]+", text)]  # ". And so on" is a part
    assert sentences
    with in_language("zh"):
        missing = [text for text in sentences if not re.search(r"[\u4e00-\u9fff]", language.tr_sentence(text))]
    assert missing == []


def is_chinese(sentence: str, least_words: int = 0) -> bool:
    return re.search(r"[\u4e00-\u9fff]", language.tr_sentence(sentence, least_words)) is not None


def is_wholly_chinese(sentence: str) -> bool:
    """Whether the command line prints it in Chinese, and not only some parts of it."""
    rest = re.sub(r"`.*?`|pip install \S+", "", language.tr_sentence(sentence, 2))
    return is_chinese(sentence, 2) and not re.search(
        r"([a-z']+ ){2}[a-z']+|\b(the|is|not|there|give|use|of)\b", rest, re.ASCII
    )


SHOWN = (
    *("cli/debug.py", "cli/experiments.py", "cli/plan.py", "cli/profile.py", "integrations/hub.py", "jobs/progress.py"),
    *("reports/diff.py", "reports/oom.py", "reports/summary.py", "reports/text.py", "running/*.py", "versions.py"),
    *("planning/report.py", "planning/table.py", "loop_check/*.py", "experiments/[der]*.py", "experiments/summary.py"),
    *("analysis/diff.py", "analysis/job.py", "analysis/profile.py", "analysis/device.py", "analysis/torch_snapshot.py"),
    *("analysis/oom/advice/*.py", "virtual_gpu/describe.py", "recording/[afs]*.py", "session/out_of_memory.py"),
)


def shown_sentences(tree: ast.AST) -> Iterator[str]:
    """Every sentence of a source that `tr` does not have: neither docstrings, nor the help of options, nor code."""
    skipped = set()
    elsewhere = {"tr", "typer.Option", "typer.Argument", "require", "contain", "suggest"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (called := ast.unparse(node.func)) in elsewhere:
            code = node.args[4:5] if called == "suggest" else [node]
            skipped.update(id(part) for each in code for part in ast.walk(each))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))
        elif isinstance(node, ast.Compare):  # with the error of another package
            skipped.add(id(node.left))
        elif isinstance(node, ast.JoinedStr):
            skipped.update(id(part) for part in node.values if isinstance(part, ast.Constant))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Constant, ast.JoinedStr)) and id(node) not in skipped:
            text = as_printed(node)
            if not re.search(r"^#|  #|import |=7|\(\.\.\.", text):  # code
                yield text.strip()


@pytest.mark.parametrize("files", SHOWN)
def test_no_sentence_that_a_command_shows_is_missing(files: str) -> None:
    paths = list(PACKAGE.glob(files))
    assert paths
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    found = [text for tree in trees for text in shown_sentences(tree)]
    sentences = [text for text in found if re.search("(?:[a-z']+ ){4}[a-z']+", text)]
    with in_language("zh"):
        missing = [text for text in sentences if not (is_chinese(text) or is_chinese(text.removeprefix("7 ")))]
    assert missing == []


def help_of(command: Any) -> Iterator[str]:
    """The paragraphs of a command's help, of its options and its subcommands."""
    for described in (command, *command.params, command.get_help_option(typer.Context(command))):
        for attribute in ("help", "rich_help_panel"):
            text = getattr(described, attribute, None) or ""
            yield from (" ".join(part.split()) for part in text.split("\n\n") if part)
    for subcommand in getattr(command, "commands", {}).values():
        yield from help_of(subcommand)


def test_only_the_help_of_commands_and_options_is_translated() -> None:
    typers = {getattr(rich_utils, name) for name in cli.TYPER_CONSTANTS}
    assert typers | set(help_of(typer.main.get_command(cli.app))) == language._catalogue("zh", "help").keys()


@pytest.mark.parametrize("command", ["", "run", "report"])
def test_help_is_chinese(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(language.VARIABLE, "zh")
    monkeypatch.setattr(sys, "argv", ["opacus-memprof", *command.split(), "--help"])
    for name in cli.TYPER_CONSTANTS:
        monkeypatch.setattr(rich_utils, name, getattr(rich_utils, name))  # English again behind this test
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    own = capsys.readouterr().out
    assert not re.search("Show this|Options|Arguments|default|required", own)
    assert english_words(own.replace("Model Context Protocol on", "")) == []
    assert re.search(r"[\u4e00-\u9fff]", own)


@pytest.mark.parametrize(
    "call",
    [
        *(
            "run",
            "rum",
            "run --frob x.py",
            "run --device foo x.py",
            "report a b",
            "run --virtual-gpu",
            "report --full=3",
        ),
        *("sweep --batch-sizes a,b", "attach abc", "attach 0", "top --interval abc x", "diff --vanila x", "--frob"),
        "run --max-events 0 x.py",
    ],
)
def test_what_is_wrong_with_a_call_is_said_in_chinese(
    call: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(language.VARIABLE, "zh")
    monkeypatch.setattr(sys, "argv", ["opacus-memprof", *call.split()])
    for name in cli.TYPER_CONSTANTS:
        monkeypatch.setattr(rich_utils, name, getattr(rich_utils, name))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    said = "".join(line for line in printed.splitlines() if line.startswith("│"))
    assert re.search(r"[\u4e00-\u9fff]", said)
    assert not re.search(r"\b(Missing|No|such|value|requires|Got|Invalid|Input|not|option)\b", said)
    assert "查看帮助" in printed or "'--" in said


REFUSING = {"MemprofError", "MixingError", "NotCheckedError", "_print_note"}


def refusals() -> Iterator[str]:
    """The messages of errors that a user can fix, and what `run` says besides, from all sources of the package."""
    for nodes in nodes_of_the_package():
        assigned = [node for node in nodes if isinstance(node, ast.Assign)]
        constants = {ast.unparse(node.targets[0]): node.value for node in assigned}
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in REFUSING:
                yield as_printed(constants.get(ast.unparse(node.args[0]), node.args[0]))


def test_no_refusal_is_missing() -> None:
    found = [text for text in refusals() if re.search("[a-z]+ [a-z]+", text)]
    assert len(found) > 300
    with in_language("zh"):
        missing = [text for text in found if not is_wholly_chinese(text)]
    assert missing == []


def worded(expression: ast.expr) -> Iterator[str]:
    """The texts that an expression can be."""
    match expression:
        case ast.IfExp(body=body, orelse=otherwise):
            yield from (*worded(body), *worded(otherwise))
        case ast.BoolOp(values=values):
            yield from (text for value in values for text in worded(value))
        case _:
            yield as_printed(expression)


def parts_of_refusals() -> Iterator[str]:
    """The package's own words that stand in the places of refusals, as far as the same function chooses them."""
    for file in nodes_of_the_package():
        for function in file:
            if isinstance(function, ast.FunctionDef):
                nodes = list(ast.walk(function))
                assigned = [node for node in nodes if isinstance(node, ast.Assign)]
                for node in nodes:
                    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in REFUSING:
                        places = [part.value for part in ast.walk(node) if isinstance(part, ast.FormattedValue)]
                        names = {ast.unparse(place) for place in places}
                        chosen = [each.value for each in assigned if ast.unparse(each.targets[0]) in names]
                        yield from (text for expression in (*places, *chosen) for text in worded(expression))


# Refusals of which another function says a part.
PUT_TOGETHER = (
    "/tmp/x holds files that are not a profile, and was not changed: choose another directory",
    "/tmp/x.json is not the profiler's, because it lacks devices: remove it, or profile again",
    "/tmp/x.json is not the profiler's, because devices should be a list and is text: profile again",
    "/tmp/x.json is not the profiler's (cut off): remove it, or run the experiment again",
    "opacus-memprof's extension has not been built: in opacus-memprof's source tree run `pip install .`",
    "flash_clip's extension cannot be loaded (built for torch 2.14.0, but torch 2.15.0 is installed): build "
    "from source: `pip install x`",
    "/tmp/repository has no commit 0123 (fatal)",
)


def test_no_part_of_a_refusal_is_missing() -> None:
    found = {text.strip() for text in parts_of_refusals() if re.search("[a-z]+ [a-z]+ [a-z]+", text)}
    assert len(found) > 10
    with in_language("zh"):
        missing = [text for text in (*found, *PUT_TOGETHER) if not is_chinese(text)]
        half = [text for text in PUT_TOGETHER if not is_wholly_chinese(text)]
    assert missing == half == []


def test_a_command_refuses_in_chinese(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(language.VARIABLE, "zh")
    monkeypatch.setattr(sys, "argv", ["opacus-memprof", "run", str(tmp_path / "train.py")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"opacus-memprof: 脚本 {tmp_path / 'train.py'} 不存在\n"


def test_a_program_that_is_refused_says_so_in_both_languages(capsys: pytest.CaptureFixture[str]) -> None:
    error = MemprofError("the model must be in training mode: call train() before make_private.")
    print_exception(error)
    assert capsys.readouterr().err.endswith(f"MemprofError: {error}\n")
    with in_language("zh"):
        print_exception(error)
    assert capsys.readouterr().err.endswith(
        f"MemprofError: {error}\nopacus-memprof: 模型必须处于训练模式：在 make_private 之前调用 train()。\n"
    )


def test_a_refusal_is_not_found_inside_another_sentence() -> None:
    unknown = "nobody knows this: it ends in {here}"
    with in_language("zh"):
        assert language.tr_sentence("ends in conv1") != "ends in conv1"  # " in {module}"
        assert language.tr_sentence(unknown, least_words=2) == unknown


def test_nothing_stays_nothing() -> None:
    """An empty message is the head of a catalogue."""
    with in_language("zh"):
        assert (tr(""), language.tr_sentence(""), language.tr_help("")) == ("", "", "")


def test_a_sentence_is_translated_with_its_parts() -> None:
    english = (
        "give fc1 an input with a row for each sample: expand what all samples share, such as positions, to the batch "
        '(positions.expand(len(x), -1)); or use opacus_memprof.PrivacyEngine with grad_sample_mode="flash_clip", which '
        "trains it as it is"
    )
    with in_language("zh"):
        assert language.tr_sentence(english) == (
            "让 fc1 的输入对每个样本各有一行：把所有样本共享的内容（例如位置）扩展到整个批次"
            "（positions.expand(len(x), -1)）；"
            '或使用 opacus_memprof.PrivacyEngine 和 grad_sample_mode="flash_clip"，无需改动即可训练'
        )
        assert language.tr_sentence(
            "a physical batch of at most 1 sample instead of 4, and the same logical batch"
        ) == ("物理批次最多 1 个样本（现为 4），逻辑批次不变")
        many = (
            "T x T matrices take 3.00 GiB for 1 sample of 16 tokens; the 6 x 2 per-sample gradients that they avoid "
            "would take 48.02 MiB, and the same holds for 80 more layers (a 3.00 GiB, 78 more)"
        )
        assert language.tr_sentence(many).endswith("另外 80 层也是如此（a 3.00 GiB, 另外 78 项）")
        assert language.tr_sentence("words of nobody") == "words of nobody"
    assert language.tr_sentence(english) == english


def test_a_paragraph_is_translated_sentence_by_sentence() -> None:
    error = "ValueError: not one. You need to call it"  # as a name that stands for two sentences
    with in_language("zh"):
        assert language.tr_sentence("Accuracy can differ. Set both.") == "精度可能不同。请两者都设置。"
        assert language.tr_sentence(f"Opacus stops with {error}.") == f"Opacus 因 {error} 而中止。"
        assert language.tr_sentence(f"Opacus stops with {error}. Set both.") == (
            "Opacus 因 ValueError: not one 而中止。You need to call it. 请两者都设置。"
        )
        assert language.tr_sentence("Nobody knows this. Set both.") == "Nobody knows this. Set both."


def test_translations_have_the_places_of_their_messages() -> None:
    entries = [(message, text) for _, message, text in language._entries("zh") if message]
    wrong = {message: text for message, text in entries if places(message) != places(text)}
    assert len({(context, message) for context, message, _ in language._entries("zh")}) == len(entries) + 1
    assert wrong == {}


def test_translations_are_chinese() -> None:
    catalogue = language._catalogue("zh")
    same = [text for message, text in catalogue.items() if message and not re.search(r"[\u4e00-\u9fff]", text)]
    assert [text for text in same if re.search("[a-z]{2}", re.sub(r"\{[^}]*\}", "", text))] == []


def test_other_readers_of_catalogues_read_the_same() -> None:
    with CATALOGUE.open("rb") as file:
        catalogue = pofile.read_po(file, locale="zh", abort_invalid=True)
    compiled = io.BytesIO()
    mofile.write_mo(compiled, catalogue)
    compiled.seek(0)
    translations = gettext.GNUTranslations(compiled)
    ours = [entry for entry in language._entries("zh") if entry[1]]
    assert len(ours) == len(catalogue)
    for context, message, text in ours:
        assert text == (translations.pgettext(context, message) if context else translations.gettext(message))


def test_the_language_comes_from_block_then_process_then_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tr("training") == "training"
    monkeypatch.setenv(language.VARIABLE, "zh_CN.UTF-8")
    assert tr("training") == "训练"
    set_language("en")
    assert tr("training") == "training"
    with in_language("zh"):
        assert tr("training") == "训练"
        with in_language(None):
            assert tr("training") == "训练"
    assert tr("training") == "training"


def test_a_language_of_the_process_is_that_of_its_threads() -> None:
    said = []
    set_language("zh")
    thread = threading.Thread(target=lambda: said.append(tr("training")))
    thread.start()
    thread.join()
    assert said == ["训练"]


@pytest.mark.parametrize("choose", [set_language, lambda name: opacus_memprof.GPUMemoryProfiler(language=name)])
def test_a_language_that_nobody_speaks_here(choose) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(MemprofError, match="the language 'fr' is not known: choose one of en, zh"):
        choose("fr")


def test_the_variable_is_checked_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(language.VARIABLE, "fr")
    with pytest.raises(MemprofError, match="OPACUS_MEMPROF_LANGUAGE 'fr' is not known"):
        tr("training")


def test_an_ascii_terminal_loses_nothing_and_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    language._say_escaped.cache_clear()
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    output.echo("模型 ok")
    output.echo("模型 ok")
    assert terminal.buffer.getvalue() == 2 * (rb"\u6a21\u578b ok" + b"\n")  # type: ignore[attr-defined]
    assert capsys.readouterr().err.count("PYTHONIOENCODING=utf-8") == 1


def test_the_log_lines_of_the_profiler_s_document(tmp_path: Path) -> None:
    profiler = opacus_memprof.GPUMemoryProfiler(tmp_path, language="zh")
    profiler.record("训练开始")
    profiler.record("前向传播", "loss=0.1234")
    assert profiler.log_file is not None
    said = [line.split(" - INFO - ")[1] for line in profiler.log_file.read_text(encoding="utf-8").splitlines()]
    assert said[:3] == ["=" * 80, "GPU内存分析器初始化", "=" * 80]
    assert said[3:6] == [
        f"日志文件: {profiler.log_file}",
        f"CUDA可用: {torch.cuda.device_count() > 0}",
        f"GPU数量: {torch.cuda.device_count()}",
    ]
    size = r" [ \d]{3}\d\.\dMB"
    sizes = rf"分配:{size} \| 保留:{size} \| 最大分配:{size} \| 最大保留:{size} \| 耗时: \d+\.\d\ds"
    events = [line for line in said if line.startswith("事件: ")]
    assert re.fullmatch(rf"事件: 训练开始 \| {sizes}", events[0])
    assert re.fullmatch(rf"事件: 前向传播 \| {sizes} \| loss=0\.1234", events[1])


def test_the_table_of_the_profiler_s_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiler = opacus_memprof.GPUMemoryProfiler(tmp_path, enable_file_logging=False, language="zh")
    profiler.record("模型创建")
    capsys.readouterr()
    profiler.print_report()
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "==== GPU Memory Timeline ====="
    for line, name in zip(lines, ("初始化               ", "模型创建             "), strict=True):
        assert re.fullmatch(rf"{name}\| Allocated: [ \d]{{4}}\.\dMB \| Reserved: [ \d]{{4}}\.\dMB", line)


def test_an_object_s_language_is_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chinese = opacus_memprof.GPUMemoryProfiler(tmp_path, enable_file_logging=False, language="zh")
    english = opacus_memprof.GPUMemoryProfiler(tmp_path, enable_file_logging=False)
    capsys.readouterr()
    chinese.record("a")
    english.record("b")
    chinese.record("c")
    found = re.findall(r"INFO - (事件|event): (\w)", capsys.readouterr().out)
    assert found == [("事件", "a"), ("event", "b"), ("事件", "c")]


def test_the_lines_of_the_debugger_s_document(capsys: pytest.CaptureFixture[str]) -> None:
    def reading(device: str, used: float, total: float) -> readings.Reading:
        return readings.make_reading(device, "x", round(used * output.MB), 0, 0, 0, round(total * output.MB))

    assert snapshots.describe_reading(reading("cuda:0", 1234.5, 11264)) == "GPU 0: 1234.5MB / 11264.0MB (11.0%)"
    model = nn.Linear(2, 3)
    model.weight.requires_grad = False
    nn.init.constant_(model.bias, float("nan"))
    set_language("zh")
    before = snapshots.memory_snapshot("before_training")
    changes = snapshots.compare_snapshots(before, snapshots.memory_snapshot("after_training"))
    opacus_memprof.analyze_model(model, "lora_model")
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "[INFO] 获取内存快照: before_training"
    assert "[INFO] 比较内存快照: before_training vs after_training" in said
    change = changes["gpu_changes"][0]
    line = f"[INFO]   {anomalies.device_label(change['device'])}: 内存变化 {change['memory_change_mb']:+.1f}MB"
    assert any(each.startswith(line) for each in said)
    if change["utilization_change"] is not None:
        assert f"{line}, 利用率变化 {change['utilization_change']:+.1f}%" in said
    at = said.index("[INFO] 快速分析模型: lora_model")
    assert said[at + 1 : at + 6] == [
        "[INFO]   总参数: 9",
        "[INFO]   可训练参数: 3",
        "[INFO]   内存占用: 0.00 MB",
        "[INFO]   参数效率: 33.33%",
        "[ERROR] 参数包含NaN: bias",
    ]
    anomalies.log(anomalies.find_in_snapshot({**before, "devices": [reading("cuda:0", 1456.7, 11264)]}, 1000.0))
    assert capsys.readouterr().out == "[WARNING] GPU 0 内存使用超过阈值: 1456.7MB > 1000.0MB\n"
    large = nn.Module()
    large.lm_head = nn.Linear(5094, 7497, bias=False, device="meta")
    [finding] = anomalies.find_in_model(large)
    assert finding.evidence == "大参数检测: lm_head.weight (145.68 MB)"


def test_a_report_in_chinese_has_no_english_sentence(tmp_path: Path) -> None:
    with opacus_memprof.create_memory_debugger(tmp_path, language="zh") as debugger:
        debugger.create_memory_checkpoint("开始")
        with in_language("zh"):
            opacus_memprof.analyze_model(nn.Linear(2, 3), "模型")
        debugger.create_memory_checkpoint("结束")
        debugger.compare_checkpoints("开始", "结束")
        report = debugger.generate_memory_report()
    known = {"cpu", "cuda", "float", "memory_stats", "torch", "weight", "bias"}
    assert set(re.findall("[A-Za-z][a-z_]{2,}", report)) - known == set()


def test_no_table_of_a_chinese_report_has_english_sentences() -> None:
    said = io.StringIO()
    with in_language("zh"):
        print_report(view_profile(private_profile()), Console(file=said, width=140))
    text = said.getvalue()
    assert re.findall("[A-Za-z]+ [a-z]+ [a-z]+", text) == []
    for title in ("峰值时", "占比", "模块", "请求", "精确"):
        assert title in text


def english_words(text: str) -> list[str]:
    return re.findall("[A-Za-z]+ [a-z]+ [a-z]+", text)


def test_a_failure_and_the_note_on_steps_have_no_english_sentence() -> None:
    moment = {"step": 3, "logical_step": 1, "phase": "backward"}
    failures = [{**moment, "category": "noise", "module": module} for module in ("head", "")]
    phases = {"idle": {"step": 3, "logical_step": 1, "categories": {}}}
    for failed in (failures, failures[:1], failures[1:]):
        profile = private_profile(devices={"cpu": a_device(out_of_memory=failed, phases=phases)})
        said = io.StringIO()
        with in_language("zh"):
            print_report(view_profile(profile), Console(file=said, width=200))
        assert english_words(said.getvalue()) == []


def test_what_two_runs_differ_in_has_no_english_sentence(tmp_path: Path) -> None:
    profiles = []
    for name, file in (("private", private_file()), ("vanilla", vanilla_file())):
        profiles.append(profile_in(tmp_path / name, file))
    profiles[1].status = "killed"
    said = io.StringIO()
    console = Console(file=said, width=80)
    with in_language("zh"):
        difference = diff_profiles(profiles[1], profiles[0])
        exceeded = exceeded_limits(difference, GrowthLimit.parse("1%"))
        print_diff(difference, console, exceeded)
        print_tax(dp_tax(*profiles), console)
        said.write(diff_markdown(difference, exceeded))
    text = said.getvalue()
    assert english_words(text) == []
    assert "隐私使峰值变化 +56.00 KiB：有差分隐私 150.00 KiB，没有 94.00 KiB" in text
    assert "第一次运行的状态为被终止" in text
    assert "cuda:0 的峰值增长了 56.00 KiB，超过 1%" in text


def test_virtual_gpus_of_two_runs_have_no_english_word() -> None:
    gpus = [VirtualGpus(gpu, name, 2**30, 1) for gpu, name in (("h200", "NVIDIA H200"), ("t4", "Tesla T4"))]
    with in_language("zh"):
        for runs in (("first", "second"), ("private", "vanilla")):
            for pair in ((gpus[0], gpus[0]), (gpus[0], gpus[1]), (gpus[0], UNSET), (UNSET, gpus[1])):
                (note,) = compare_virtual(runs, *pair)
                assert set(re.findall("[A-Za-z]+", language.tr_sentence(note))) <= {"NVIDIA", "H", "Tesla", "T", "GiB"}


def test_columns_stand_under_one_another_in_chinese() -> None:
    said = io.StringIO()
    with in_language("zh"):
        print_oom(out_of_memory(), Console(file=said, width=80))
    assert english_words(re.sub("per sample gradients|model parameters", "", said.getvalue())) == []
    lines = said.getvalue().splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("按类别占用"))
    assert len({cell_len(line.rstrip()) for line in lines[at : at + 2]}) == 1
    assert max(map(cell_len, lines)) <= 80


def test_unattributed_bytes_without_a_line_are_said_in_chinese() -> None:
    said = io.StringIO()
    with in_language("zh"):
        parts = unattributed_parts({"unattributed": 1000}, {"a.py:1": 900}, 2000)
        print_unattributed(parts, Console(file=said, width=80))
    assert re.findall("[A-Za-z]{2,}", said.getvalue()) == ["py"]


def test_a_privacy_check_is_said_in_chinese_part_by_part() -> None:
    refusal = "the model must be in training mode: call train() before make_private"
    english = (
        "flash_clip on Net; 3 steps; 2 situations proved, mixing and sums at forwards 1, 2, ..., 64, "
        f"gradients explained by the outputs at forward 1; 1 refusal, first: {refusal}."
    )
    assert privacy_sentence(english) == english
    with in_language("zh"):
        assert privacy_sentence(english) == (
            "Net 使用 flash_clip；3 步；证明了 2 种情形，样本混合和求和（第 1, 2, ..., 64 次前向传播），"
            "梯度可由输出解释（第 1 次前向传播）；1 次拒绝，最先为：模型必须处于训练模式："
            "在 make_private 之前调用 train()。"
        )
        assert privacy_sentence('ghost on Net; nothing was proved (check="off").') == (
            'Net 使用 ghost；没有做任何证明（check="off"）。'
        )
        virtual = (
            "ghost on Net; nothing was proved, because a virtual GPU does not compute large tensors: "
            "train some steps on a real device."
        )
        assert privacy_sentence(virtual) == (
            "Net 使用 ghost；没有做任何证明，因为虚拟 GPU 不计算大张量：请在真实设备上训练几步。"
        )


def test_what_categories_mean_is_wholly_chinese() -> None:
    with in_language("zh"):
        meanings = [language.tr_sentence(category.meaning) for category in CATEGORIES if category.meaning != "p.grad"]
    assert [text for text in meanings if english_words(text) or not re.search(r"[\u4e00-\u9fff]", text)] == []


def test_messages_of_torch_stay_as_they_are() -> None:
    said = "OutOfMemoryError: CUDA out of memory. Tried to allocate 1.95 GiB. GPU 0 has a total capacity of 14.76 GiB"
    with in_language("zh"):
        assert language.tr_sentence(said) == said
