# SPDX-License-Identifier: Apache-2.0
"""Decides whether a configuration fits and by how much, and tries suggestions on the virtual GPU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opacus_memprof.errors import MemprofError
from opacus_memprof.planning.arguments import with_argument
from opacus_memprof.planning.configuration import PlannedConfiguration, PlannedProgram
from opacus_memprof.planning.runs import PlannedRuns
from opacus_memprof.planning.virtual_run import LOG, VirtualRun
from opacus_memprof.profiles.oom_report import APPLICABLE

LARGEST_MEMORY = 2**40  # the most that a virtual GPU can have; shows the peak of programs that fit on no real GPU
_MOST_ADVICE = 4


@dataclass(frozen=True)
class Advice:
    """A suggestion of the OOM report.

    Attributes:
        predicted: predicted peak in bytes.
        tried: the run with it; None if it needs an edit of the program.
        failure: the reason why the run with it failed; "" if it did not.
        applied: the configuration with it.
    """

    title: str
    code: str
    predicted: int
    tried: VirtualRun | None
    failure: str = ""
    applied: PlannedConfiguration | None = None


@dataclass(frozen=True)
class Verdict:
    """The outcome of a configuration. If it does not fit, also its run on a large enough GPU, and advice.

    Attributes:
        whole: the run with more memory; None if the configuration fits, or not even in LARGEST_MEMORY.
        needed: bytes to reserve: measured in `run` or `whole`, otherwise computed in the OOM report.
    """

    configuration: PlannedConfiguration
    run: VirtualRun
    whole: VirtualRun | None = None
    needed: int = 0
    advice: Sequence[Advice] = ()

    @property
    def spare(self) -> int:
        """Bytes that can be reserved and are not needed; negative if it does not fit."""
        return (self.run.may_reserve or 0) - self.needed


def check_run(program: PlannedProgram, run: VirtualRun) -> None:
    """Raises MemprofError for a run that shows nothing about memory.

    Raises:
        MemprofError: the program failed, used no GPU, or ended before it had trained a step.
    """
    log = Path(run.directory) / LOG
    if run.status in ("failed", "killed"):
        ended = "failed" if run.status == "failed" else "was killed"
        reason = run.error or run.last_words()
        raise MemprofError(f"{program.name} {ended} on the virtual GPU ({reason}): see {log}")
    if run.requested is None:
        raise MemprofError(f"{program.name} allocated nothing on the GPU: let it train on cuda (see {log})")
    if run.fits and not run.steps:
        raise MemprofError(
            f"{program.name} ended before its first training step, whose memory a plan needs: let it make one or "
            f"two (see {log})"
        )


def judge(runs: PlannedRuns, configuration: PlannedConfiguration, mode_argument: str | None = None) -> Verdict:
    """Runs a configuration, and tries advice if it does not fit.

    Args:
        runs: the runs of the plan.
        configuration: the configuration.
        mode_argument: the argument of the program for Opacus' grad_sample_mode, if it has one.

    Raises:
        MemprofError: see check_run and run_virtually.
    """
    (run,) = runs.all([configuration])
    check_run(configuration.program, run)
    if run.fits:
        return Verdict(configuration, run, needed=run.reserved or 0)
    report = run.oom_report() or {}
    suggestions = _worth_trying(report.get("suggestions", ()))
    changed = [_applied(configuration, suggestion["actions"], mode_argument) for suggestion in suggestions]
    large = replace(configuration, memory=LARGEST_MEMORY)
    whole, *tried = runs.all([large, *(applied for applied in changed if applied is not None)])
    results = iter(tried)
    advice = []
    for suggestion, applied in zip(suggestions, changed, strict=True):
        result = None if applied is None else next(results)
        failure = ""
        if result is not None and (result.status in ("failed", "killed") or not result.requested):
            failure = result.error or result.last_words() or "it used no GPU"
        predicted = suggestion["predicted_peak_bytes"]
        advice.append(Advice(suggestion["title"], suggestion["code"], predicted, result, failure, applied))
    computed = report.get("needed", {}).get("bytes", 0)
    needed = (whole.reserved or 0) if whole.fits else max(computed, run.may_reserve or 0)
    advice.sort(key=lambda each: not (each.tried is not None and each.tried.fits))  # stable: smallest change first
    return Verdict(configuration, run, whole if whole.fits else None, needed, advice)


def _worth_trying(suggestions: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the suggestions to try: first those predicted to fit, then others."""
    fitting = [each for each in suggestions if each["fits"] is not False]
    others = [each for each in suggestions if each["fits"] is False and _is_applicable(each["actions"])]
    return [*fitting, *others][:_MOST_ADVICE]


def _is_applicable(actions: Sequence[Mapping[str, Any]]) -> bool:
    return all(action["kind"] in APPLICABLE for action in actions)


def _applied(
    configuration: PlannedConfiguration, actions: Sequence[Mapping[str, Any]], mode_argument: str | None
) -> PlannedConfiguration | None:
    """Returns the configuration with these changes; None if they need an edit of the program."""
    if not _is_applicable(actions):
        return None
    changes = []
    for action in actions:
        if action["kind"] == "grad_sample_mode":
            if mode_argument is not None:
                program = configuration.program
                arguments = with_argument(program.arguments, mode_argument, action["value"])
                configuration = replace(configuration, program=replace(program, arguments=arguments))
                continue
            if action["value"] == "ghost":  # the program must take a criterion from make_private
                return None
        changes.append(dict(action))
    return replace(configuration, changes=tuple(changes))
