# SPDX-License-Identifier: Apache-2.0
"""A bench that makes models anew for modes that cannot be undone."""

from __future__ import annotations

import gc
from collections.abc import Callable

from benchmarks.clipping.modes_worker import Bench
from benchmarks.clipping.training_modes import FASTDP, FLASHNORM


class RivalBench(Bench):
    """Libraries of others change models in place: they get a new one for each visit."""

    def wrap(self, mode: str) -> tuple[Callable[[], None], Callable[[], None]]:
        if mode not in FASTDP and mode not in FLASHNORM:
            return super().wrap(mode)
        self.renew(mode)
        step, _ = super().wrap(mode)
        return step, lambda: self.renew("vanilla")

    def renew(self, mode: str) -> None:
        """Makes another model when the last one has gone."""
        del self.model, self.optimizer
        gc.collect()
        self.make_model(mode)
