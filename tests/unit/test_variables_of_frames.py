# SPDX-License-Identifier: Apache-2.0
"""Reading the variables of a running function changes nothing for it."""

import sys
import weakref

from opacus_memprof.versions import variables_of


class Value:
    """Something that can be referred to weakly."""


def test_what_the_program_deletes_dies() -> None:
    value = Value()
    assert variables_of(sys._getframe())["value"] is value
    gone = weakref.ref(value)
    del value
    assert gone() is None


def test_the_program_keeps_its_own_locals() -> None:
    learning_rate = 0.5
    settings = locals()
    variables_of(sys._getframe())
    assert settings["learning_rate"] == learning_rate


def test_variables_of_a_module_stay() -> None:
    assert variables_of(_module_frame)["Value"] is Value
    assert "Value" in globals()


_module_frame = sys._getframe()
