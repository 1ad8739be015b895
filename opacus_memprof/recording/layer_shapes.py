# SPDX-License-Identifier: Apache-2.0
"""The layer shapes that hooks have recorded in the current session."""

from opacus_memprof.profiles.layer_shapes import TrainingShapes
from opacus_memprof.recording import hook_facts

_current = TrainingShapes()


def current() -> TrainingShapes:
    """The shapes of the running session, or of the latest one if none is running."""
    return _current


def _clear() -> None:
    global _current
    _current = TrainingShapes()


hook_facts.on_clear(_clear)
