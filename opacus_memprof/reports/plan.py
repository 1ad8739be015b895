# SPDX-License-Identifier: Apache-2.0
"""What pictures and tables show of a plan: its candidates, each a configuration that was run."""

from collections.abc import Iterator
from dataclasses import dataclass

from msgspec import UNSET

from opacus_memprof.profiles.plan import Plan, PlanCell, PlannedRun, RunOfValue


@dataclass(frozen=True)
class Candidate:
    """A configuration.

    Attributes:
        label: how it differs from the others.
        gpu: the kind.
        value: of the argument that was searched, None without one.
        run: of the largest value that fits, or of the one that there is.
        room: bytes that may be reserved on the GPU that the plan is for; None where that is not known.
    """

    label: str
    gpu: str
    value: int | None
    run: PlannedRun
    room: int | None


def candidates(plan: Plan) -> list[Candidate]:
    """The candidates that have an answer, in the order of the table. Of one configuration it is itself, the same with
    more memory, and each advice that was tried."""
    if plan.verdict is not UNSET:
        verdict = plan.verdict
        runs = {"as it is": verdict.run, "with more memory": verdict.with_more_memory}
        runs |= {advice.title: advice.tried for advice in verdict.advice}
        room = verdict.run.may_reserve_bytes
        return [Candidate(label, verdict.gpu, None, run, room) for label, run in runs.items() if run is not None]
    return [
        Candidate(cell_label(cell), cell.gpu, cell.largest, run, run.may_reserve_bytes)
        for cell in cells(plan)
        if (run := answer(plan, cell)) is not None
    ]


def cells(plan: Plan) -> list[PlanCell]:
    """The lines of the table; [] of a plan of one configuration."""
    return [] if plan.cells is UNSET else plan.cells


def answer(plan: Plan, cell: PlanCell) -> RunOfValue | None:
    """The run of the largest value that fits; where none is searched the only one. None where there is no answer."""
    searched = plan.search is not UNSET and plan.search is not None
    wanted = cell.largest if searched else 0
    return next((run for run in cell.runs if run.value == wanted), None)


def cell_label(cell: PlanCell) -> str:
    """`seq-length=512, ghost, expandable_segments:True on h100`."""
    words = [f"{name}={value}" for name, value in cell.fixed.items()]
    words += [word for word in (cell.mode, cell.settings) if word]
    return f"{', '.join(words)} on {cell.gpu}" if words else cell.gpu


def title(plan: Plan) -> str:
    """The program and its arguments."""
    ranks = f" on {plan.ranks} GPUs" if plan.ranks > 1 else ""
    return f"{' '.join([plan.program, *plan.arguments])}{ranks}"


def rows(plan: Plan) -> Iterator[tuple[str, str, PlannedRun]]:
    """All runs that plan.json has: what it is, its kind of GPU and the run."""
    if plan.verdict is not UNSET:
        yield from ((candidate.label, candidate.gpu, candidate.run) for candidate in candidates(plan))
    if plan.draws is not UNSET and plan.draws.with_it is not None and plan.verdict is not UNSET:
        label = f"max_physical_batch_size={plan.draws.max_physical_batch_size}"
        yield label, plan.verdict.gpu, plan.draws.with_it
    for cell in cells(plan):
        yield from ((cell_label(cell), cell.gpu, run) for run in cell.runs)
