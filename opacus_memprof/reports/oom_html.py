# SPDX-License-Identifier: Apache-2.0
"""oom_report.json as one page that needs nothing else."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from opacus_memprof.reports.oom_text import headline
from opacus_memprof.reports.palette import CATEGORY_COLORS, THEMES
from opacus_memprof.units import format_bytes

_STYLE = """
:root { color-scheme: light dark; %(light)s }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
body { background: var(--background); color: var(--text); }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%%; table-layout: fixed; }
td { text-align: left; padding: .2rem .6rem .2rem 0; border-bottom: 1px solid var(--grid); overflow-wrap: anywhere; }
td.n { text-align: right; white-space: nowrap; width: 7rem; font-variant-numeric: tabular-nums; }
td.b { width: 30%%; } .bar { background: var(--accent); height: .7rem; border-radius: 2px; }
ol > li { margin-bottom: 1.2rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--grid); padding: .5rem; border-radius: 4px; }
.soft { color: var(--muted); } .fits { color: #1a7f37; }
@media (prefers-color-scheme: dark) { :root { %(dark)s } .fits { color: #3fb950; } }
""" % {name: " ".join(f"--{key}: {value};" for key, value in vars(theme).items()) for name, theme in THEMES.items()}


def oom_page(report: Mapping[str, Any]) -> str:
    """The page, from what analysis.oom.build_report returned."""
    holders, needed = report["holders"], report["needed"]
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width'><title>out of memory</title>",
        f"<style>{_STYLE}</style>",
        f"<h1>Out of memory</h1><p>{escape(headline(report))}</p>",
        "<h2>What to change</h2>",
        _suggestions(report["suggestions"]),
        "<h2>Held when it failed, by category</h2>",
        _bars(holders["categories"].items()),
        "<h2>by module</h2>",
        _bars([(name or "(no module)", sum(sizes.values())) for name, sizes in list(holders["modules"].items())[:20]]),
        "<h2>by age</h2>",
        _bars([(_age(one), one["bytes"]) for one in holders["steps"][:20]]),
        f"<h2>What the whole step needs: {format_bytes(needed['bytes'])}</h2>",
        _bars(needed["parts"].items()),
        "<h2>What would have fitted</h2>",
        _room(report),
        "<h2>What layers take, by mode</h2>",
        _layers(report["layers"]),
    ]
    return "\n".join(parts) + "\n"


def _age(one: Mapping[str, Any]) -> str:
    return f"step {one['step']}" + (" (this one)" if one["age"] == 0 else f" ({one['age']} ago)")


def _bars(rows: Iterable[tuple[str, int]]) -> str:
    ordered = sorted(((size, name) for name, size in rows if size > 0), reverse=True)
    if not ordered:
        return "<p class='soft'>nothing</p>"
    largest = ordered[0][0]
    cells = [
        f"<tr><td>{escape(name)}</td><td class='n'>{format_bytes(size)}</td>"
        f"<td class='b'><div class='bar' style='width:{100 * size / largest:.1f}%{_color(name)}'></div></td></tr>"
        for size, name in ordered
    ]
    return f"<table>{''.join(cells)}</table>"


def _color(name: str) -> str:
    return f";background:{CATEGORY_COLORS[name]}" if name in CATEGORY_COLORS else ""


def _suggestions(suggestions: Sequence[Mapping[str, Any]]) -> str:
    if not suggestions:
        return "<p>Nothing is known that would make it fit.</p>"
    verdict = {True: "<span class='fits'>fits</span>", False: "<span class='soft'>not enough alone</span>", None: ""}
    items = [
        f"<li><b>{escape(one['title'])}</b>: peak {format_bytes(one['predicted_peak_bytes'])}, "
        f"{format_bytes(one['saved_bytes'])} less {verdict[one['fits']]}"
        f"<pre>{escape(one['code'])}</pre><span class='soft'>{escape(one['computed'])}</span></li>"
        for one in suggestions
    ]
    return f"<ol>{''.join(items)}</ol>"


def _layers(layers: Sequence[Mapping[str, Any]]) -> str:
    if not layers:
        return "<p class='soft'>not known</p>"
    columns = {
        "activations_bytes": "activations",
        "per_sample_gradients_bytes": "hooks: gradients",
        "ghost_bytes": "ghost: norms",
        "flash_clip_bytes": "flash_clip keeps",
    }
    head = "".join(f"<td class='n'>{title}</td>" for title in columns.values())
    rows = [
        f"<tr><td>{escape(one['module'] or '(the model)')} <span class='soft'>{escape(one['kind'])}, {one['samples']} "
        f"samples of {one['tokens']}</span></td>"
        + "".join(f"<td class='n'>{format_bytes(one[key])}</td>" for key in columns)
        + "</tr>"
        for one in layers
    ]
    return f"<table><tr class='soft'><td></td>{head}</tr>{''.join(rows)}</table>"


def _room(report: Mapping[str, Any]) -> str:
    labels = {
        "limit_bytes": "allowed to this process",
        "may_reserve_bytes": "could be reserved",
        "reserved_bytes": "reserved",
        "allocated_bytes": "in use, rounding included",
        "cached_bytes": "free in fragments",
        "largest_free_bytes": "largest free block",
        "unreserved_bytes": "could still be reserved",
        "free_segments_bytes": "empty_cache would give back",
        "others_bytes": "used by others on the device",
        "device_bytes": "the device's memory",
        "capacity_bytes": "requested bytes that fit, with a margin",
    }
    rows = [
        f"<tr><td>{label}</td><td class='n'>{format_bytes(report['room'][key])}</td></tr>"
        for key, label in labels.items()
        if report["room"].get(key) is not None
    ]
    batch = report["batch"]
    if batch["samples"]:
        rows.append(
            f"<tr><td>a sample, at the peak</td><td class='n'>{format_bytes(batch['bytes_per_sample'])}</td></tr>"
        )
        fitting = f"{batch['largest_that_fits'] or 0} of {batch['samples']}"
        rows.append(f"<tr><td>samples that fit at a time</td><td class='n'>{fitting}</td></tr>")
    return f"<table>{''.join(rows)}</table>"
