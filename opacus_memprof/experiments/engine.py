# SPDX-License-Identifier: Apache-2.0
"""Runs a grid of configurations: each in a process of its own, its row into the table, and the table's pictures."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from msgspec import to_builtins
from rich.console import Console

from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments.directory import ResultsDirectory
from opacus_memprof.experiments.grid import Cell
from opacus_memprof.experiments.launcher import Launcher, local_launcher, on_device
from opacus_memprof.experiments.presets import Preset
from opacus_memprof.experiments.progress import board
from opacus_memprof.experiments.rows import Row, vanilla_of
from opacus_memprof.profiles.json_object import from_plain
from opacus_memprof.profiles.optional import require
from opacus_memprof.profiles.profile import Peak


def run_grid(
    preset: Preset,
    cells: Sequence[Cell],
    path: Path,
    console: Console,
    *,
    resume: bool = False,
    cluster: Mapping[str, Any] | None = None,
    pause: float = 0,
    token: str | None = None,
    on_line: Callable[[str], object] = lambda line: None,
) -> list[Row]:
    """Runs cells, whose results go to the directory `path`, and draws all that are there. Returns the cells' own rows.

    Args:
        resume: results that are there are kept, and not run again.
        cluster: of jobs on SLURM submitit's parameters; None runs on this machine.
        pause: seconds between two runs on the same GPU.
        token: of the Hugging Face hub.
        on_line: called with each line on a run's progress, on this machine.

    Raises:
        MemprofError: see ResultsDirectory, on_device and Submitted; or the first cell was refused, as all would be: of
            an unknown model, most of all.
    """
    require("matplotlib", "pictures", "pictures")  # now, not after hours of training
    gpus: Sequence[int | None] = ()
    if cluster is None:
        cells, gpus = on_device(cells)
    with ResultsDirectory(path, preset, cells, resume=resume) as directory:
        if cluster is None:
            together = preset.side_by_side or cells[0].configuration.virtual_gpu is not None  # which has no times
            chosen = gpus if together else gpus[:1]
            launcher: Launcher = local_launcher(directory, chosen, token, pause, on_line)
        else:
            from opacus_memprof.experiments.submitted import Submitted

            launcher = Submitted(directory, "slurm", cluster, token)
        _run_missing(directory, preset, launcher, console)
        rows = directory.rows()
        preset.draw(rows, directory.outputs)
    names = [cell.name for cell in cells]
    return [row for row in rows if row.name in names]


def _run_missing(directory: ResultsDirectory, preset: Preset, launcher: Launcher, console: Console) -> None:
    """Runs what has no result yet. The tables are written after each."""
    cells, refused = directory.missing(), ""
    if kept := len(directory.names) - len(cells):
        console.print(f"{kept} of {len(directory.names)} configurations have a result already", highlight=False)
    if cells:  # a bar of nothing would wait for its first result
        with board(console, len(cells), launcher.workers) as ended, closing(launcher.run(cells)) as results:
            for cell, result in results:
                # The others share what is wrong with the first; a later one may meet layers that its mode cannot train.
                if result["refused"] and all(row.result["refused"] for row in directory.rows()):
                    refused = result["error"]
                    break
                result["tax"] = _tax(result, vanilla_of(directory.rows()))
                ended(directory.add(cell, result))
                preset.write_tables(directory.rows(), directory.outputs)
    if refused:
        raise MemprofError(refused)
    preset.write_tables(directory.rows(), directory.outputs)


def _tax(result: Mapping[str, Any], vanilla: Row | None) -> dict[str, Any] | None:
    """By device, as `opacus-memprof tax` has it; None where the two cannot be compared."""
    if vanilla is None or result["status"] != "finished" or result["config"]["mode"] == "vanilla":
        return None
    from opacus_memprof.analysis.tax import peak_tax

    private, plain = (from_plain(one["peak"], Peak, "the peak of a result") for one in (result, vanilla.result))
    return {"devices": {result["device"]: to_builtins(peak_tax(private, plain))}, "notes": []}
