# SPDX-License-Identifier: Apache-2.0
"""The compiled core, which replays and follows event files. Needs no torch, so profiles can be read without it.

Raises:
    ImportError: it has not been built or cannot be loaded. The message is one sentence with a remedy.
"""

from typing import Any

try:
    from opacus_memprof import _core
    from opacus_memprof._core import BUILTIN_CATEGORIES, BUILTIN_PHASES, Follower, for_event_rows, replay
except ImportError as error:
    raise ImportError(
        f"opacus-memprof's compiled core cannot be loaded ({error}): install it again with `pip install .` in its "
        "source tree"
    ) from error

__all__ = ["BUILTIN_CATEGORIES", "BUILTIN_PHASES", "Follower", "for_event_rows", "read_torch_snapshot", "replay"]


def read_torch_snapshot(path: str) -> dict[str, Any]:
    """Reads a pickle of torch.cuda.memory._dump_snapshot, without Python's pickle and without running code.

    Returns:
        The arrays of csrc/core/torch_snapshot.h as bytes, and its strings.

    Raises:
        RuntimeError: the file is not such a pickle.
    """
    return _core.read_torch_snapshot(path)
