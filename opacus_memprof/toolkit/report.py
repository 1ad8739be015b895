# SPDX-License-Identifier: Apache-2.0
"""The toolkit's reports as text. Sizes in MB of 2**20 bytes."""

import io
from collections.abc import Iterable, Sequence

from rich.console import Console

from opacus_memprof.profiles.profile import Finding
from opacus_memprof.reports.text import print_findings
from opacus_memprof.toolkit import anomalies, journal, model
from opacus_memprof.toolkit.structures import MemorySnapshot, Reading, SnapshotDifference

_WIDTH = 120


def report_text(title: str, history: Iterable[MemorySnapshot], findings: Sequence[Finding], since: float = 0.0) -> str:
    """The text of a report: all snapshots, the source and categories of the last one, and the models, differences and
    findings of the journal.

    Args:
        history: snapshots, oldest first.
        findings: of the snapshots.
        since: a time of time.monotonic(); older entries of the journal are left out.
    """
    lines = [title, "=" * len(title), "sizes in MB of 2^20 bytes"]
    last: MemorySnapshot | None = None
    sources: dict[str, str] = {}
    for last in history:
        lines.append(f"{last['timestamp']}  {last['name']}")
        for reading in last["devices"]:
            source = sources.get(reading["device"], reading["source"])
            sources[reading["device"]] = reading["source"]
            changed = f", counted by {reading['source']} from here on" if source != reading["source"] else ""
            lines.append(f"  {describe_reading(reading)}{changed}")
    for reading in last["devices"] if last else ():
        lines += ["", f"{anomalies.device_label(reading['device'])}, counted by {reading['source']}"]
        largest = sorted(reading["categories_mb"].items(), key=lambda item: -item[1])
        lines += [f"  {category:<28}{size:>12.2f}MB" for category, size in largest]
    if last:
        system = last["system"]
        lines += [f"machine: {system['available_mb']:.1f}MB of {system['total_mb']:.1f}MB available"]
    models = journal.entries_since("model", since)
    for analysis in {analysis["name"]: analysis for analysis in models}.values():  # of one name the latest
        lines += ["", *model.describe_model(analysis)]
    differences = journal.entries_since("difference", since)
    if differences:
        lines += ["", "differences"]
    for difference in differences:
        lines += [f"  {difference['before']} -> {difference['after']}"]
        lines += [f"    {line}" for line in describe_difference(difference)]
    of_models = [finding for analysis in models for finding in analysis["findings"]]
    return "\n".join([*lines, format_findings([*findings, *journal.entries_since("finding", since), *of_models])])


def format_findings(findings: Iterable[Finding]) -> str:
    """The text of findings, without repetitions, with their evidence and remedies."""
    distinct = {(finding.kind, finding.device, finding.evidence): finding for finding in findings}
    if not distinct:
        return "\nno anomalies\n"
    text = io.StringIO()
    print_findings(list(distinct.values()), Console(file=text, width=_WIDTH, force_jupyter=False), count=len(distinct))
    return text.getvalue()


def describe_reading(reading: Reading) -> str:
    """ "GPU 0: 1234.5MB / 11264.0MB (10.9%)"."""
    share = f" / {reading['total_mb']:.1f}MB ({reading['utilization_percent']:.1f}%)" if reading["total_mb"] else ""
    return f"{anomalies.device_label(reading['device'])}: {reading['allocated_mb']:.1f}MB{share}"


def describe_difference(difference: SnapshotDifference) -> list[str]:
    """ "GPU 0: memory change +456.7MB, utilization change +4.1%", a line for each device."""
    lines = []
    for change in difference["gpu_changes"]:
        utilization = change["utilization_change"]
        suffix = "" if utilization is None else f", utilization change {utilization:+.1f}%"
        lines.append(
            f"{anomalies.device_label(change['device'])}: memory change {change['memory_change_mb']:+.1f}MB{suffix}"
        )
    return lines
