# SPDX-License-Identifier: Apache-2.0
"""Decides whether a configuration fits and by how much, and tries suggestions on the virtual GPU."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opacus_memprof.errors import MemprofError
from opacus_memprof.planning.configuration import PlannedConfiguration, PlannedProgram, with_argument
from opacus_memprof.planning.runs import PlannedRuns
from opacus_memprof.planning.virtual_run import LOG, VirtualRun
from opacus_memprof.profiles.oom_report import APPLICABLE
from opacus_memprof.virtual_gpu import smallest_memory
from opacus_memprof.virtual_gpu.devices import GPUS, find_gpu

LARGEST_MEMORY = 2**40  # the most that a virtual GPU can have; shows the peak of programs that fit on no real GPU
_MOST_ADVICE = 4
_IN_MAKE_PRIVATE = {"checkpoint", "dtype", "optimizer"}
"""Changes that need an edit, and that a run applies to what the program gives to make_private."""
_NO_ANSWER = ("failed", "killed")  # states of a run that shows nothing about memory
_EXACT = 0.98  # memory below this part of what is needed is known not to suffice
_MIB = 2**20  # to which the memory of cards is rounded up


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
        needed: bytes that a card must have: it fits there, and not with _EXACT of them. Computed in the OOM report if
            it does not even fit in LARGEST_MEMORY.
    """

    configuration: PlannedConfiguration
    run: VirtualRun
    whole: VirtualRun | None = None
    needed: int = 0
    advice: Sequence[Advice] = ()

    @property
    def free_bytes(self) -> int:
        """Bytes of the GPU that the run does not need; negative if it does not fit."""
        return self.memory - self.needed

    @property
    def predicted_gpu(self) -> str | None:
        """The kind with the least memory that is enough, predicted from this one; None if no kind has as much."""
        beyond_context = self.needed - GPUS[self.configuration.gpu].context_memory
        kinds = sorted(GPUS.items(), key=lambda kind: kind[1].total_memory)
        enough = (kind for kind, gpu in kinds if gpu.total_memory >= gpu.context_memory + beyond_context)
        return next(enough, None)

    @property
    def memory(self) -> int:
        """Bytes of the card."""
        return memory_of(self.configuration)


def memory_of(configuration: PlannedConfiguration) -> int:
    """Returns the bytes of the GPU of a configuration."""
    total = find_gpu(configuration.gpu).total_memory
    return total if configuration.memory is None else configuration.memory


def check_run(program: PlannedProgram, run: VirtualRun) -> None:
    """Raises MemprofError for a run that shows nothing about memory.

    Raises:
        MemprofError: the program failed, used no GPU, or ended before it had trained a step.
    """
    log = Path(run.directory) / LOG
    if run.status in _NO_ANSWER:
        ended = "failed" if run.status == "failed" else "was killed"
        reason = run.error or run.last_line() or "it printed nothing"
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
        return Verdict(configuration, run, needed=least_memory(runs, configuration, run))
    report = run.oom_report() or {}
    kinds = APPLICABLE | (_IN_MAKE_PRIVATE if report.get("mode") else set())
    suggestions = _worth_trying(report.get("suggestions", ()), kinds)
    changed = [_applied(configuration, suggestion["actions"], kinds, mode_argument) for suggestion in suggestions]
    large = replace(configuration, memory=LARGEST_MEMORY)
    whole, *tried = runs.all([large, *(applied for applied in changed if applied is not None)])
    results = iter(tried)
    advice = []
    for suggestion, applied in zip(suggestions, changed, strict=True):
        result = None if applied is None else next(results)
        failure = ""
        if result is not None and (result.status in _NO_ANSWER or not result.requested):
            failure = result.error or result.last_line() or "it used no GPU"
        predicted = suggestion["predicted_peak_bytes"]
        advice.append(Advice(suggestion["title"], suggestion["code"], predicted, result, failure, applied))
    if whole.fits:
        needed = least_memory(runs, large, whole, memory_of(configuration))
    else:
        needed = max(report.get("needed", {}).get("bytes", 0), run.may_reserve or 0) + (run.context or 0)
    advice.sort(key=_rank)  # stable: smallest change first
    return Verdict(configuration, run, whole if whole.fits else None, needed, advice)


