# SPDX-License-Identifier: Apache-2.0
"""The summary of results as text, and as a LaTeX table. MB are 2**20 bytes, as in the JSON."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich.cells import cell_len, set_cell_size

from opacus_memprof.experiments.configuration import BUILT_IN, LABELS, SIZES_NOTE, Configuration, shape_of
from opacus_memprof.experiments.rows import MB, OPERATIONS, Row, find_vanilla, growth, overhead, varied_sizes
from opacus_memprof.language import tr, tr_sentence
from opacus_memprof.profiles.categories import PRIVATE
from opacus_memprof.profiles.profile import Finding, virtual_gpu_of
from opacus_memprof.profiles.units import MEGABYTE_NOTE, format_bytes, megabytes
from opacus_memprof.reports.summary import fold_modules
from opacus_memprof.reports.tables import escape_latex
from opacus_memprof.reports.text import wrap

_WIDE, _NARROW = 104, 80
_MAX_BREAKDOWNS = 6  # with more runs, a terminal shows only the breakdown of the largest
_TOP_FINDINGS = 3
_LAYER = re.compile(r"^(.*?\.\d+|[^.]*).*$")  # up to the first number, or the first name


@megabytes()
def describe_outcome(row: Row) -> str:
    """Returns one line on the outcome of a run: its status, peak and time."""
    words = [tr(row.outcome)]
    if row.peak:
        phase = tr_sentence(row.peak.phase.replace("_", " "))
        words.append(tr("peak {size} in {phase}", size=format_bytes(row.total_bytes), phase=phase))
    if row.step_ms is not None:
        seconds = row.step_ms / 1000
        is_long = seconds >= 0.9995  # would be 1e+03 ms
        words.append(
            tr("{time:.3g} s a step", time=seconds) if is_long else tr("{time:.3g} ms a step", time=row.step_ms)
        )
    if failed := row.failed_allocation:
        size = format_bytes(failed.requested_bytes)
        words.append(tr("{size} more for {category} did not fit", size=size, category=failed.category))
    why = f": {tr_sentence(row.result.error, least_words=2)}" if row.result.error and not row.failed_allocation else ""
    return ", ".join(words) + why


def summary_text(rows: Sequence[Row]) -> str:
    """Returns the content of summary.txt: a line for each run, findings, failures, and the breakdown of each peak."""
    return _build_text(rows, rows, "")


def terminal_summary(rows: Sequence[Row], directory: Path) -> str:
    """Returns the summary for a terminal: with paths relative to the working directory, and with few breakdowns."""
    shown = rows if len(rows) <= _MAX_BREAKDOWNS else [max(rows, key=lambda row: row.total_bytes)]
    return _build_text(rows, shown, f"{directory}/")


@megabytes()
def _build_text(rows: Sequence[Row], shown: Sequence[Row], root: str) -> str:
    vanilla = find_vanilla(rows)
    lines = [*_overview(rows), "", *_component_table(rows), *_growth(rows), *_findings(rows), *_failures(rows, root)]
    lines += [tr("COMPONENT-LEVEL BREAKDOWN:"), ""]
    for row in shown:
        lines += [f"{row.label}:", "-" * _NARROW, *_breakdown(row, vanilla), *_components(row), *_stages(row), ""]
    return "\n".join([*lines, *_environment_lines(rows)]) + "\n"


def _overview(rows: Sequence[Row]) -> list[str]:
    wide = max(30, *(len(row.label) + 2 for row in rows))
    lines = ["=" * _WIDE, tr("SUMMARY"), "=" * _WIDE, ""]
    heading = tr("Method") if rows[0].label.startswith(LABELS[rows[0].mode]) else tr("Configuration")
    columns = (tr("Peak Memory (MB)"), 20), (tr("Avg Time (ms)"), 22), (tr("Memory/Time"), 20)
    lines.append(set_cell_size(heading, wide) + "".join(_right(name, width) for name, width in columns))
    lines.append("-" * _WIDE)
    for row in rows:
        peak = f"{row.total_bytes / MB:.2f}" if row.total_bytes else "-"
        if row.finished and row.step_ms:
            times = f"{row.step_ms:>22.2f}{_ratio(row.total_bytes / MB / row.step_ms):>20}"
        else:
            # A virtual GPU measures no time.
            times = f"{_right(tr('not measured') if row.finished else tr(row.outcome), 22)}{'-':>20}"
        lines.append(f"{row.label:<{wide}}{peak:>20}{times}")
    return [*lines, "=" * _WIDE, *([tr_sentence(SIZES_NOTE)] if any(row.names_sizes for row in rows) else [])]


def _right(text: str, width: int) -> str:
    """Aligns text to the right of `width` cells."""
    return " " * (width - cell_len(text)) + text


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def _component_table(rows: Sequence[Row]) -> list[str]:
    """Returns a line for each run with the memory of its components at the peak, the largest component first."""
    sizes = {row.name: {name: sum(parts.values()) for name, parts in row.components.items()} for row in rows}
    totals = Counter[str]()
    for row in rows:
        totals.update(sizes[row.name])
    names = [name for name, size in totals.most_common() if size]
    if not names:
        return []
    wide = max(30, *(len(row.label) + 2 for row in rows))
    widths = [max(len(name) + 2, 12) for name in names]
    lines = [tr("COMPONENTS AT THE PEAK, in MB:"), ""]
    lines.append(" " * wide + "".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True)))
    for row in rows:
        cells = [
            f"{sizes[row.name].get(name, 0) / MB:>{width}.2f}" if row.components else f"{'-':>{width}}"
            for name, width in zip(names, widths, strict=True)
        ]
        lines.append(f"{row.label:<{wide}}{''.join(cells)}")
    return [*lines, ""]


_SIZE_NAMES = {
    "seq_length": "sequence length",
    "batch_size": "batch size",
    "max_physical_batch_size": "physical batch size",
    "lora_rank": "LoRA rank",
}


def _growth(rows: Sequence[Row]) -> list[str]:
    """Returns a sentence for each size that varies, with the measured exponent of the peak."""
    found = [each for size in varied_sizes(rows) if (each := growth(size, rows))]
    lines = []
    for each in found:
        sentence = tr(
            "From {size} {smallest} to {largest} the peak grows as its power {exponent}",
            size=tr(_SIZE_NAMES[each.size]),
            smallest=each.smallest,
            largest=each.largest,
            exponent=_exponents(each.exponents),
        )
        if each.without_states:
            sentence += tr(
                "; without parameters and optimizer states, as its power {exponent}",
                exponent=_exponents(each.without_states),
            )
        lines += _wrap(tr("{sentences}.", sentences=sentence))
    heading = tr("GROWTH, measured between configurations that differ in one size alone:")
    return [heading, "", *lines, ""] if lines else []


def _exponents(exponents: Sequence[float]) -> str:
    middle = f"{median(exponents):.2f}"
    if len(exponents) == 1:
        return middle
    return tr(
        "{middle} (median of {count} comparisons, {lowest:.2f} to {highest:.2f})",
        middle=middle,
        count=len(exponents),
        lowest=exponents[0],
        highest=exponents[-1],
    )


def _findings(rows: Sequence[Row]) -> list[str]:
    """Returns the largest finding of each of the first few kinds, and the number of runs that have it."""
    kinds: dict[str, list[tuple[Finding, Row]]] = {}
    for row in rows:
        for finding in row.findings:
            kinds.setdefault(finding.kind, []).append((finding, row))
    largest = [max(found, key=lambda pair: pair[0].bytes) for found in kinds.values()]
    largest.sort(key=lambda pair: -pair[0].bytes)
    lines = [tr("TOP FINDINGS:"), ""] if largest else []
    for finding, row in largest[:_TOP_FINDINGS]:
        where = tr(" in {module}", module=finding.module) if finding.module else ""
        others = len({other.name for _, other in kinds[finding.kind]}) - 1
        runs = row.short_label
        if others:
            runs = tr("{run}, and {count} more", run=runs, count=others)
        lines.append(f"{tr(finding.kind.replace('_', ' '))}{where}, {format_bytes(finding.bytes)} ({runs})")
        lines += _wrap(tr("evidence: {text}", text=tr_sentence(finding.evidence)))
        lines += [*_wrap(tr("remedy: {text}", text=tr_sentence(finding.remedy))), ""]
    return lines


def _failures(rows: Sequence[Row], root: str) -> list[str]:
    failed = [row for row in rows if row.failed_allocation is not None]
    lines = [tr("OUT OF MEMORY:"), ""] if failed else []
    for row in failed:
        lines.append(f"{row.label}: {describe_outcome(row)}")
        if best := row.result.oom_suggestion:
            fits = {True: tr(", which fits"), False: tr(", not enough alone"), None: ""}[best.fits]
            size = format_bytes(best.predicted_peak_bytes)
            title = tr_sentence(best.title)
            lines.append(
                "  " + tr("suggestion: {title} (predicted peak {size}{fits})", title=title, size=size, fits=fits)
            )
            lines += [f"    {code}" for code in best.code.splitlines()]
        if row.oom_report:
            lines.append("  " + tr("report: {path}", path=f"{root}{row.oom_report}"))
        lines.append("")
    return lines


def _wrap(text: str) -> list[str]:
    return wrap(text, _WIDE, "  ", "    ")


def _components(row: Row) -> list[str]:
    sizes = {name: sum(parts.values()) for name, parts in row.components.items()}
    lines = [f"    {name:<42}{size / MB:>16.2f} MB" for name, size in sorted(sizes.items(), key=lambda item: -item[1])]
    return ["", "  " + tr("By component:"), *lines] if lines else []


def _stages(row: Row) -> list[str]:
    """Returns the stages of set-up, with their peaks and live bytes at their ends, and the operations of training."""
    stages: list[tuple[str, int | None, int | None]] = list(row.set_up)
    stages += [(name, row.operation_peak(name), None) for name in OPERATIONS if row.operation(name)]
    lines = []
    for name, peak, after in stages:
        left = "" if after is None else f"{after / MB:>16.2f} MB"
        name = set_cell_size(tr_sentence(name.replace("_", " ")), 42)
        lines.append(f"    {name}" + ("-".rjust(19) if peak is None else f"{peak / MB:>16.2f} MB") + left)
    heading = set_cell_size(tr("By stage:"), 44) + _right(tr("peak"), 19) + _right(tr("live after it"), 19)
    return ["", f"  {heading}", *lines] if lines else []


def _breakdown(row: Row, vanilla: Row | None) -> list[str]:
    lines = []
    more = {} if vanilla is None or vanilla is row or not row.finished else overhead(row, vanilla)
    for category, size in sorted(row.bytes.items(), key=lambda item: -item[1]):
        mark = ""
        change = more.get(category, 0)
        if more and category == "activation_hooks" and row.shared_captures:
            shared = row.shared_captures / MB
            mark = "  <- " + tr("captured for DP-SGD; autograd holds {size:.2f} MB of it anyway", size=shared)
        elif change and category in PRIVATE:
            mark = "  <- " + tr("DP-SGD only")
        elif round(change / MB, 2):
            mark = "  <- " + tr("{size:+.2f} MB against vanilla", size=change / MB)
        lines.append(f"  {_heading(category):<44}{size / MB:>16.2f} MB{mark}")
    if more:
        lines.append(f"  {set_cell_size(tr('All, against vanilla'), 44)}{sum(more.values()) / MB:>+16.2f} MB")
    if failed := row.failed_allocation:
        lines.append(f"  {tr(row.outcome)}")  # torch's own sentence has these figures in other units
        lines.append(f"  {set_cell_size(tr('In use when memory ran out'), 44)}{failed.live_bytes / MB:>16.2f} MB")
        lines.append(f"  {set_cell_size(tr('Wanted beyond that'), 44)}{row.refused_bytes / MB:>16.2f} MB")
    elif not row.finished:
        lines.append(f"  {tr(row.outcome)}: {tr_sentence(row.result.error or '', least_words=2)}")
    return lines or ["  " + tr("nothing was recorded")]


def _environment_lines(rows: Sequence[Row]) -> list[str]:
    """Returns the device, versions and settings of the runs; the JSON files have them run by run."""
    lines = []
    for title, values in (
        (tr("Device"), [_device(row) for row in rows]),
        ("torch", [row.result.environment.torch for row in rows]),
        ("Opacus", [row.result.environment.opacus for row in rows]),
        (tr("Model"), [_model(row) for row in rows]),
        (tr("Parameters"), [_parameters(row) for row in rows]),
        (tr("Sequence length"), [row.result.config.seq_length for row in rows]),
        (tr("Batch size"), [row.result.config.batch_size for row in rows]),
        ("dtype", [row.result.config.dtype for row in rows]),
        (tr("Data"), [row.result.data.source if row.result.data else None for row in rows]),
    ):
        known = dict.fromkeys(str(value) for value in values if value is not None)
        separator = "; " if any(", " in value for value in known) else ", "
        lines.append(f"{title}: {separator.join(known) or tr('unknown')}")
    return [
        *lines,
        tr("{sentences}.", sentences=tr_sentence(MEGABYTE_NOTE)),
        tr("Each breakdown is that of one instant, the run's own peak."),
        tr("Components and stages leave out rounding: the bytes that the allocator adds to each request."),
    ]


def _device(row: Row) -> str | None:
    name = row.result.environment.device_name
    return tr_sentence(name) if name and name.startswith("virtual ") else name


def _model(row: Row) -> str:
    """Returns the model's name, and the sizes of a built-in one."""
    config = Configuration.from_json(dict(row.result.config))
    if config.model not in BUILT_IN or config.pretrained:
        return config.model
    family, sizes = shape_of(config)
    return f"{config.model} ({family}: {', '.join(f'{name} {size}' for name, size in sizes.items())})"


