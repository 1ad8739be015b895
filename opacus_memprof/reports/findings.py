# SPDX-License-Identifier: Apache-2.0
"""Prints findings to a terminal."""

import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from opacus_memprof.profiles.profile import Finding
from opacus_memprof.profiles.units import format_bytes, format_count

_TOP = 3  # of one kind; profile.json has all
_WIDEST = 100


def print_findings(findings: Sequence[Finding], console: Console, count: int = _TOP) -> None:
    """Prints the findings of a profile.json: of each kind the first `count` in full, the rest as a number."""
    kinds: dict[str, list[Finding]] = {}
    for finding in findings:
        kinds.setdefault(finding.kind, []).append(finding)
    for kind, found in kinds.items():
        for finding in found[:count]:
            _print_finding(kind.replace("_", " "), finding, console)
        if rest := found[count:]:
            size = format_bytes(sum(finding.bytes for finding in rest))
            modules = format_count(len(rest), "more module")
            console.print(f"  and in {modules}, {size}", style="dim", highlight=False)


def _print_finding(kind: str, finding: Finding, console: Console) -> None:
    where = f" in {finding.module}" if finding.module else ""
    size = f", {format_bytes(finding.bytes)}" if finding.bytes else ""
    console.print(f"\n[bold yellow]{escape(kind)}[/]{escape(where)}{size}", highlight=False)
    for name, text in (("evidence", finding.evidence), ("remedy", finding.remedy)):
        width = min(console.width, _WIDEST)
        lines = textwrap.fill(
            text, width, initial_indent=f"  {name}: ", subsequent_indent="    ", break_on_hyphens=False
        )
        console.print(escape(lines), highlight=False, soft_wrap=True)
