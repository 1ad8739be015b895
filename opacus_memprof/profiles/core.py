# SPDX-License-Identifier: Apache-2.0
"""The compiled core: replays and follows event files. Needs no torch, so that profiles are read where there is none.

Raises ImportError, with one sentence and what to do, when it has not been built or cannot be loaded.
"""

try:
    from opacus_memprof._core import BUILTIN_CATEGORIES, BUILTIN_PHASES, Follower, for_event_rows, replay
except ImportError as error:
    raise ImportError(
        f"opacus-memprof's compiled core cannot be loaded ({error}): install it again with `pip install .` in its "
        "source tree"
    ) from error

__all__ = ["BUILTIN_CATEGORIES", "BUILTIN_PHASES", "Follower", "for_event_rows", "replay"]
