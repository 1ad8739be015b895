# SPDX-License-Identifier: Apache-2.0
"""A drop-in for Opacus' PrivacyEngine."""

from typing import Any

import opacus

from opacus_memprof.clipping import FlashClipEngineMixin
from opacus_memprof.errors import MemprofError
from opacus_memprof.hooks.privacy_engine import in_setup_phase
from opacus_memprof.recording.faults import Observation, observe
from opacus_memprof.session.session import current


class PrivacyEngine(FlashClipEngineMixin, opacus.PrivacyEngine):  # type: ignore[misc]
    """Opacus' PrivacyEngine, except that the session that is recording follows what `make_private` (or
    `make_private_with_epsilon`) returns, and that there are two modes more: `grad_sample_mode="flash_clip"`
    and "auto" (docs/flash_clip.md). Otherwise, and without a session, it is Opacus' own.
    """

    def make_private(self, **kwargs: Any) -> Any:
        """See `opacus.PrivacyEngine.make_private`: the same arguments, the same result; and, for flash_clip,
        `FlashClipEngineMixin.make_private`. Raises MemprofError for ghost_tp."""
        if kwargs.get("grad_sample_mode") == "ghost_tp":
            raise MemprofError(
                "ghost_tp cannot be trained through Opacus' PrivacyEngine, which has no optimizer for it: use "
                "ghost_fsdp over several GPUs, or ghost"
            )
        return observe(super().make_private, _observe_make_private)(**kwargs)


def _observe_make_private(**kwargs: Any) -> Observation:
    session = current()
    return in_setup_phase(lambda prepared: None if session is None else session.attach(*prepared))
