# SPDX-License-Identifier: Apache-2.0
"""A drop-in for Opacus' PrivacyEngine."""

from typing import Any

import opacus

from opacus_memprof.clipping import FlashClipEngineMixin
from opacus_memprof.hooks.privacy_engine import in_setup_phase
from opacus_memprof.recording.faults import Observation, observe
from opacus_memprof.session.session import current


class PrivacyEngine(FlashClipEngineMixin, opacus.PrivacyEngine):  # type: ignore[misc]
    """Opacus' PrivacyEngine, except that the session that is recording follows what `make_private` (or
    `make_private_with_epsilon`) returns, and that there are two modes more: `grad_sample_mode="flash_clip"`
    and "auto" (docs/flash_clip.md). Steps of any mode can be compared with clipping by hand (`check`).
    Otherwise, and without a session, it is Opacus' own.
    """

    def _make_private(self, given: dict[str, Any], own: dict[str, Any]) -> Any:
        return observe(super()._make_private, _observe_make_private)(given, own)


def _observe_make_private(given: dict[str, Any], own: dict[str, Any]) -> Observation:
    session = current()
    return in_setup_phase(lambda prepared: None if session is None else session.attach(*prepared))
