# SPDX-License-Identifier: Apache-2.0
"""Summarizes privacy_check.json in a sentence for each model."""

import os
from collections.abc import Iterable
from pathlib import Path

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.directory import PRIVACY_CHECK
from opacus_memprof.profiles.privacy_check import CheckedSpan, ModelCheck, read_privacy_check
from opacus_memprof.profiles.units import format_count

_MOST = 4  # numbers of forwards that are listed before the last
_WORDS = {
    "mixing": "mixing",
    "sums": "sums",
    "explained": "gradients explained by the outputs",
    "clipped_sum": "clipped sums compared with those by hand",
}


def privacy_sentences(directory: str | os.PathLike[str] | None) -> list[str]:
    """Returns a sentence for each model in privacy_check.json of a directory; none without the file."""
    if directory is None:
        return []
    try:
        check = read_privacy_check(Path(directory) / PRIVACY_CHECK)
    except MemprofError as error:  # the rest of the report is useful without it
        return [f"{error}."]
    return [] if check is None else [describe_model(model) for model in check.models]


def describe_model(model: ModelCheck) -> str:
    """Returns a sentence on what was proved about a model."""
    parts = [f"{model.mode} on {model.model}"]
    if model.steps is not None:
        parts.append(format_count(model.steps, "step"))
    parts.append(_describe_proofs(model))
    private = model.not_private
    if private.refused:
        first = private.refusals[0].reason.rstrip(".")
        parts.append(f"{format_count(private.refused, 'refusal')}, first: {first}")
    elif model.steps is not None:
        parts.append("nothing refused")
    return "; ".join(parts) + "."


def _describe_proofs(model: ModelCheck) -> str:
    if model.check == "off":
        return 'nothing was proved (check="off")'
    if model.mode != "flash_clip":
        return _describe_checks([model.checked_steps], "step") or "no step was checked"
    proved = [each for each in model.situations if each.checks]
    checks = _describe_checks([each.checks for each in proved], "forward")
    return ", ".join([f"{format_count(len(proved), 'situation')} proved", *([checks] if checks else [])])


def _describe_checks(checks: Iterable[dict[str, list[CheckedSpan]]], unit: str) -> str:
    """Returns a list of the checks and when they ran: "mixing and sums at forwards 1, 2, 4, ..., 64"."""
    spans: dict[str, list[CheckedSpan]] = {}
    for each in checks:
        for what, found in each.items():
            spans.setdefault(what, []).extend(found)
    by_time: dict[str, list[str]] = {}
    for what, found in spans.items():
        by_time.setdefault(_numbers(found, unit), []).append(_WORDS.get(what, what))
    return ", ".join(f"{' and '.join(names)} at {when}" for when, names in by_time.items())


def _numbers(spans: list[CheckedSpan], unit: str) -> str:
    """Returns a list of numbers, with consecutive ones as a range: "forwards 1, 2, 4, ..., 64", "steps 1-8"."""
    merged: list[list[int]] = []
    for first, last in sorted((span.first, span.last) for span in spans):
        if merged and first <= merged[-1][1] + 1:
            merged[-1][1] = max(last, merged[-1][1])
        else:
            merged.append([first, last])
    words = [part for first, last in merged for part in _range(first, last)]
    if len(words) > _MOST + 1:
        words = [*words[:_MOST], "...", words[-1]]
    return f"{unit}{'' if words == ['1'] else 's'} {', '.join(words)}"


def _range(first: int, last: int) -> list[str]:
    return [f"{first}-{last}"] if last > first + 1 else [str(number) for number in range(first, last + 1)]
