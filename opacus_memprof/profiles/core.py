# SPDX-License-Identifier: Apache-2.0
"""The compiled core, which replays and follows event files. Needs no torch, so profiles can be read without it.

Raises:
    ImportError: it has not been built or cannot be loaded. The message is one sentence with a remedy.
"""

try:
    from opacus_memprof._core import BUILTIN_CATEGORIES, BUILTIN_PHASES, Follower, for_event_rows, replay
except ImportError as error:
    raise ImportError(
        f"opacus-memprof's compiled core cannot be loaded ({error}): install it again with `pip install .` in its "
        "source tree"
    ) from error

__all__ = ["BUILTIN_CATEGORIES", "BUILTIN_PHASES", "Follower", "for_event_rows", "replay"]
