# SPDX-License-Identifier: Apache-2.0
"""Wraps `PrivacyEngine.make_private`, which every script calls: `make_private_with_epsilon` calls it too."""

import functools
from collections.abc import Callable
from typing import Any

from opacus import PrivacyEngine
from opacus.utils.adaptive_clipping import PrivacyEngineAdaptiveClipping

from opacus_memprof.hooks.attachment import Attachment
from opacus_memprof.hooks.vocabulary import SETUP
from opacus_memprof.recording import native


def run_in_setup_phase(make_private: Callable[[], Any]) -> Any:
    """Calls `make_private` in the phase `setup`: preparing a model for functorch copies its layers on the device."""
    previous_phase = native.set_phase(SETUP)
    try:
        return make_private()
    finally:
        native.set_phase(previous_phase)


def wrap_make_private(attachment: Attachment, attach: Callable[[Any], Attachment]) -> None:
    """Passes what any engine's make_private returns to `attach`; the program gets the same tuple."""
    for engine in (PrivacyEngine, PrivacyEngineAdaptiveClipping):
        if "make_private" in engine.__dict__:
            wrapper = _wrap(engine.__dict__["make_private"], attachment, attach)
            attachment.replace_attribute(engine, "make_private", wrapper)


def _wrap(
    make_private: Callable[..., Any], attachment: Attachment, attach: Callable[[Any], Attachment]
) -> Callable[..., Any]:
    @functools.wraps(make_private)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = run_in_setup_phase(functools.partial(make_private, self, *args, **kwargs))
        attachment.on_detach(attach(prepared).detach)
        return prepared

    return wrapper
