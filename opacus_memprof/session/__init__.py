# SPDX-License-Identifier: Apache-2.0
"""A profiling session, from its start to the profile that it writes."""

from opacus_memprof.session.outcome import one_line, outcome
from opacus_memprof.session.session import Session, current, profile
from opacus_memprof.session.tags import retag, tag

__all__ = ["Session", "current", "one_line", "outcome", "profile", "retag", "tag"]
