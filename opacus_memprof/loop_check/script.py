# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof doctor --script`: runs a script for two logical steps, and compares them with clipping by hand."""

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from opacus_memprof.errors import MemprofError
from opacus_memprof.language import tr, tr_sentence
from opacus_memprof.profiles.units import format_count
from opacus_memprof.recording.startup import AfterImport
from opacus_memprof.running.program import Program

if TYPE_CHECKING:
    from opacus_memprof.loop_check.follow import Follower
    from opacus_memprof.loop_check.records import StepResult

_MOST_ROWS = 20
_NEVER_CHECKED = (
    "losses outside of the model that mix samples (a contrastive loss, a mean over all valid tokens of the batch), and "
    "data that were mixed before it (mixup)",
    "the model's inputs and the gradients at its outputs do not show them.",
)


@dataclass(frozen=True)
class ScriptVerdict:
    """The result of checking a program.

    Attributes:
        mode: the grad_sample_mode.
        steps: the measurements of the logical steps.
        defects: sentences; empty if every check passed.
        unchecked: parts that were not checked in this run, each with the reason; no run checks losses outside of the
            model.
        notes: facts that are not defects, but worth knowing.
        failure: the error that ended a check, in one line; None if every check ended.
    """

    mode: str
    steps: list["StepResult"]
    defects: list[str]
    unchecked: list[tuple[str, str]]
    notes: list[str]
    failure: str | None

    @property
    def is_good(self) -> bool:
        """Whether every check ended and found no defect."""
        return not self.defects and self.failure is None


class ScriptCheck:
    """Follows the private training of a script.

    Args:
        script: path of the script.
        arguments: its arguments.

    Raises:
        MemprofError: the script does not exist.
    """

    def __init__(self, script: str, arguments: Sequence[str]) -> None:
        self._script = script
        self._program = Program(script, arguments, module=False)
        self._follower: Follower | None = None

    def run(self) -> ScriptVerdict:
        """Runs the script until two logical steps are checked, it ends, raises or is interrupted.

        Raises:
            MemprofError: nothing could be checked, and no defect was found.
        """
        AfterImport("opacus", self._follow)
        ending = "ended"
        try:
            self._program.run()
        except BaseException as error:
            if type(error).__name__ == "CheckEnded":
                ending = ""
            else:
                if self._follower is not None and isinstance(error, Exception):
                    self._follower.explain(error)
                ending = self._ending(error)
        return self._verdict(ending)

    def _verdict(self, ending: str) -> ScriptVerdict:
        follower = self._follower
        if follower is None or not (follower.roots or follower.findings.defects):
            raise MemprofError(f"{self._script} {ending} before it made a model private: there is nothing to check.")
        findings = follower.findings
        if not follower.results and not findings.defects:
            raise MemprofError(
                f"{self._script} {ending} before a step of its private optimizer: there is nothing to check."
            )
        if ending and len(follower.results) < 2:
            findings.note(f"{self._script} {ending} after {format_count(len(follower.results), 'logical step')}.")
        follower.finish()
        mode = follower.roots[-1].mode if follower.roots else ""
        return ScriptVerdict(
            mode, follower.results, findings.defects, findings.unchecked, findings.notes, findings.failure
        )

    def _ending(self, error: BaseException) -> str:
        if isinstance(error, KeyboardInterrupt):
            return "was interrupted"
        if isinstance(error, SystemExit) and not error.code:
            return "ended"
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.endswith(self._script)]
        where = f" in line {frames[-1].lineno}" if frames else ""
        message = str(error).strip().partition("\n")[0]
        if self._follower is not None and any(message in defect for defect in self._follower.findings.defects):
            message = ""
        return f"ended with {type(error).__name__}{where}{f' ({message})' if message else ''}"

    def _follow(self) -> None:
        from opacus_memprof.loop_check.follow import Follower

        self._follower = Follower()
        self._follower.install()


def print_verdict(verdict: ScriptVerdict, console: Console) -> None:
    """Prints the measurements of each step, the defects, the unchecked parts, and the verdict."""
    for number, step in enumerate(verdict.steps, 1):
        _print_step(number, step, console)
    for defect in verdict.defects:
        console.print(f"{tr('DEFECT:')} {tr_sentence(defect)}", style="bold red", soft_wrap=True, markup=False)
    for note in verdict.notes:
        console.print(f"{tr('note:')} {tr_sentence(note)}", soft_wrap=True, markup=False)
    for part, why in [*verdict.unchecked, _NEVER_CHECKED]:
        said = tr("not checked: {part}: {why}", part=tr_sentence(part), why=tr_sentence(why))
        console.print(said, style="yellow", soft_wrap=True, markup=False)
    steps = tr_sentence(format_count(len(verdict.steps), "logical step"))
    samples = tr_sentence(format_count(sum(step.samples for step in verdict.steps), "sample"))
    if verdict.defects:
        found = tr_sentence(format_count(len(verdict.defects), "defect"))
        text = tr(
            "{defects}: neither the training nor the privacy that is accounted for can be relied on.", defects=found
        )
    elif verdict.failure is not None:
        text = tr(
            "The check itself failed ({failure}), so it is unknown whether this script trains exactly. "
            "Please report this with the script.",
            failure=verdict.failure,
        )
    elif any(step.errors for step in verdict.steps):
        worst = max(error for step in verdict.steps for error in step.errors.values())
        parts = [tr_sentence(part) for part, _ in verdict.unchecked]
        text = tr(
            "grad_sample_mode={mode!r} clips exactly in {steps}, {samples}, largest relative error {error:.1e}; "
            "not checked: {parts}."
            if parts
            else "grad_sample_mode={mode!r} trains this script exactly: {steps}, {samples}, "
            "largest relative error {error:.1e}.",
            mode=verdict.mode,
            steps=steps,
            samples=samples,
            error=worst,
            parts="; ".join(parts),
        )
    else:
        text = tr(
            "No defect was found in {steps}, but the clipped sum was not compared with clipping by hand.", steps=steps
        )
    console.print(f"\n{text}", soft_wrap=True, markup=False)


def _print_step(number: int, step: "StepResult", console: Console) -> None:
    from opacus_memprof.loop_check.records import physical_batches  # imports torch

    said = tr(
        "logical step {number}: {batches}, {samples}",
        number=number,
        batches=tr_sentence(physical_batches(step.batches)),
        samples=tr_sentence(format_count(step.samples, "sample")),
    )
    said += tr(", {count} clipped", count=step.clipped) if step.norms else ""
    said += tr(", noise {ratio:.3f} times the requested", ratio=step.noise) if step.noise is not None else ""
    console.print(said, soft_wrap=True)
    worst = sorted(step.errors, key=lambda name: -step.errors[name])
    if worst:
        deviation = tr("deviation")
        console.print(f"{deviation:>9}  {tr('of the clipped sum of, relative to its largest element')}")
    for name in worst[:_MOST_ROWS]:
        style = "bold red" if step.errors[name] > step.tolerance else None
        console.print(f"{step.errors[name]:>9.1e}  {name}", style=style, soft_wrap=True)
    if len(worst) > _MOST_ROWS:
        more = tr(
            "{count} more, none above {error:.1e}", count=len(worst) - _MOST_ROWS, error=step.errors[worst[_MOST_ROWS]]
        )
        console.print(f"{'':>9}  {more}")
