# SPDX-License-Identifier: Apache-2.0
"""Prepares what people see first: the verdict on a run, what to change, and a sentence on each model's privacy check.

Every output shows the same.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from msgspec import UNSET

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.categories import ACTIVATION_HOOKS, PRIVATE
from opacus_memprof.profiles.directory import PRIVACY_CHECK
from opacus_memprof.profiles.oom_report import OomReport, SuggestedChange, needs_edit
from opacus_memprof.profiles.privacy_check import CheckedSpan, ModelCheck, read_privacy_check
from opacus_memprof.profiles.profile import PROOF, Device, Improvement, Peak
from opacus_memprof.profiles.units import column_format, format_bytes, format_count, format_moment, format_share

_MOST_FIXES = 3
_EVIDENCE = {False: "predicted", True: "needs an edit"}
_MATERIAL = 0.1  # the fraction of the peak above which per-sample gradients justify another mode
_MOST_FORWARDS = 4  # numbers of forwards that are listed before the last
_CHECK_NAMES = {
    "mixing": "mixing",
    "sums": "sums",
    "explained": "gradients explained by the outputs",
    "clipped_sum": "clipped sums compared with those by hand",
}


@dataclass(frozen=True)
class Fix:
    """A change of the program, and the peak with it.

    Attributes:
        title: the change, for people. `code`: the same as code, to be copied.
        peak: the peak.
        effect: "fits", "fits tightly", "too large", "fails", or by how much the peak falls; "" if it is unknown.
        evidence: "tried" on a virtual GPU, "predicted", or "needs an edit" of the program before it can be tried.
        note: what else is known of it, such as the error with which the program failed.
    """

    title: str
    code: str
    peak: str
    effect: str
    evidence: str
    note: str = ""


@dataclass(frozen=True)
class VerdictView:
    """The verdict on one device of a run, or on a plan.

    Attributes:
        outcome: "failed" if memory ran out, "fits" if it is a plan that fits, otherwise "peak".
        headline: the verdict in capitals, such as "OUT OF MEMORY". `where` completes the sentence.
        lines: further lines, each a label, which may be "", and a text.
        heading: the heading of the fixes; if a failure has none, a sentence that says so.
        fixes: at most three.
        device: its name in the profile; "" for a plan.
        command: tries the fixes on a virtual GPU; "" if there is none.
    """

    outcome: Literal["failed", "fits", "peak"]
    headline: str
    where: str
    lines: Sequence[tuple[str, str]]
    heading: str
    fixes: Sequence[Fix]
    device: str = ""
    command: str = ""


def device_verdict(name: str, device: Device) -> VerdictView:
    """Returns the verdict on a device that had enough memory: its peak, what privacy costs, and what could be.

    Args:
        name: the device, for people.
        device: its entry in profile.json.
    """
    peak = device.peak
    where = f"in {format_moment(peak.phase, peak.step, peak.logical_step)}, on {name}"
    if {"forward", "backward"}.isdisjoint(device.phases) and peak.phase == "idle":
        where = f"before the first training step, on {name}"
    reserved = _describe_reserved(device)
    lines = [("LARGEST RESERVED", reserved)] if reserved else []
    lines += _without_proof(device)
    lines += _cost_of_privacy(peak)
    gradients = peak.categories.get("per_sample_gradients", 0)
    if device.improvements is UNSET and peak.phase != PROOF and gradients > _MATERIAL * peak.requested_bytes:
        less = f'up to {format_bytes(gradients)} less with grad_sample_mode="flash_clip"'
        lines.append(("COULD BE", f"{less}, which forms no per-sample gradients"))
    improvements = (device.improvements or [])[:_MOST_FIXES]
    formatted = column_format(each.predicted_peak_bytes for each in improvements)
    return VerdictView(
        outcome="peak",
        headline=f"PEAK {format_bytes(peak.requested_bytes)}",
        where=where,
        lines=lines,
        heading="COULD BE",
        fixes=[_improvement(each, peak.requested_bytes, formatted) for each in improvements],
        device=name,
    )


def failure_verdict(report: OomReport) -> VerdictView:
    """Returns the verdict on a failed allocation: the missing memory, and changes that fit."""
    request = report.request
    what = request.category.replace("_", " ") + (f" of {request.module}" if request.module else "")
    suggestions = select_suggestions(report.suggestions)[:_MOST_FIXES]
    formatted = column_format(map(_peak_of, suggestions))
    fixes = [_suggestion(each, formatted(_peak_of(each))) for each in suggestions]
    return VerdictView(
        outcome="failed",
        headline="OUT OF MEMORY",
        where=f"{failure_moment(report)}, {report.device}",
        lines=[
            ("", f"{format_bytes(request.bytes)} of {what} failed"),
            ("", " · ".join(_needs(report))),
            *_of_the_loss(report),
        ],
        heading="FIX" if fixes else "No known change would make it fit.",
        fixes=fixes,
        device=report.device,
        command=report.plan or "",
    )


def failure_moment(report: OomReport) -> str:
    """Returns when an allocation failed: "in backward of step 5"."""
    request = report.request
    if request.phase == "idle" and request.step == 0 and report.batch.samples is None:
        return "before the first training step"
    return f"in {format_moment(request.phase, request.step, request.logical_step)}"


def select_suggestions(suggestions: Sequence[SuggestedChange]) -> Sequence[SuggestedChange]:
    """Returns the suggestions that fit, and behind them those with which a run failed; if none fits, all of them."""
    fitting = [suggestion for suggestion in suggestions if suggestion.fits is not False]
    failed = [suggestion for suggestion in suggestions if suggestion.tried is not UNSET and suggestion.tried.error]
    return [*fitting, *failed] if fitting else suggestions


def _describe_reserved(device: Device) -> str:
    reserved, peak = device.reserved_peak, device.peak
    if reserved is None:
        return ""
    then = (reserved.phase, reserved.step) == (peak.phase, peak.step)
    return format_bytes(reserved.bytes) + ("" if then else f" in {format_moment(reserved.phase, reserved.step)}")


def _without_proof(device: Device) -> list[tuple[str, str]]:
    """Returns a line with the peak of the training itself, if the device's peak is in a proof of flash_clip."""
    others = [(row.peak_bytes, phase, row.step) for phase, row in device.phases.items() if phase != PROOF]
    if device.peak.phase != PROOF or not others:
        return []
    size, phase, step = max(others)
    return [("WITHOUT THE PROOF", f"{format_bytes(size)} in {format_moment(phase, step)}")]


