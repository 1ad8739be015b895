# SPDX-License-Identifier: Apache-2.0
"""Shows the differences between two profiles in a terminal or a pull request, and the DP tax in a terminal."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.markup import escape

from opacus_memprof.language import tr, tr_sentence
from opacus_memprof.profiles.difference import DeviceDiff, Diff, DiffPhase, Tax
from opacus_memprof.profiles.units import format_bytes, format_moment, format_signed_bytes, shorten_name
from opacus_memprof.reports.text import table_of

_TOP = 10

Row = tuple[str, ...]
# A title, the columns after the first, and rows of as many cells.
Table = tuple[str, Row, list[Row]]
_TOP_MODULES = 9


def print_diff(diff: Diff, console: Console, exceeded: Sequence[str] = ()) -> None:
    """Prints the differences of two profiles, and the messages of analysis.diff.exceeded_limits."""
    for name, device in diff.devices.items():
        console.print(f"[bold]{escape(name)}[/]: {escape(_headline(device))}", highlight=False)
        if reserved := _reserved(device):
            console.print(escape(reserved), highlight=False)
        for title, columns, rows in _tables(device):
            names = [tr(column) for column in columns]
            table = table_of(tr(title), tuple(names[:3]), tuple(names[3:]))
            for first, *rest in rows:
                table.add_row(escape(shorten_name(first)), *map(escape, rest))
            console.print()
            console.print(table)
    _print_notes(diff.notes, console)
    for sentence in exceeded:
        console.print(f"\n[bold red]{escape(tr_sentence(sentence))}[/]", highlight=False)


def _print_notes(notes: Sequence[str], console: Console) -> None:
    for note in notes:
        console.print(f"\n[yellow]{tr('note:')}[/] {escape(tr_sentence(note))}", highlight=False)


def largest_changes(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    """Sorts items by absolute size, the largest first, without zeros."""
    return sorted((row for row in sizes.items() if row[1]), key=lambda row: (-abs(row[1]), row[0]))


def diff_markdown(diff: Diff, exceeded: Sequence[str] = ()) -> str:
    """Formats the differences as GitHub's Markdown, for a comment on a pull request, with modules and phases folded."""
    parts = [f"### {tr('GPU memory') if any('cuda' in name for name in diff.devices) else tr('Memory')}"]
    parts += [f"**{_escape_markdown(tr_sentence(sentence))}**" for sentence in exceeded]
    for name, device in diff.devices.items():
        parts.append(f"**{_escape_markdown(name)}**: {_escape_markdown(_headline(device))}")
        if reserved := _reserved(device):
            parts.append(_escape_markdown(reserved))
        for title, columns, rows in _tables(device):
            table = _markdown_table(title, columns, rows)
            parts.append(table if title == "category" else _fold(tr("By {title}", title=tr(title)), table))
    parts += [tr("Note: {note}.", note=_escape_markdown(tr_sentence(note))) for note in diff.notes]
    return "\n\n".join(parts) + "\n"


def _headline(device: DeviceDiff) -> str:
    old, new = device.before, device.after
    change = _change(old.requested_bytes, new.requested_bytes)
    moments = _moments((old.phase, old.step), (new.phase, new.step))
    return tr("peak {change}, in {moments}", change=change, moments=moments)


def _reserved(device: DeviceDiff) -> str:
    """Returns the difference between the most reserved bytes of the two runs, or "" if one is unknown."""
    old, new = device.before.reserved_peak, device.after.reserved_peak
    if old is None or new is None:
        return ""
    moments = _moments((old.phase, old.step), (new.phase, new.step))
    return tr("largest reserved {change}, in {moments}", change=_change(old.bytes, new.bytes), moments=moments)


def _change(before: int, after: int) -> str:
    if before == after:
        change = tr("no change")
    else:
        change = format_signed_bytes(after - before) + (f", {100 * (after - before) / before:+.1f} %" if before else "")
    return f"{format_bytes(before)} → {format_bytes(after)} ({change})"


def _moments(before: tuple[str, int], after: tuple[str, int]) -> str:
    times = [tr_sentence(format_moment(*moment)) for moment in (before, after)]
    return times[0] if times[0] == times[1] else " → ".join(times)


