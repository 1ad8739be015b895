# SPDX-License-Identifier: Apache-2.0
"""Findings as text."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from opacus_memprof.units import format_bytes

_TOP = 3  # of one kind; profile.json has all
_WIDEST = 100


def print_findings(findings: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Prints the findings of a profile.json: the first few of each kind in full, the rest as a number."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for finding in findings:
        kinds.setdefault(str(finding.get("kind", "finding")), []).append(finding)
    for kind, found in kinds.items():
        for finding in found[:_TOP]:
            _print_finding(kind.replace("_", " "), finding, console)
        if rest := found[_TOP:]:
            size = format_bytes(sum(finding.get("bytes", 0) for finding in rest))
            plural = "s" if len(rest) > 1 else ""
            console.print(f"  and in {len(rest)} more module{plural}, {size}", style="dim", highlight=False)


def _print_finding(kind: str, finding: Mapping[str, Any], console: Console) -> None:
    where = f" in {finding['module']}" if finding.get("module") else ""
    size = f", {format_bytes(finding['bytes'])}" if finding.get("bytes") else ""
    console.print(f"\n[bold yellow]{escape(kind)}[/]{escape(where)}{size}", highlight=False)
    for key in ("evidence", "remedy"):
        if text := finding.get(key):
            width = min(console.width, _WIDEST)
            lines = textwrap.fill(
                str(text), width, initial_indent=f"  {key}: ", subsequent_indent="    ", break_on_hyphens=False
            )
            console.print(escape(lines), highlight=False, soft_wrap=True)
