# SPDX-License-Identifier: Apache-2.0
"""The configuration of a plan: a program on a virtual GPU."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class PlannedProgram:
    """The program: a script, or with `module` a module, and its arguments. `title` is shown instead, if given."""

    target: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    title: str = ""

    @property
    def name(self) -> str:
        return self.title or self.target

    @property
    def words(self) -> tuple[str, ...]:
        """The arguments that the user has given."""
        return () if self.title else self.arguments


@dataclass(frozen=True)
class PlannedConfiguration:
    """A program on a kind of virtual GPU.

    Attributes:
        memory: bytes of the GPU; None for the default of its kind.
        ranks: processes of the job, each with a GPU. Only the first one is run.
        changes: actions of a suggestion (docs/oom.md) that are applied without changing the program.
    """

    program: PlannedProgram
    gpu: str
    memory: int | None = None
    changes: tuple[Mapping[str, Any], ...] = ()
    ranks: int = 1

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "changes": [dict(change) for change in self.changes]}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "PlannedConfiguration":
        program = content["program"]
        return cls(
            PlannedProgram(program["target"], tuple(program["arguments"]), program["module"]),
            content["gpu"],
            content["memory"],
            tuple(content["changes"]),
            content["ranks"],
        )
