# SPDX-License-Identifier: Apache-2.0
"""Which steps are checked."""

from opacus_memprof.clipping.arguments import Check

_LAST_POWER = 1024
_LATER = 1000


def is_checked(check: Check, step: int) -> bool:
    """Returns whether a logical step is checked.

    Args:
        check: the schedule. "sometimes" is steps 1, 2, 4, 8, ... 1024 and then every 1000th.
        step: the number of the step; the first is 1.
    """
    if check == "sometimes":
        return step & (step - 1) == 0 if step <= _LAST_POWER else step % _LATER == 0
    return check == "always" or (check == "first" and step == 1)
