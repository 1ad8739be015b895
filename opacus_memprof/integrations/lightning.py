# SPDX-License-Identifier: Apache-2.0
"""A callback for Lightning."""

from collections.abc import Iterable
from typing import Any

from pytorch_lightning import Callback

from opacus_memprof.integrations.loggers import Logger, StepLog


class MemprofCallback(Callback):
    """Attaches the model and its optimizers to the running session, and logs memory by category.

    Takes a snapshot at the end of each epoch. Results of `make_private` are attached already.

    Args:
        loggers: see `opacus_memprof.integrations.loggers`.
        every: steps between two logs.
    """

    def __init__(self, loggers: Iterable[Logger] = (), *, every: int = 1) -> None:
        self._log = StepLog(loggers, every)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attaches model and optimizers. Raises MemprofError if no session is running."""
        self._log.session().attach(pl_module, *trainer.optimizers)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Logs memory after the optimizer's step."""
        self._log.step_ended(trainer.global_step)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Takes a snapshot."""
        self._log.session().snapshot(f"epoch {trainer.current_epoch}")
