# SPDX-License-Identifier: Apache-2.0
"""A profile's events, all at once."""

from pathlib import Path

import numpy as np

from opacus_memprof.analysis.events import Events
from opacus_memprof.analysis.names import Names


def rows_of(directory: Path) -> tuple[np.ndarray, Names]:
    """The rows (opacus_memprof.analysis.events.ROW), and what their ids mean."""
    events, pieces = Events(directory), []
    events.each(pieces.append)
    return np.concatenate(pieces), events.names
