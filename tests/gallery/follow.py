# SPDX-License-Identifier: Apache-2.0
"""Edits a script as a suggestion of an out-of-memory report says: with the lines of its code, unchanged."""

import re
from collections.abc import Mapping
from typing import Any


def follow(script: str, suggestion: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Returns the edited script, and variables of the environment to run it with."""
    kinds = [action["kind"] for action in suggestion["actions"]]
    code = suggestion["code"].splitlines()
    imports = [line for line in code if line.startswith(("import ", "from "))]
    lines = [line for line in code if line not in imports]
    environment: dict[str, str] = {}
    # Lines of several actions: the first matching action takes a line, and the last action what is left.
    if code[0].startswith("TrainingArguments("):  # of transformers' Trainer
        return _training_arguments(script, code), {}
    for kind in kinds:
        own = [line for line in lines if re.search(_LINES[kind], line)] if kind in _LINES and len(kinds) > 1 else lines
        lines = [line for line in lines if line not in own] if len(kinds) > 1 else lines
        script, more = {
            "adopt_grad_samples": _before_training,
            "register_norm_samplers": _before_training,
            "checkpoint": _before_training,
            "dtype": _before_training,
            "let_go": _unchanged,
            "no_grad": _unchanged,
            "add_gradients": _unchanged,
            "clear_gradients": _clear_early,
            "clip_each_batch": _around_the_loop,
            "drop_gradients": _after_training_begins,
            "grad_sample_mode": _mode,
            "max_physical_batch_size": _around_the_loop,
            "batch_size": _replace_argument,
            "optimizer": _replace_optimizer,
            "allocator_setting": _in_the_environment,
            "release_models": _unchanged,
            "move_in_turn": _unchanged,
            "split_batch": _unchanged,
            "fused_attention": _unchanged,
            "lora": _before_training,
            "sequence_length": _with_each_batch,
            "set_to_none": _to_none,
        }[kind](script, own)
        environment |= more
    return _after_imports(script, imports), environment


def _training_arguments(script: str, code: list[str]) -> str:
    """Arguments take the place of those with the same name, or stand before all others that are named."""
    for line in code:
        added = line.partition("...")[2].partition("  #")[0].removeprefix(", ").removesuffix(")")
        for name in re.findall(r"(\w+)=", added):
            script = re.sub(rf", {name}=[^,)]+", "", script)
        script = re.sub(r"(TrainingArguments\([^,]+)", rf"\1, {added}", script)
    return script


Edited = tuple[str, dict[str, str]]

_LINES = {
    "checkpoint": r"checkpoint",
    "optimizer": r"torch\.optim\.",
    "grad_sample_mode": r"grad_sample_mode|^criterion = ",
    "max_physical_batch_size": r"BatchMemoryManager|^#|^    #",
    "dtype": r"\.to\(torch\.",
    "lora": r"get_peft_model",
    "sequence_length": r"\[:, :",
}


def _after_imports(script: str, imports: list[str]) -> str:
    """The imports of the code stand after those of the script, whose names they replace."""
    lines = script.splitlines()
    last = max(i for i, line in enumerate(lines) if line.startswith(("import ", "from ")))
    return "\n".join([*lines[: last + 1], *imports, *lines[last + 1 :], ""])


def _before_training(script: str, code: list[str]) -> Edited:
    """Before the statement that makes the optimizer, and so after the model is made; lines for a batch in the loop."""
    batch = [line for line in code if "# what the model is called with" in line]
    script = _with_each_batch(script, batch)[0] if batch else script
    code = [line for line in code if line not in batch]
    return _insert(script, code, r"^( *)\w+ = [\w.]*(SGD|Adam|AdamW|RMSprop)\("), {}


def _with_each_batch(script: str, code: list[str]) -> Edited:
    """At the beginning of the loop over batches, for what it calls its inputs."""
    found = re.search(r"^( *)for (?:\w+, (?=\())?\(?(\w+)\b.* in .*(loader|dl)\b.*:\n", script, re.MULTILINE)
    assert found
    lines = [re.sub(rf"\b{each.partition(' = ')[0]}\b", found[2], each.partition("#")[0]) for each in code]
    inserted = "".join(f"{found[1]}    {line}\n" for line in lines)
    return script[: found.end()] + inserted + script[found.end() :], {}


def _clear_early(script: str, code: list[str]) -> Edited:
    """The line of zero_grad moves behind that of step."""
    cleared = re.search(r"^ *optimizer\.zero_grad\(.*\)\n", script, re.MULTILINE)
    assert cleared
    script = script.replace(cleared[0], "")
    return re.sub(r"(^ *optimizer\.step\(.*\)\n)", lambda step: step[0] + cleared[0], script, flags=re.MULTILINE), {}


def _to_none(script: str, code: list[str]) -> Edited:
    return re.sub(r"(\w+\.zero_grad)\(\)", r"\1(set_to_none=True)", script), {}


def _unchanged(script: str, code: list[str]) -> Edited:
    return script, {}


def _insert(script: str, code: list[str], pattern: str) -> str:
    found = re.search(pattern, script, re.MULTILINE)
    assert found, pattern
    inserted = "".join(f"{found[1]}{line}\n" for line in code)
    return script[: found.start()] + inserted + script[found.start() :]


def _after_training_begins(script: str, code: list[str]) -> Edited:
    return _insert(script, code, r"^( *)for .* in .*(loader|dl)\b.*:$"), {}


def _mode(script: str, code: list[str]) -> Edited:
    (line,) = (line for line in code if "make_private" in line)
    found = re.search(r"make_private\w*\(\.\.\., (.*)\)", line)
    assert found, line
    script = re.sub(r'grad_sample_mode="\w+",?\s*', "", script)
    if line.startswith("model, optimizer, loader ="):  # a criterion is not returned
        script = script.replace("model, optimizer, criterion, loader =", "model, optimizer, loader =")
        after = [each for each in code if each.startswith("criterion = ")]
        script = _insert(script, after, r"^( *)for .* in .*loader\b.*:$")
    returned, _, call = line.partition(" = ")
    if "criterion=" in call:  # ghost clipping returns it, too, and takes one that exists
        script = re.sub(r"^( *).* = (.*make_private)", rf"\1{returned} = \2", script, flags=re.MULTILINE)
        made = re.search(rf"^ *{returned.split(', ')[2]} = .*\n", script, re.MULTILINE)
        if made and made.start() > script.index("make_private"):
            script = _insert(script.replace(made[0], ""), [made[0].strip()], r"^( *).*make_private")
    return re.sub(r"(make_private\w*)\(\s*", rf"\1({found[1]}, ", script), {}


def _around_the_loop(script: str, code: list[str]) -> Edited:
    """The with-line stands before the loop over the loader that it names, which it contains to the loop's end."""
    if any(line.endswith("# where the program has it already") for line in code):
        found = re.search(r"max_physical_batch_size=\d+", code[-1])
        assert found
        return re.sub(r"max_physical_batch_size=\d+", found[0], script), {}
    (line,) = (line for line in code if line.startswith("with "))
    name = line.rpartition(" as ")[2].rstrip(":")
    lines = script.splitlines()
    (start,) = (i for i, each in enumerate(lines) if re.match(rf" *for .* in .*\b{name}\b.*:$", each))
    indent = len(lines[start]) - len(lines[start].lstrip())
    end = start + 1
    while end < len(lines) and (not lines[end].strip() or lines[end].startswith(" " * (indent + 1))):
        end += 1
    body = [f"    {each}" for each in lines[start:end]]
    return "\n".join([*lines[:start], " " * indent + line, *body, *lines[end:], ""]), {}


def _replace_argument(script: str, code: list[str]) -> Edited:
    found = re.search(r"batch_size=\d+", "\n".join(code))
    assert found
    return re.sub(r"batch_size=\d+", found[0], script), {}


def _replace_optimizer(script: str, code: list[str]) -> Edited:
    script = re.sub(r"(SGD|AdamW|Adam|RMSprop)\(", "SGD(", script)
    return re.sub(r", (betas|weight_decay|eps)=(\([^)]*\)|[\w.-]+)", "", script), {}


def _in_the_environment(script: str, code: list[str]) -> Edited:
    found = re.match(r"(\w+)=(\S+)", code[0])
    assert found
    return script, {found[1]: found[2]}
