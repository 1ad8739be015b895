# SPDX-License-Identifier: Apache-2.0
"""Several configurations one after the other, and what is drawn from their results."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opacus_memprof.experiments import pictures, process, summary
from opacus_memprof.experiments.comparison import methods, read_results
from opacus_memprof.experiments.configuration import Configuration
from opacus_memprof.experiments.files import write_json
from opacus_memprof.files import write_text


def run_all(
    configurations: Sequence[Configuration], directory: Path, *, token: str | None = None
) -> list[dict[str, Any]]:
    """Runs each in a fresh process, into `directory`/MODE_result.json, and says how it goes.

    What privacy costs stands in the results as `tax`, where vanilla came first and finished.

    Raises:
        MemprofError: the directory cannot be written, or holds other files where profiles go, or the first training was
            refused.
    """
    results: list[dict[str, Any]] = []
    for number, configuration in enumerate(configurations, 1):
        print(f"{configuration.mode} ({number} of {len(configurations)})", flush=True)
        output = directory / f"{configuration.mode}_result.json"
        # What is wrong with the first, the others share; a later one may meet layers that its mode does not know.
        result = process.run_to(output, configuration, keep_refused=number > 1, token=token, on_line=_say)
        results.append(result)
        if number > 1 and (tax := _tax(result, results[0])):
            result["tax"] = tax
            write_json(output, result)
        _say(summary.told(result))
    return results


def _say(line: str) -> None:
    print(f"  {line}", flush=True)


def _tax(result: Mapping[str, Any], vanilla: Mapping[str, Any]) -> dict[str, Any] | None:
    """By device, as `opacus-memprof tax` has it; None where the two cannot be compared."""
    if vanilla["experiment"] != "vanilla" or any(one["status"] != "finished" for one in (result, vanilla)):
        return None
    from opacus_memprof.analysis.profile import FORMAT
    from opacus_memprof.analysis.tax import dp_tax

    private, plain = (
        {"format": FORMAT, "devices": {one["device"]: {"peak": one["peak"]}}} for one in (result, vanilla)
    )
    return dp_tax(private, plain)


def draw(input_dir: Path, output_dir: Path) -> list[Path]:
    """Draws what the results in `input_dir` say into `output_dir`: three pictures, each light and dark, summary.txt and
    memory_table.tex. Returns their paths.

    Raises:
        MemprofError: a file in `input_dir` is no result, or there is none, or `output_dir` cannot be written.
    """
    compared = methods(read_results(input_dir))
    paths = []
    for name, written in (("summary.txt", summary.text(compared)), ("memory_table.tex", summary.latex(compared))):
        paths.append(write_text(output_dir / name, written))
    for name, picture in pictures.PICTURES.items():
        for theme, suffix in (("light", ""), ("dark", "_dark")):
            path = output_dir / f"{name}{suffix}.png"
            picture(compared, path, theme)
            paths.append(path)
    return paths
