# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof doctor --script`: runs a script for two logical steps, and compares them with clipping by hand."""

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from opacus_memprof.errors import MemprofError
from opacus_memprof.recording.startup import AfterImport
from opacus_memprof.running.program import Program

if TYPE_CHECKING:
    from opacus_memprof.loop_check.follow import Follower
    from opacus_memprof.loop_check.records import StepResult

_MOST_ROWS = 20


@dataclass(frozen=True)
class ScriptVerdict:
    """The result of checking a program.

    Attributes:
        mode: the grad_sample_mode.
        steps: the measurements of the logical steps.
        defects: sentences; empty if every check passed.
        unchecked: parts that were not checked.
        notes: facts that are not defects, but worth knowing.
        failure: the error that ended a check, in one line; None if every check ended.
    """

    mode: str
    steps: list["StepResult"]
    defects: list[str]
    unchecked: list[str]
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
                ending = self._ending(error)
                if self._follower is not None and isinstance(error, Exception):
                    self._follower.explain(error)
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
            findings.note(f"{self._script} {ending} after {_count(len(follower.results), 'logical step')}.")
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
        console.print(f"DEFECT: {defect}", style="bold red", soft_wrap=True, markup=False)
    for note in verdict.notes:
        console.print(f"note: {note}", soft_wrap=True, markup=False)
    for each in verdict.unchecked:
        console.print(f"not checked: {each}", style="yellow", soft_wrap=True, markup=False)
    samples, steps = sum(step.samples for step in verdict.steps), _count(len(verdict.steps), "logical step")
    if verdict.defects:
        found = _count(len(verdict.defects), "defect")
        text = f"{found}: neither the training nor the privacy that is accounted for can be relied on."
    elif verdict.failure is not None:
        text = (
            f"The check itself failed ({verdict.failure}), so it is unknown whether this script trains exactly. "
            "Please report this with the script."
        )
    elif any(step.errors for step in verdict.steps):
        worst = max(error for step in verdict.steps for error in step.errors.values())
        text = (
            f"grad_sample_mode={verdict.mode!r} trains this script exactly: {steps}, {_count(samples, 'sample')}, "
            f"largest relative error {worst:.1e}."
        )
    else:
        text = f"No defect was found in {steps}, but the clipped sum was not compared with clipping by hand."
    console.print(f"\n{text}", soft_wrap=True, markup=False)


def _print_step(number: int, step: "StepResult", console: Console) -> None:
    noise = f", noise {step.noise:.3f} times the requested" if step.noise is not None else ""
    console.print(
        f"logical step {number}: {_count(step.batches, 'physical batch', 'es')}, {_count(step.samples, 'sample')}"
        f"{f', {step.clipped} clipped' if step.norms else ''}{noise}",
        soft_wrap=True,
    )
    worst = sorted(step.errors, key=lambda name: -step.errors[name])
    if worst:
        console.print(f"{'deviation':>9}  of the clipped sum of, relative to its largest element")
    for name in worst[:_MOST_ROWS]:
        style = "bold red" if step.errors[name] > step.tolerance else None
        console.print(f"{step.errors[name]:>9.1e}  {name}", style=style, soft_wrap=True)
    if len(worst) > _MOST_ROWS:
        console.print(f"{'':>9}  {len(worst) - _MOST_ROWS} more, none above {step.errors[worst[_MOST_ROWS]]:.1e}")


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"
