# SPDX-License-Identifier: Apache-2.0
"""The toolkit's reports, as text. Sizes in MB of 2**20 bytes, as in its other words."""

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from rich.console import Console

from opacus_memprof.profiles.profile import Finding
from opacus_memprof.reports.findings import print_findings
from opacus_memprof.toolkit import anomalies, journal, model

_WIDTH = 120


def report_text(
    title: str, history: Iterable[Mapping[str, Any]], findings: Sequence[Finding], since: float = 0.0
) -> str:
    """A report: each snapshot in its turn, who counted and the categories of the last one, and what the journal has:
    models, differences, findings.

    Args:
        history: snapshots, oldest first.
        findings: what was found in them.
        since: a time of time.monotonic(); what the journal has from before it is left out.
    """
    lines = [title, "=" * len(title), "sizes in MB of 2^20 bytes"]
    last: Mapping[str, Any] = {}
    sources: dict[str, str] = {}
    for last in history:
        lines.append(f"{last['timestamp']}  {last['name']}")
        for reading in last["devices"]:
            counted = sources.get(reading["device"], reading["source"])
            sources[reading["device"]] = reading["source"]
            changed = f", counted by {reading['source']} from here on" if counted != reading["source"] else ""
            lines.append(f"  {describe(reading)}{changed}")
    for reading in last.get("devices", []):
        lines += ["", f"{anomalies.label(reading['device'])}, counted by {reading['source']}"]
        largest = sorted(reading["categories_mb"].items(), key=lambda item: -item[1])
        lines += [f"  {category:<28}{size:>12.2f}MB" for category, size in largest]
    if last:
        system = last["system"]
        lines += [f"machine: {system['available_mb']:.1f}MB of {system['total_mb']:.1f}MB available"]
    models = journal.noted("model", since)
    for analysis in {analysis["name"]: analysis for analysis in models}.values():  # of one name the latest
        lines += ["", *model.describe(analysis)]
    differences = journal.noted("difference", since)
    if differences:
        lines += ["", "differences"]
    for difference in differences:
        lines += [f"  {difference['before']} -> {difference['after']}"]
        lines += [f"    {line}" for line in describe_difference(difference)]
    found = [*findings, *journal.noted("finding", since), *(one for each in models for one in each["findings"])]
    return "\n".join([*lines, findings_text(found)])


def findings_text(findings: Iterable[Finding]) -> str:
    """The findings with their evidence and remedies, each once."""
    once = {(found.kind, found.device, found.evidence): found for found in findings}
    if not once:
        return "\nno anomalies\n"
    text = io.StringIO()
    found = [msgspec.convert(found, Finding) for found in once.values()]
    print_findings(found, Console(file=text, width=_WIDTH, force_jupyter=False), count=len(once))
    return text.getvalue()


def describe(reading: Mapping[str, Any]) -> str:
    """ "GPU 0: 1234.5MB / 11264.0MB (10.9%)"."""
    of = f" / {reading['total_mb']:.1f}MB ({reading['utilization_percent']:.1f}%)" if reading["total_mb"] else ""
    return f"{anomalies.label(reading['device'])}: {reading['allocated_mb']:.1f}MB{of}"


def describe_difference(difference: Mapping[str, Any]) -> list[str]:
    """ "GPU 0: memory change +456.7MB, utilization change +4.1%", a line for each device."""
    lines = []
    for change in difference["gpu_changes"]:
        used = change["utilization_change"]
        also = "" if used is None else f", utilization change {used:+.1f}%"
        lines.append(f"{anomalies.label(change['device'])}: memory change {change['memory_change_mb']:+.1f}MB{also}")
    return lines
