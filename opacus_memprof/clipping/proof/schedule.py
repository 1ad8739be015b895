# SPDX-License-Identifier: Apache-2.0
"""The schedule of checks."""

from opacus_memprof.clipping.arguments import Check

_LAST_POWER = 1024
_LATER = 1000


def is_checked(check: Check, step: int) -> bool:
    """Returns whether a logical step is checked.

    Args:
        check: the schedule. "sometimes" means steps 1, 2, 4, 8, ... 1024 and then every 1000th.
        step: the number of the step; the first is 1.
    """
    if check == "sometimes":
        return step & (step - 1) == 0 if step <= _LAST_POWER else step % _LATER == 0
    return check == "always" or (check == "first" and step == 1)


def is_explained(check: Check, step: int) -> bool:
    """Returns whether a step is compared with the gradients that its outputs explain.

    This happens when a step is checked, but with "sometimes" only in steps 1, 8, 64, 512 and then every 1000th, because
    it takes as long as a step.
    """
    return is_checked(check, step) and (check != "sometimes" or step % _LATER == 0 or (step.bit_length() - 1) % 3 == 0)


def has_sums_checked(check: Check, step: int) -> bool:
    """Returns whether the sums of a checked step are compared with autograd's.

    With "sometimes" this happens in every other check, except in explained steps, which show the same.
    """
    return check != "sometimes" or (step.bit_length() % 2 == 1 and not is_explained(check, step))