def _parameters(row: Row) -> str | None:
    """Returns the number of parameters, and their memory by layer; None if nothing was measured."""
    if row.peak is None or not row.result.parameters:
        return None
    layers: dict[str, int] = defaultdict(int)
    for module, sizes in row.peak.modules.items():
        layers[_LAYER.sub(r"\1", module)] += sizes.get("model_parameters", 0)
    parts = [
        f"{each.name} {f'{each.count} x ' if each.count > 1 else ''}{each.largest / MB:.2f} MB"
        for each in fold_modules(layers)
    ]
    count, size = row.result.parameters["total"], sum(layers.values()) / MB
    total = tr("{count:,} in {size:.2f} MB", count=count, size=size)
    return f"{total}: {', '.join(parts)}" if parts else total


@megabytes()
def latex_table(rows: Sequence[Row]) -> str:
    """Returns a LaTeX table for a paper, which needs the package booktabs."""
    vanilla = find_vanilla(rows)
    lines = []
    for row in rows:
        cells = [escape_latex(row.label), f"{row.total_bytes / MB:.2f}" if row.total_bytes else "--"]
        if not row.finished:
            cells += [r"\multicolumn{3}{c}{" + escape_latex(row.outcome) + "}"]
        else:
            time = row.step_ms
            base = vanilla.step_ms if vanilla else None
            cells.append("--" if vanilla is None else f"{100 * (row.total_bytes / vanilla.total_bytes - 1):+.1f}")
            cells.append("--" if time is None else f"{time:.2f}")
            cells.append("--" if time is None or not base else f"{time / base:.2f}")
        lines.append(" & ".join(cells) + r" \\")
    virtual = dict.fromkeys(name for row in rows if (name := virtual_gpu_of(row.result.virtual)) is not None)
    notes = [r"\multicolumn{5}{l}{On a " + escape_latex(name) + r"} \\" for name in virtual]
    return "\n".join(
        [
            r"\begin{tabular}{lrrrr}",
            r"\toprule",
            r"Method & Peak (MB) & Overhead (\%) & Step (ms) & Time / vanilla \\",
            r"\midrule",
            *lines,
            r"\midrule",
            *notes,
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def _heading(category: str) -> str:
    return category.replace("_", " ").title()
