# SPDX-License-Identifier: Apache-2.0
"""Programs of other files with fewer checks: in the first step of each situation alone, and none at all.

What changes between steps is then seen because it makes a new situation, and not because a known one is checked again.
"""

from dataclasses import replace
from typing import Any

from tests.exactness.program import Program
from tests.exactness.programs import arguments, changes, modes, user_code

_ONCE = (
    "arguments_dtype_mixes",
    "arguments_dimensions_mix",
    "arguments_flag_mixes",
    "changes_class_mixes",
    "changes_mixing_put_in",
    "hook_mixes_later",
    "hook_replaced_later",
    "modes_autocast_mixes",
    "modes_own_flag_mixes",
    "modes_own_list_mixes",
    "modes_part_trains_and_mixes",
)
_NEVER = ("hook_scales_output",)
_OTHERS = {p.name: p for file in (arguments, changes, modes, user_code) for p in file.PROGRAMS}


def _with_check(name: str, check: str, suffix: str) -> Program:
    program = _OTHERS[name]
    settings: dict[str, Any] = {**program.settings, "module_options": {"check": check}}
    return replace(program, name=f"{name}_{suffix}", settings=settings)


PROGRAMS = [
    *(_with_check(name, "first", "checked_once") for name in _ONCE),
    *(_with_check(name, "off", "unchecked") for name in _NEVER),
]