def _cost_of_privacy(peak: Peak) -> list[tuple[str, str]]:
    private = {category: size for category, size in peak.categories.items() if category in PRIVATE and size}
    if ACTIVATION_HOOKS in private:
        private[ACTIVATION_HOOKS] = peak.activation_hooks.opacus_only
    cost = sum(private.values())
    if not cost:
        return []
    largest = sorted(private.items(), key=lambda item: (-item[1], item[0]))[:2]
    most = ", ".join(f"{category} {format_bytes(size)}" for category, size in largest if size)
    share = format_share(cost, peak.requested_bytes)
    return [("WHAT PRIVACY COSTS", f"{format_bytes(cost)} of it, {share}: {most}")]


def _improvement(improvement: Improvement, peak: int, formatted: Callable[[int], str]) -> Fix:
    size = improvement.predicted_peak_bytes
    effect = f"-{100 * (1 - size / peak):.0f} %"
    return Fix(improvement.title, improvement.code, formatted(size), effect, _EVIDENCE[improvement.needs_edit])


def _peak_of(suggestion: SuggestedChange) -> int:
    """Returns the peak that a trial had, or the predicted one."""
    trial = suggestion.tried
    peak = None if trial is UNSET else trial.peak_bytes
    return suggestion.predicted_peak_bytes if peak is None else peak


def _suggestion(suggestion: SuggestedChange, peak: str) -> Fix:
    fits = {True: "fits", False: "too large", None: ""}[suggestion.fits]
    fits = "fits tightly" if suggestion.is_tight else fits
    trial = suggestion.tried
    if trial is not UNSET:
        effect = "fails" if trial.error else fits
        return Fix(suggestion.title, suggestion.code, peak, effect, "tried", note=trial.error)
    return Fix(suggestion.title, suggestion.code, peak, fits, _EVIDENCE[needs_edit(suggestion.actions)])


def _needs(report: OomReport) -> list[str]:
    """Returns the memory that the step needs, and the available memory with this run's rounding and fragments."""
    room, needed = report.room, report.needed.bytes
    parts = [f"needs {format_bytes(needed)}"]
    usable = next((x for x in (room.capacity_bytes, room.may_reserve_bytes, room.limit_bytes) if x is not None), None)
    if usable is not None:
        parts.append(f"room for {format_bytes(usable)}")
        if needed > usable:
            parts.append(f"short by {format_bytes(needed - usable)}")
        elif room.may_reserve_bytes is not None:
            was_free_again = any(each.kind == "other_processes" for one in report.suggestions for each in one.actions)
            parts[-1] += " a moment later" if was_free_again else " in fragments"
    return parts


def _of_the_loss(report: OomReport) -> list[tuple[str, str]]:
    """Returns a line on the loss, if it takes a large part of the memory that the step needs."""
    loss = report.loss
    if loss is UNSET:
        return []
    size, output = format_bytes(loss.bytes), format_bytes(loss.output_bytes)
    others = "what the loss keeps of it, and their gradients"
    if not loss.module:
        return [("THE LOSS", f"takes {size} of it: the model's output, {output}, {others}")]
    return [("THE LOSS", f"takes {size} of it: the model's output after {loss.module}, {output}, {others}")]


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
    elif model.steps is not None and not _is_virtual(model):
        parts.append("nothing refused")
    return "; ".join(parts) + "."


def _is_virtual(model: ModelCheck) -> bool:
    return model.device.startswith("virtual ")


def _describe_proofs(model: ModelCheck) -> str:
    if _is_virtual(model):
        return (
            "nothing was proved, because a virtual GPU does not compute large tensors: train some steps on a real "
            "device"
        )
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
        by_time.setdefault(_numbers(found, unit), []).append(_CHECK_NAMES.get(what, what))
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
    if len(words) > _MOST_FORWARDS + 1:
        words = [*words[:_MOST_FORWARDS], "...", words[-1]]
    return f"{unit}{'' if words == ['1'] else 's'} {', '.join(words)}"


def _range(first: int, last: int) -> list[str]:
    return [f"{first}-{last}"] if last > first + 1 else [str(number) for number in range(first, last + 1)]
