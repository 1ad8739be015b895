# SPDX-License-Identifier: Apache-2.0
"""A callback for Hugging Face's Trainer."""

from collections.abc import Iterable
from typing import Any

from opacus.optimizers import DPOptimizer
from transformers import TrainerCallback

from opacus_memprof.integrations.loggers import Logger, StepLog


class MemprofCallback(TrainerCallback):
    """Follows the Trainer's model and optimizer in the session that is running, takes a snapshot at the end of each
    epoch, and logs memory by category.

    It also clears what a private optimizer keeps between steps: the Trainer clears the model's gradients only, and
    Opacus refuses to step again while the optimizer's clipped sums are there.

    Args:
        loggers: see `opacus_memprof.integrations.loggers`.
        every: steps between two logs.
    """

    def __init__(self, loggers: Iterable[Logger] = (), *, every: int = 1) -> None:
        self._log = StepLog(loggers, every)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raises MemprofError where no session is running."""
        self._log.session().attach(kwargs["model"], _unwrapped(kwargs["optimizer"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the optimizer's step, and after the Trainer has cleared the model's gradients."""
        self._log.step_ended(state.global_step)
        optimizer = _unwrapped(kwargs["optimizer"])
        if isinstance(optimizer, DPOptimizer):
            optimizer.zero_grad(set_to_none=True)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A snapshot in the profile."""
        self._log.session().snapshot(f"epoch {state.epoch:g}")


def _unwrapped(optimizer: Any) -> Any:
    """Without accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
