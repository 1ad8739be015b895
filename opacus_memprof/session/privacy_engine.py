# SPDX-License-Identifier: Apache-2.0
"""A drop-in for Opacus' PrivacyEngine."""

import os
from pathlib import Path
from typing import Any

import opacus
from msgspec import to_builtins

from opacus_memprof.clipping import FlashClipEngineMixin
from opacus_memprof.hooks.opacus_hooks import in_setup_phase
from opacus_memprof.profiles.directory import PRIVACY_CHECK
from opacus_memprof.profiles.privacy_check import read_privacy_check, write_privacy_checks
from opacus_memprof.recording.faults import CallHook, observe
from opacus_memprof.session.session import current


class PrivacyEngine(FlashClipEngineMixin, opacus.PrivacyEngine):  # type: ignore[misc]
    """Opacus' PrivacyEngine with profiling and exact clipping.

    A recording session follows the results of `make_private` and `make_private_with_epsilon`. There are two more modes,
    `grad_sample_mode="flash_clip"` and "auto" (docs/flash_clip.md). Steps of any mode can be compared with clipping by
    hand (`check`), and `privacy_check.json` says what was proved. Otherwise it behaves as Opacus' engine.
    """

    def _make_private(self, given: dict[str, Any], own: dict[str, Any]) -> Any:
        prepared = observe(super()._make_private, _observe_make_private)(given, own)
        session = current()
        if session is not None:
            session.follow_privacy_check(self._record.to_data)
        return prepared

    def save_privacy_check(self, path: str | os.PathLike[str]) -> None:
        """Writes what was proved about the models that this engine made private.

        With several ranks, only the first one writes.

        Args:
            path: the path of the file, such as "privacy_check.json".

        Raises:
            MemprofError: nothing has been made private, or the file cannot be written.
        """
        write_privacy_checks([self.privacy_check()], path)

    def save_checkpoint(self, *, path: Any, **kwargs: Any) -> None:
        """Saves a checkpoint as Opacus does, and writes `privacy_check.json` into the directory of the checkpoint.

        Args:
            path: the path of the checkpoint, or a file object, for which no `privacy_check.json` is written.
            kwargs: see Opacus.

        Raises:
            MemprofError: privacy_check.json cannot be written. The checkpoint has been written.
        """
        super().save_checkpoint(path=path, **kwargs)
        if self._record.models and isinstance(path, (str, os.PathLike)):
            self.save_privacy_check(_beside(path))

    def load_checkpoint(self, *, path: Any, **kwargs: Any) -> Any:
        """Loads a checkpoint as Opacus does.

        Before the first step, it also keeps the content of `privacy_check.json` next to the checkpoint, under
        `earlier`.

        Args:
            path: the path of the checkpoint, or a file object.
            kwargs: see Opacus.

        Raises:
            MemprofError: privacy_check.json cannot be read. Nothing has been loaded.
        """
        continues = isinstance(path, (str, os.PathLike)) and not any(each.steps for each in self._record.models)
        before = read_privacy_check(_beside(path)) if continues else None
        checkpoint = super().load_checkpoint(path=path, **kwargs)
        if before is not None:
            content = to_builtins(before)
            self._record.earlier = [*content.pop("earlier"), {**content, "earlier": []}]
        return checkpoint


def _beside(path: str | os.PathLike[str]) -> Path:
    return Path(path).with_name(PRIVACY_CHECK)


def _observe_make_private(given: dict[str, Any], own: dict[str, Any]) -> CallHook:
    session = current()
    return in_setup_phase(lambda prepared: None if session is None else session.attach(*prepared))
