# SPDX-License-Identifier: Apache-2.0
"""A callback for Lightning."""

from collections.abc import Iterable
from typing import Any

from pytorch_lightning import Callback

from opacus_memprof.integrations.loggers import Logger, StepLog


class MemprofCallback(Callback):
    """Follows the model and its optimizers in the session that is running, unless `make_private` has had them followed,
    takes a snapshot at the end of each epoch, and logs memory by category.

    Args:
        loggers: see `opacus_memprof.integrations.loggers`.
        every: steps between two logs.
    """

    def __init__(self, loggers: Iterable[Logger] = (), *, every: int = 1) -> None:
        self._log = StepLog(loggers, every)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Raises MemprofError where no session is running."""
        self._log.session().attach(pl_module, *trainer.optimizers)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After the optimizer's step."""
        self._log.step_ended(trainer.global_step)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """A snapshot in the profile."""
        self._log.session().snapshot(f"epoch {trainer.current_epoch}")
