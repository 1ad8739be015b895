# SPDX-License-Identifier: Apache-2.0
"""Merges the profiles in a job's directory into ranks.json, whose fields docs/format.md documents.

Profiles are read one after the other and only a row of each is kept, so that memory stays small for any number of
ranks.
"""

import contextlib
import os
from pathlib import Path

from opacus_memprof.analysis.job import Job
from opacus_memprof.analysis.profile import is_being_written, load_profile
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.directory import LOCK, META, PROFILE, RANKS, ProfileDirectory, lock, rank_directories
from opacus_memprof.profiles.files import write_text
from opacus_memprof.profiles.job_summary import JobSummary
from opacus_memprof.profiles.json_object import read_json_object, to_json
from opacus_memprof.profiles.launch import Launch
from opacus_memprof.profiles.meta import Meta, read_meta


def load_ranks(directory: str | os.PathLike[str]) -> JobSummary:
    """Summarizes all ranks whose profiles are in `directory`.

    A killed rank counts up to its last event. The summary's warnings name ranks of an earlier job, unreadable and
    missing ones.

    Raises:
        MemprofError: no rank has a readable profile.
    """
    path = Path(directory)
    directories = rank_directories(path)
    newest = max(directories.values(), key=_modified_at, default=None)
    launch = None if newest is None else _launch(newest)
    job = Job(launch)
    for rank, folder in directories.items():
        if launch is not None and not launch.same_job(_launch(folder)):
            job.leave_out(rank)
            continue
        try:
            job.add(rank, folder.name, load_profile(folder), _modules(folder))
        except MemprofError as error:
            job.add_unreadable(rank, str(error))
    if not job.rows:
        raise MemprofError(f"{path} holds no readable profile of a rank: give the directory of a profile")
    return job.summary()


def write_job_summary(claimed: ProfileDirectory) -> JobSummary | None:
    """Writes ranks.json and returns its content if this rank is the last of its job to end; otherwise returns None.

    Each rank calls it after writing its own profile.

    Raises:
        MemprofError: ranks.json cannot be written.
    """
    if claimed.launch is None:
        return None
    path, launch = claimed.path.parent, claimed.launch
    others = (path / f"rank_{rank}" for rank in launch.ranks if rank != launch.rank)
    if not all(_has_ended(folder, launch) for folder in others):
        return None
    try:
        descriptor = lock(path)
    except MemprofError:
        return None  # another rank has ended at the same time, and writes it
    try:
        if (path / RANKS).exists() and launch.same_job(read_json_object(path / RANKS, JobSummary).launch):
            return None
        summary = load_ranks(path)
        write_text(path / RANKS, to_json(summary))
        return summary
    finally:
        with contextlib.suppress(OSError):
            (path / LOCK).unlink()
        os.close(descriptor)


def _has_ended(folder: Path, launch: Launch) -> bool:
    """Returns whether the rank took part in the job of `launch` and has ended."""
    if not launch.same_job(_launch(folder)):
        return False
    return (folder / PROFILE).exists() or not is_being_written(folder)


def _meta(folder: Path) -> Meta:
    try:
        return read_meta(folder / META)
    except MemprofError:
        return Meta()


def _launch(folder: Path) -> Launch | None:
    return _meta(folder).launch


def _modules(folder: Path) -> frozenset[str]:
    return frozenset(_meta(folder).names.modules)


def _modified_at(folder: Path) -> float:
    """Returns when the rank's meta.json was last written, in seconds since 1970; 0 without one."""
    try:
        return (folder / META).stat().st_mtime
    except OSError:
        return 0.0
