# SPDX-License-Identifier: Apache-2.0
"""Writes a profile in the formats of the command `report`."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from opacus_memprof.analysis.job_view import JobView
from opacus_memprof.analysis.profile_view import ProfileView
from opacus_memprof.errors import MemprofError, require
from opacus_memprof.profiles.directory import EVENTS, META, OOM_REPORTS, PROFILE, RANKS, REPORT, SNAPSHOTS
from opacus_memprof.profiles.files import write_text
from opacus_memprof.profiles.json_object import to_json
from opacus_memprof.reports.html.report_page import write_html
from opacus_memprof.reports.memory_viz import write_memory_viz
from opacus_memprof.reports.oom import build_oom_page
from opacus_memprof.reports.perfetto import write_perfetto
from opacus_memprof.reports.picture import write_pictures
from opacus_memprof.reports.tables import write_csv, write_latex, write_parquet

_PROFILE_FILES = {EVENTS, META, PROFILE, SNAPSHOTS, RANKS, *OOM_REPORTS}


@dataclass(frozen=True)
class Format:
    """One format: its file name suffixes, and the function that writes it.

    Attributes:
        suffixes: file name suffixes; the first is the default.
        write: writes a view to a path, and returns the files if there are others than that path.
        needs: arguments for errors.require: a module that only this format needs, and the features that need
            it.
    """

    suffixes: tuple[str, ...]
    write: Callable[[ProfileView, Path], list[Path] | None]
    needs: tuple[str, str] | None = None


def _write_json(view: ProfileView, path: Path) -> None:
    write_text(path, to_json(view.profile))


def _write_page(view: ProfileView, path: Path) -> None:
    if view.devices or view.out_of_memory is None:
        write_html(view, path)
    else:  # the directory has only the report of the failed allocation
        write_text(path, build_oom_page(view.out_of_memory))


FORMATS = {
    "html": Format((".html",), _write_page),
    "png": Format((".png",), write_pictures, ("matplotlib", "pictures")),
    "csv": Format((".csv",), write_csv),
    "json": Format((".json",), _write_json),
    "latex": Format((".tex",), write_latex),
    "perfetto": Format((".pftrace", ".perfetto-trace"), write_perfetto, ("perfetto", "Perfetto traces")),
    "memory_viz": Format((".pickle", ".pkl"), write_memory_viz),
    "parquet": Format((".parquet",), write_parquet, ("pyarrow", "Parquet tables")),
}


def export(view: ProfileView | JobView, wanted: Mapping[str, str | os.PathLike[str] | None]) -> list[Path]:
    """Writes a profile in several formats, each file atomically, and returns the files.

    A job can be written as "html" only.

    Args:
        view: the profile, with its directory, or the job.
        wanted: the file by format; None is `memprof` with the format's suffix, in the profile's directory.

    Raises:
        MemprofError: before anything is written, for an unknown format, another suffix than the format's, one of the
            profile's own files, or a missing package; and if a file cannot be written.
    """
    assert view.directory is not None
    paths = {name: output_path(name, path, view.directory) for name, path in wanted.items()}
    for name in wanted:
        if needs := FORMATS[name].needs:
            require(*needs)
    if isinstance(view, JobView):
        write_html(view, paths["html"])
        return [paths["html"]]
    written: list[Path] = []
    for name, path in paths.items():
        written += FORMATS[name].write(view, path) or [path]
    return written


def output_path(name: str, path: str | os.PathLike[str] | None, home: Path) -> Path:
    """Returns the file of the format `name` for the profile in `home`. See `export` for `path` and errors."""
    format = FORMATS.get(name)
    if format is None:
        raise MemprofError(f"{name!r} is not a format of a report: choose one of {', '.join(FORMATS)}")
    file = home / f"{REPORT}{format.suffixes[0]}" if path is None else Path(path)
    if file.suffix not in format.suffixes:
        raise MemprofError(f"{file} is not a name for {name}: end it with {' or '.join(format.suffixes)}")
    if file.name in _PROFILE_FILES and file.resolve().parent == home.resolve():
        raise MemprofError(f"{file} is a file of the profile itself: choose another name")
    if file.is_dir():
        raise MemprofError(f"{file} is a directory: name a file in it")
    return file
