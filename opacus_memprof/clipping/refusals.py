# SPDX-License-Identifier: Apache-2.0
"""What one rank finds, all ranks refuse: an error of a forward or a backward waits for the optimizer's step."""

from __future__ import annotations

from opacus_memprof.errors import MemprofError


class KeptRefusal:
    """The first error since the last step, where several ranks train one model.

    A rank that raised it at once would leave the others waiting for its gradients. Its program goes on instead, without
    gradients, and the step raises on every rank.

    Attributes:
        waits: whether errors wait for the step; they are raised at once otherwise.
        error: the error that waits.
    """

    def __init__(self) -> None:
        self.waits = False
        self.error: MemprofError | None = None

    def add(self, error: MemprofError) -> None:
        """Keeps an error for the step.

        Raises:
            MemprofError: the error, if errors do not wait.
        """
        if not self.waits:
            raise error
        self.error = self.error or error

    def pop(self) -> None:
        """Raises MemprofError if an error waits, and forgets it."""
        error, self.error = self.error, None
        if error is not None:
            raise error
