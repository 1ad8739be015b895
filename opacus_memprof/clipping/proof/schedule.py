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


def is_explained(check: Check, step: int) -> bool:
    """Returns whether a step is compared with what its outputs explain: when it is checked, but with "sometimes" only
    the 1st, 8th, 64th, 512th and then every 1000th, since it takes as long as a step.
    """
    return is_checked(check, step) and (check != "sometimes" or step % _LATER == 0 or (step.bit_length() - 1) % 3 == 0)


def has_sums_checked(check: Check, step: int) -> bool:
    """Returns whether the sums of a step that is checked are compared with autograd's: with "sometimes" in every other
    check, and not in a step that is explained, which shows the same.
    """
    return check != "sometimes" or (step.bit_length() % 2 == 1 and not is_explained(check, step))