def _tables(device: DeviceDiff) -> Iterator[Table]:
    if categories := list(_category_rows(device)):
        yield "category", ("before", "after", "change"), categories
    if modules := list(_group_rows(device.modules)):
        yield "module", ("change", "mostly"), modules
    if lines := list(_group_rows(device.lines)):
        yield "line", ("change", "mostly"), lines
    phases = [row for name, phase in device.phases.items() if (row := _phase_row(name, phase))]
    if phases:
        yield "phase", ("before", "after", "change", "mostly"), phases


def _category_rows(device: DeviceDiff) -> Iterator[Row]:
    for category, change in largest_changes(device.categories):
        sizes = [run.categories.get(category, 0) for run in (device.before, device.after)]
        yield category, *map(format_bytes, sizes), format_signed_bytes(change)


def _group_rows(groups: Mapping[str, Mapping[str, int]]) -> Iterator[Row]:
    # A module whose categories change while its sum does not is a change as well.
    ordered = sorted(groups.items(), key=lambda item: (-abs(sum(item[1].values())), -_total_change(item[1]), item[0]))
    for name, sizes in ordered[:_TOP]:
        yield name or tr("(no module)"), format_signed_bytes(sum(sizes.values())), _largest_change(sizes)
    if rest := ordered[_TOP:]:
        yield (
            tr("{count} more", count=len(rest)),
            format_signed_bytes(sum(sum(sizes.values()) for _, sizes in rest)),
            "",
        )


def _phase_row(name: str, phase: DiffPhase) -> Row | None:
    if not phase.total and not phase.categories:
        return None
    sizes = [tr("none") if size is None else format_bytes(size) for size in (phase.before_bytes, phase.after_bytes)]
    return name, *sizes, format_signed_bytes(phase.total), _largest_change(phase.categories)


def _total_change(sizes: Mapping[str, int]) -> int:
    return sum(map(abs, sizes.values()))


def _largest_change(sizes: Mapping[str, int]) -> str:
    """Returns the category that changed most, with the sign of its change."""
    return "".join(f"{'+' if size > 0 else '-'}{category}" for category, size in largest_changes(sizes)[:1])


def _markdown_table(title: str, columns: Row, rows: Sequence[Row]) -> str:
    aligned = ["---", *("---" if column == "mostly" else "---:" for column in columns)]
    header = tuple(tr(column) for column in (title, *columns))
    lines = [header, aligned, *((_markdown_code(row[0]), *map(_escape_markdown, row[1:])) for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _fold(title: str, content: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{content}\n\n</details>"


def _markdown_code(text: str) -> str:
    """Formats a name as code, within a table's cell."""
    return f"`{text.replace('|', chr(92) + '|').replace('`', chr(39))}`"


def _escape_markdown(text: str) -> str:
    """Escapes text for a cell of a Markdown table."""
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>|#" else letter for letter in text)


def print_tax(tax: Tax, console: Console) -> None:
    """Prints the DP tax of each device."""
    for name, device in tax.devices.items():
        takes = tr(
            "privacy takes {total} at the peak: {private} with it, {vanilla} without",
            total=f"[bold]{format_signed_bytes(device.total)}[/]",
            private=format_bytes(device.private_bytes),
            vanilla=format_bytes(device.vanilla_bytes),
        )
        console.print(f"[bold]{escape(name)}[/]: {takes}", highlight=False)
        _print_table("category", device.categories, console)
        modules = {module: sum(sizes.values()) for module, sizes in device.modules.items()}
        _print_table("module", modules, console, _TOP_MODULES)
        if device.opacus_only:
            alone = tr("{size} of captured activations are held by Opacus alone", size=format_bytes(device.opacus_only))
            console.print(f"\n{alone}", highlight=False)
    _print_notes(tax.notes, console)


def _print_table(title: str, sizes: Mapping[str, int], console: Console, top: int | None = None) -> None:
    """Prints the first `top` differences (default: all), the largest first, and the sum of the others."""
    rows = largest_changes(sizes)
    if not rows:
        return
    table = table_of(tr(title), (tr("difference"),), ())
    for name, size in rows[:top]:
        table.add_row(escape(name) or tr("(no module)"), format_signed_bytes(size))
    if rest := rows[len(rows) if top is None else top :]:
        table.add_row(
            tr("{count} more", count=len(rest)), format_signed_bytes(sum(size for _, size in rest)), style="dim"
        )
    console.print()
    console.print(table)
