# SPDX-License-Identifier: Apache-2.0
"""The directory of one profile: one writer at a time, which overwrites no other files.

Needs no torch: `opacus-memprof run` claims its directory before the program has imported anything.
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.launch import Launch

DEFAULT_DIRECTORY = "memprof_profile"
EVENT_BYTES = 32  # a record of the event file
EVENT_HEADER_BYTES = 4096  # bytes of the event file before its first record
DEFAULT_MAX_EVENTS = 2**25  # 1 GiB
MOST_EVENTS = 2**40  # 32 TiB: a process can map that many

EVENTS = "events.bin"
META = "meta.json"
SNAPSHOTS = "snapshots.jsonl"
PROFILE = "profile.json"
OOM_REPORTS = ("oom_report.txt", "oom_report.json", "oom_report.html")
PRIVACY_CHECK = "privacy_check.json"  # also next to a checkpoint
LOCK = ".lock"
RANKS = "ranks.json"  # the summary of a job's ranks, above their directories
RANK_DIRECTORY = re.compile(r"rank_(\d+)")
PLAN_DIRECTORY = "memprof_plan"  # where `opacus-memprof plan` writes without -o
PLAN = "plan.json"  # of `opacus-memprof plan`, in the profile of the planned run
PLANNED_RUNS = "runs.jsonl"  # the virtual runs of a plan; RUNS has their directories
RUNS = "runs"
REPORT = "memprof"  # base name of the files that `opacus-memprof report` writes

_UNFINISHED = f"{META}.tmp"
# In the order of removal: until the last file is removed, one is left that shows that this was a profile.
_FILES = (SNAPSHOTS, *OOM_REPORTS, PRIVACY_CHECK, PROFILE, EVENTS, _UNFINISHED, META)

# Some network and cluster file systems have no locks: there, two profilers may write one directory.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}

_LATER_PIECES = "events.[0-9]*.bin"  # later events of a long run, after EVENTS
_REPORTS = re.compile(rf"{REPORT}[.-].*")
_MAGIC = b"OMEMPROF"  # kMagic of csrc/core/event.h
_SUMMARY = b'{"format":1,"versions":{'  # of profile.json
_CLOCK = b'{\n "clock": {'  # of meta.json
_FIRST_BYTES = 5 * 1024 * 1024  # the event file's first chunk (4 MiB), its header and the small files


def claim(path: str | os.PathLike[str]) -> "ProfileDirectory":
    """Claims `path` or, in a job of several processes, this process' own directory in it, such as `rank_0`.

    Raises:
        MemprofError: see ProfileDirectory; or `path` holds other files than the ranks of a job; or the launcher's
            variables are contradictory.
    """
    launch = Launch.from_environment()
    if launch is None:
        return ProfileDirectory(path)
    _refuse_unless_job(Path(path).absolute())
    return ProfileDirectory(Path(path) / f"rank_{launch.rank}", launch)


def rank_directories(path: Path) -> dict[int, Path]:
    """Returns the directories of a job's ranks in `path`, by rank.

    Returns {} if `path` is the profile of one process, or none.
    """
    if not path.is_dir() or (path / EVENTS).exists():
        return {}
    directories = {}
    for entry in path.iterdir():
        match = RANK_DIRECTORY.fullmatch(entry.name)
        if match and entry.is_dir():
            directories[int(match[1])] = entry
    return dict(sorted(directories.items()))


class ProfileDirectory:
    """Claims `path` for this process until `release`. Files of an earlier profile stay until `clear`.

    Attributes:
        path: the absolute path.
        launch: for a rank's directory, the process of the job.
        claimed_at: when it was claimed, in seconds since 1970.

    Raises:
        MemprofError: the directory cannot be written, holds files that are not a profile, is being written by another
            profiler, or has no room for the first events.
    """

    def __init__(self, path: str | os.PathLike[str], launch: Launch | None = None) -> None:
        self.path = Path(path).absolute()  # the program may change its working directory
        self.launch = launch
        self.claimed_at = time.time()
        self._made = not self.path.exists()
        _refuse_unless_replaceable(self.path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock: int | None = lock(self.path)
        except OSError as error:
            reason = "it is a file" if self.path.is_file() else error.strerror
            raise MemprofError(f"cannot write a profile to {self.path} ({reason}): choose another directory") from error
        self._pid = os.getpid()
        free = shutil.disk_usage(self.path).free + sum(file.stat().st_size for file in self._files())
        if free < _FIRST_BYTES:
            self.release()
            raise MemprofError(
                f"the disk of {self.path} has {free / 2**20:.1f} MiB left and a profile needs at least "
                f"{_FIRST_BYTES / 2**20:.0f} MiB: choose another directory"
            )

    def clear(self) -> None:
        """Removes the earlier profile, or the ranks that an earlier program had started.

        Rank 0 also removes the summary of all ranks, and the ranks of an earlier job that had more.
        """
        self.remove_files()
        if self.launch is None and (self.path / RANKS).exists():
            _remove_ranks(self.path, 0)
        elif self.launch is not None and self.launch.rank == 0:
            _remove_ranks(self.path.parent, self.launch.world_size)

    def remove_files(self) -> None:
        """Removes the files of this profile, and nothing of ranks."""
        for file in self._files():
            file.unlink()

    def _files(self) -> list[Path]:
        files = [*self.path.glob(_LATER_PIECES), *(self.path / name for name in _FILES)]
        return [file for file in files if file.is_file()]

    def release(self) -> None:
        """Releases the directory for other profilers. Removes it if this profiler made it and it is empty."""
        if self._lock is None:
            return
        if os.getpid() == self._pid:  # a forked child shares the lock and must not end it
            with contextlib.suppress(OSError):
                (self.path / LOCK).unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = None
        if self._made and os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                self.path.rmdir()


def _remove_ranks(path: Path, first: int) -> None:
    """Removes the summary of a job's ranks, and the profiles of the ranks from `first` on."""
    (path / RANKS).unlink(missing_ok=True)
    for rank, directory in rank_directories(path).items():
        if rank >= first:
            with contextlib.suppress(MemprofError, OSError):  # in use, or not a profile
                earlier = ProfileDirectory(directory)
                earlier.clear()
                earlier.release()
                directory.rmdir()


