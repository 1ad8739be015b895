# SPDX-License-Identifier: Apache-2.0
"""The cells of a plan: one for each combination, smallest change first."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from opacus_memprof.planning.arguments import with_argument
from opacus_memprof.planning.configuration import PlannedConfiguration
from opacus_memprof.planning.table import PlannedCell

_DEFAULT = "expandable_segments:False"  # torch's default without settings
# The effort of a change: an environment variable, an argument, another machine.
_OF_SETTINGS, _OF_MODE, _OF_GPU = 1, 2, 4


def make_cells(
    base: PlannedConfiguration,
    gpus: Sequence[str],
    *,
    modes: tuple[str, Sequence[str]] | None = None,
    settings: Sequence[str] = (),
    values: Mapping[str, Sequence[int]] | None = None,
) -> list[PlannedCell]:
    """Makes a cell for each combination. For equal values of arguments, the smallest changes of the base come first.

    Args:
        base: the program as the user gave it.
        gpus: kinds of GPU.
        modes: the argument for the mode, and its values.
        settings: settings of torch's allocator; empty to keep the present ones.
        values: values of further arguments.
    """
    argument, names = modes or ("", ())
    values = values or {}
    cells = []
    kinds = list(enumerate(gpus))
    numbered: list[tuple[int, str | None]] = list(enumerate(names)) if names else [(0, None)]
    tried: list[str | None] = list(settings) if settings else [None]
    for several in itertools.product(*values.values()):
        chosen = dict(zip(values, several, strict=True))
        combinations = sorted(itertools.product(kinds, numbered, tried), key=_change)
        for (_, gpu), (_, mode), setting in combinations:
            program = base.program
            for name, value in [*chosen.items(), *([(argument, mode)] if mode is not None else [])]:
                program = replace(program, arguments=with_argument(program.arguments, name, value))
            changes = () if setting is None else ({"kind": "allocator_setting", "value": setting},)
            configuration = replace(base, program=program, gpu=gpu, changes=changes)
            cells.append(PlannedCell(mode, configuration, setting, chosen))
    return cells


def _change(combination: tuple[tuple[int, str], tuple[int, str | None], str | None]) -> int:
    """Returns the effort of a combination, for sorting."""
    (gpu, _), (mode, _), settings = combination
    changed = _OF_MODE * (mode > 0) + _OF_SETTINGS * (settings not in (None, _DEFAULT))
    return _OF_GPU * gpu + changed