def least_memory(runs: PlannedRuns, configuration: PlannedConfiguration, run: VirtualRun, too_little: int = 0) -> int:
    """Finds the bytes that a card must have for a configuration, by halving its memory.

    What a run reserves says too much: torch keeps what it has freed as long as there is room, and gives it back when
    memory runs out.

    Args:
        runs: the runs of the plan.
        configuration: a configuration that fits.
        run: its run.
        too_little: bytes of a card on which it does not fit.

    Returns:
        Bytes with which a run fits, while one with _EXACT of them does not. Below the least that a virtual GPU can
        have, it is what the run took. If a run fails for another reason, or is killed, it shows nothing about memory:
        then it is the least with which one has fitted.
    """
    base = GPUS[configuration.gpu].context_memory
    least = smallest_memory(configuration.gpu)
    if too_little < _taken(run) <= least and not run.retries:
        return _taken(run)
    low, high = max(too_little, base + (run.requested or 0)), memory_of(configuration)
    while low < _EXACT * high and least < high:
        taken = high if run.retries else max(least, _taken(run))  # enough, for a run that has given nothing back
        top, parts = (taken, runs.workers) if low < taken < high else (high, runs.workers + 1)
        cuts = {_whole(low + (top - low) * part // parts) for part in range(1, runs.workers + 1)}
        sizes = sorted({size for cut in cuts if low < (size := max(least, cut)) < high})
        if not sizes:  # less than a MiB is left between them
            break
        tried = runs.all([replace(configuration, memory=size) for size in sizes])
        ended = [(size, each) for size, each in zip(sizes, tried, strict=True) if each.status not in _NO_ANSWER]
        low = max([low, *(size for size, each in ended if not each.fits)])
        fitting = [(size, each) for size, each in zip(sizes, tried, strict=True) if each.fits and size > low]
        high, run = min(fitting, default=(high, run), key=lambda found: found[0])
        if len(ended) < len(tried):
            return high
    return min(high, _taken(run)) if high == least and not run.retries else high


def _taken(run: VirtualRun) -> int:
    """Returns the bytes that a run took from its GPU, rounded up."""
    return _whole((run.context or 0) + (run.reserved or 0))


def _whole(size: int) -> int:
    return -(-size // _MIB) * _MIB


def _rank(advice: Advice) -> int:
    """Ranks what was tried and fits first, then what was not tried, what is too large, and what failed."""
    if advice.tried is None:
        return 1
    return 3 if advice.failure else 0 if advice.tried.fits else 2


def _worth_trying(suggestions: Sequence[Mapping[str, Any]], kinds: Set[str]) -> list[Mapping[str, Any]]:
    """Returns the suggestions to try: first suggestions that are predicted to fit, then others."""
    fitting = [each for each in suggestions if each["fits"] is not False]
    others = [each for each in suggestions if each["fits"] is False and _is_applicable(each["actions"], kinds)]
    return [*fitting, *others][:_MOST_ADVICE]


def _is_applicable(actions: Sequence[Mapping[str, Any]], kinds: Set[str]) -> bool:
    return all(action["kind"] in kinds for action in actions)


def _applied(
    configuration: PlannedConfiguration,
    actions: Sequence[Mapping[str, Any]],
    kinds: Set[str],
    mode_argument: str | None,
) -> PlannedConfiguration | None:
    """Returns the configuration with these changes; None if they need an edit of the program."""
    if not _is_applicable(actions, kinds):
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
    return replace(configuration, changes=(*configuration.changes, *changes))