def gather(sources: Sequence[str], target: str) -> None:
    """Copies the ranks' profiles from machines without a common disk into one directory.

    Args:
        sources: directories of jobs, or their addresses, such as `s3://bucket/job`, that fsspec can read. What is in
            `target` already stays there.
        target: a directory, or an address that fsspec can write. Ranks that it has are replaced.

    Raises:
        MemprofError: fsspec or a package that it needs is missing, a source holds no rank, or something cannot be read
            or written.
    """
    to, folder = _file_system(target)
    for source in sources:
        of, path = _file_system(source)
        with _copying(f"the ranks of {source}", target):
            entries = of.ls(path, detail=False) if of.isdir(path) else []
            ranks = [entry for entry in entries if RANK_DIRECTORY.fullmatch(os.path.basename(entry.rstrip("/")))]
            if of != to or os.path.realpath(path) != os.path.realpath(folder):
                for rank in ranks:
                    _copy_rank(of, rank.rstrip("/"), to, folder)
        if not ranks:
            raise MemprofError(f"{source} holds no rank of a job: give the directory that holds rank_0, rank_1 …")


def copy_rank(rank: Path, target: str) -> None:
    """Copies the profile of one rank to an address that fsspec can write, from which `gather` takes it.

    Raises:
        MemprofError: fsspec or a package that it needs is missing, or something cannot be read or written.
    """
    to, folder = _file_system(target)
    of, path = _file_system(str(rank))
    with _copying(str(rank), target):
        _copy_rank(of, path, to, folder)


def check_address(address: str) -> None:
    """Raises MemprofError if fsspec, or a package that it needs for the address, is missing. Opens no connection.

    Raises:
        MemprofError: see above.
    """
    with _opening(address):
        from fsspec.core import get_filesystem_class, split_protocol

        get_filesystem_class(split_protocol(address)[0])


def _copy_rank(of: Any, rank: str, to: Any, folder: str) -> None:
    copy = f"{folder}/{os.path.basename(rank)}"
    if to.exists(copy):
        to.rm(copy, recursive=True)
    to.makedirs(copy, exist_ok=True)
    # The summary last: without it, a copy that was interrupted counts as the profile of a killed rank.
    for file in sorted(of.ls(rank, detail=False), key=lambda file: os.path.basename(file) == PROFILE):
        if of.isfile(file) and os.path.basename(file) != LOCK:
            with of.open(file, "rb") as read, to.open(f"{copy}/{os.path.basename(file)}", "wb") as written:
                shutil.copyfileobj(read, written)


