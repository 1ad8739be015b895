# SPDX-License-Identifier: Apache-2.0
"""Wraps `PrivacyEngine.make_private`, which every script calls: `make_private_with_epsilon` calls it too."""

from collections.abc import Callable
from typing import Any

from opacus_memprof.hooks.vocabulary import SETUP
from opacus_memprof.recording import native
from opacus_memprof.recording.attachment import Attachment
from opacus_memprof.recording.faults import Observation


def observe_make_private(attachment: Attachment, follow: Callable[[Attachment, Any], object]) -> None:
    """Calls `follow(attachment, prepared)` with what any engine's make_private returns; the program gets the same."""

    def observation(*args: Any, **kwargs: Any) -> Observation:
        return in_setup_phase(lambda prepared: follow(attachment, prepared))

    attachment.observe("opacus:PrivacyEngine.make_private", observation)


def in_setup_phase(follow: Callable[[Any], object]) -> Observation:
    """Observes `make_private` in the phase `setup`: preparing a model for functorch copies its layers on the device.
    Calls `follow` with what it returns."""
    previous_phase = native.set_phase(SETUP)
    try:
        prepared = yield
    finally:
        native.set_phase(previous_phase)
    follow(prepared)
