# SPDX-License-Identifier: Apache-2.0
"""The one seam that every script passes: `PrivacyEngine.make_private`, which `make_private_with_epsilon` calls too."""

import functools
from collections.abc import Callable
from typing import Any

from opacus import PrivacyEngine
from opacus.utils.adaptive_clipping import PrivacyEngineAdaptiveClipping

from opacus_memprof import _native
from opacus_memprof.hooks.attach import Attachment
from opacus_memprof.hooks.vocabulary import SETUP


def setting_up(make_private: Callable[[], Any]) -> Any:
    """Calls it in the phase `setup`: preparing a model for functorch copies its layers on the device."""
    before = _native.set_phase(SETUP)
    try:
        return make_private()
    finally:
        _native.set_phase(before)


def wrap_make_private(attachment: Attachment, attach: Callable[[Any], Attachment]) -> None:
    """Calls `attach` with what any engine's make_private returns; the program gets the same tuple."""
    for engine in (PrivacyEngine, PrivacyEngineAdaptiveClipping):
        if "make_private" in engine.__dict__:
            wrapper = _attaching(engine.__dict__["make_private"], attachment, attach)
            attachment.replace_attribute(engine, "make_private", wrapper)


def _attaching(
    make_private: Callable[..., Any], attachment: Attachment, attach: Callable[[Any], Attachment]
) -> Callable[..., Any]:
    @functools.wraps(make_private)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = setting_up(functools.partial(make_private, self, *args, **kwargs))
        attachment.on_detach(attach(prepared).detach)
        return prepared

    return wrapper