@contextlib.contextmanager
def _copying(what: str, target: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # each file system raises its own classes
        why = f"{type(error).__name__}: {error}"
        raise MemprofError(f"cannot copy {what} to {target} ({why}): correct the address") from error


@contextlib.contextmanager
def _opening(address: str) -> Iterator[None]:
    try:
        yield
    except (ImportError, ValueError) as error:
        raise MemprofError(f"{address} cannot be opened ({error}): install what it needs, or correct it") from error


def _file_system(address: str) -> tuple[Any, str]:
    """Returns fsspec's file system for an address or a local path, and the path in it."""
    with _opening(address):
        from fsspec.core import url_to_fs

        system, path = url_to_fs(address)
    return system, path.rstrip("/")


def _refuse_unless_replaceable(path: Path) -> None:
    """Raises MemprofError unless the directory is empty, holds ranks, or one of its files is a profiler's.

    A session may have had no events, and a killed session may have only begun one of its files.

    Raises:
        MemprofError: the directory holds other files only.
    """
    if not path.is_dir():
        return
    with contextlib.suppress(OSError):
        if _is_empty(path) or ((path / RANKS).exists() and rank_directories(path)):
            return
    for name, beginning in ((EVENTS, _MAGIC), (PROFILE, _SUMMARY), (META, _CLOCK), (_UNFINISHED, _CLOCK)):
        with contextlib.suppress(OSError), open(path / name, "rb") as file:
            if beginning.startswith(file.read(len(beginning))):
                return
    raise MemprofError(_foreign_files(path))


def _foreign_files(path: Path) -> str:
    return f"{path} holds files that are not a profile, and was not changed: choose another directory"


def refuse_foreign_files(path: Path) -> None:
    """Raises MemprofError if `path` holds more than a profile, its reports and its ranks' directories.

    Used before the profile is removed for another process, which would refuse the remaining files.

    Raises:
        MemprofError: `path` holds other files.
    """
    known = {*_FILES, LOCK, RANKS, *(rank.name for rank in rank_directories(path).values())}
    known |= {piece.name for piece in path.glob(_LATER_PIECES)}
    if path.is_dir() and not all(entry.name in known or _REPORTS.fullmatch(entry.name) for entry in path.iterdir()):
        raise MemprofError(_foreign_files(path))


def _refuse_unless_job(path: Path) -> None:
    """Raises MemprofError unless the directory is empty or holds a rank's profile."""
    if not path.is_dir() or rank_directories(path) or _is_empty(path):
        return
    what = "the profile of one process" if (path / EVENTS).exists() else "files that are not a profile of several ranks"
    raise MemprofError(f"{path} holds {what}, and was not changed: choose another directory")


def _is_empty(path: Path) -> bool:
    """Returns whether the directory has only a lock and the reports of an earlier profile."""
    return all(entry.name == LOCK or _REPORTS.fullmatch(entry.name) for entry in path.iterdir())


@contextlib.contextmanager
def locked_directory(path: Path, refuse_other_files: Callable[[], object]) -> Iterator[None]:
    """A context manager that makes a directory and locks it for this process.

    Args:
        path: the absolute path.
        refuse_other_files: raises MemprofError if the directory holds files that must not be mixed with the results.
            Called before and after locking, because another process may write files in between.

    Raises:
        MemprofError: another process holds the lock, or `refuse_other_files` raises it.
        OSError: the directory cannot be written.
    """
    refuse_other_files()
    path.mkdir(parents=True, exist_ok=True)
    descriptor = lock(path)
    try:
        refuse_other_files()
        yield
    finally:
        with contextlib.suppress(OSError):
            (path / LOCK).unlink()
        os.close(descriptor)


def lock(directory: Path) -> int:
    """Locks the directory, and returns the open descriptor that holds the lock. Executed programs do not inherit it.

    Raises:
        MemprofError: another profiler holds the lock.
        OSError: the directory cannot be written.
    """
    path = directory / LOCK
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 32).decode(errors="replace")
            os.close(descriptor)
            raise MemprofError(
                f"{directory} is being written by another profiler (process {owner}): "
                "let it end, or choose another directory"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return descriptor
        # The previous owner may have removed the file between the two calls: then the lock has no effect.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, str(os.getpid()).encode(), 0)
                return descriptor
        os.close(descriptor)
