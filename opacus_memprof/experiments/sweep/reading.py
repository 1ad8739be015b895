# SPDX-License-Identifier: Apache-2.0
"""What pictures ask of a result (docs/experiments.md describes its keys)."""

from collections.abc import Mapping
from typing import Any

from opacus_memprof.experiments.configuration import Configuration
from opacus_memprof.experiments.sweep.grid import Cell
from opacus_memprof.units import format_bytes

Result = Mapping[str, Any]


def label(result: Result) -> str:
    """How its configuration differs from others, for people."""
    return Cell(Configuration.from_json(result["config"])).label


def peak_bytes(result: Result) -> int | None:
    """Requested bytes at the peak; None where nothing was measured. Out of memory, what had been reached until then."""
    return None if result["peak"] is None else int(result["peak"]["requested_bytes"])


def categories(result: Result) -> dict[str, int]:
    """At the peak, without those that have no bytes."""
    peak = result["peak"]
    return {} if peak is None else {name: size for name, size in peak["categories"].items() if size}


def failure(result: Result) -> str | None:
    """In a few words, why it did not finish; None where it did."""
    if result["status"] == "finished":
        return None
    if result["status"] == "out_of_memory":
        failed = failed_allocation(result)
        asked = f", asked {format_bytes(failed['requested_bytes'])} more" if failed else ""
        return f"out of memory{asked}"
    return str(result["status"])


def outcome(result: Result) -> str:
    """To put behind a label: nothing where it finished."""
    words = {"finished": "", "out_of_memory": " (OOM)"}
    return words.get(result["status"], f" ({result['status']})")


def failed_allocation(result: Result) -> Mapping[str, Any] | None:
    """What a run that is out of memory ended with, as profile.json has it: libraries handle those before. None of a run
    that ended otherwise."""
    failures = result["out_of_memory"] if result["status"] == "out_of_memory" else ()
    return failures[-1] if failures else None
