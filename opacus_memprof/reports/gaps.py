# SPDX-License-Identifier: Apache-2.0
"""Where events stand in a picture whose axis counts the events that a profile has, without those of gaps."""

from collections.abc import Sequence

from opacus_memprof.profiles.profile import EventGap


def place_event(event: int, gaps: Sequence[EventGap]) -> int:
    """How many events the profile has before the event with this number."""
    return event - sum(gap.events for gap in gaps if gap.first_event + gap.events <= event)


def place_gap(gap: EventGap, gaps: Sequence[EventGap]) -> int:
    """As place_event, for the beginning of a gap."""
    return place_event(gap.first_event, gaps)
