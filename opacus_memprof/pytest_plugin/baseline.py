# SPDX-License-Identifier: Apache-2.0
"""Baselines: JSON files, committed by users, with the peaks of a test.

They have a peak for each device, torch, Opacus and grad-sample mode. profiles.difference describes them.
"""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import torch
from msgspec import UNSET

from opacus_memprof import virtual_gpu
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.difference import Baseline, BaselineFile, BaselineKey
from opacus_memprof.profiles.files import write_text, writing
from opacus_memprof.profiles.json_object import read_json_object
from opacus_memprof.profiles.profile import Device
from opacus_memprof.profiles.units import format_bytes

_TOP = 3  # modules listed for a category that has grown
_UPDATE = "run with --memprof-update-baselines and commit the file"
_RESTORE = "restore it from version control, or remove it and write it anew with --memprof-update-baselines"


def path_of(name: str, folder: Path) -> Path:
    """Returns the path of a baseline. Raises MemprofError if the name is not a plain file name."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise MemprofError(f"{name!r} cannot name a baseline: use letters, digits, _, - and .")
    return folder / f"{name}.json"


def measure(devices: Mapping[str, Device], modes: set[str]) -> Baseline:
    """Makes an entry from the device with the highest peak. Raises MemprofError if no memory was allocated."""
    if not devices:
        raise MemprofError("no memory was allocated: there is nothing to compare with a baseline")
    name, device = max(devices.items(), key=lambda entry: entry[1].peak.requested_bytes)
    peak = device.peak
    running = virtual_gpu.active() if name != "cpu" else None
    key = BaselineKey(
        device="cpu" if name == "cpu" else torch.cuda.get_device_name(name),
        torch=torch.__version__.partition("+")[0],
        opacus=importlib.metadata.version("opacus"),
        mode="+".join(sorted(modes)) or "none",
    )
    return Baseline(
        key=key,
        peak_bytes=peak.requested_bytes,
        modules=peak.modules,
        step=peak.step,
        phase=peak.phase,
        virtual_gpu=UNSET if running is None else running.kind,
    )


def read(file: Path) -> list[Baseline]:
    """Reads the entries of a file. Raises MemprofError if it is missing, damaged or of another version."""
    if not os.path.exists(file):
        raise MemprofError(f"there is no baseline {file}: {_UPDATE}")
    return read_json_object(file, BaselineFile, _RESTORE).baselines


def read_at(commit: str, file: Path) -> list[Baseline]:
    """Reads the entries that a file has in a commit. A file that the commit lacks is new, and read from the disk.

    Raises:
        MemprofError: git knows no such commit here, or the file is damaged or of another version.
    """
    folder = next(parent for parent in file.parents if parent.is_dir())
    try:
        _git(folder, "rev-parse", "--verify", f"{commit}^{{commit}}")
    except (OSError, subprocess.CalledProcessError) as error:  # also if git distrusts the folder's owner, or is absent
        said = str(getattr(error, "stderr", error)).strip().partition("\n")[0]
        raise MemprofError(
            f"--memprof-compare {commit}: git knows no such commit in {folder} ({said}); fetch it first"
        ) from error
    path = f"{commit}:./{file.relative_to(folder)}"
    try:
        content = _git(folder, "show", path)
    except subprocess.CalledProcessError:
        return read(file)
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory, f"{file.name} of {commit}".replace(os.sep, "_"))
        copy.write_text(content, encoding="utf-8")
        return read_json_object(copy, BaselineFile, f"the commit {commit} has a damaged baseline").baselines


def _git(folder: Path, *arguments: str) -> str:
    """Returns what git prints. Raises CalledProcessError if it fails, and OSError if it cannot be started."""
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, check=True, encoding="utf-8", errors="replace").stdout


def update(file: Path, measured: Baseline) -> None:
    """Replaces the entry with the same key, or adds it. Several processes may do so at once.

    Raises:
        MemprofError: the file, or its directory, cannot be written.
    """
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    with _locked(file.parent):
        others = [entry for entry in read(file) if entry.key != measured.key] if file.exists() else []
        entries = sorted([*others, measured], key=lambda entry: list(entry.key.values()))
        content = msgspec.to_builtins(BaselineFile(baselines=entries))
        write_text(file, json.dumps(content, indent=1, sort_keys=True) + "\n")


def compare(entries: list[Baseline], measured: Baseline, rel: float, file: Path) -> str | None:
    """Compares a measured entry with the baseline of the same key.

    Returns:
        None, or a message with everything that has grown by `rel` or more: the peak, categories at the peak, and their
        modules.

    Raises:
        MemprofError: there is no entry with the measured key.
    """
    before = next((entry for entry in entries if entry.key == measured.key), None)
    if before is None:
        known = "; ".join(_describe_key(entry.key) for entry in entries) or "nothing"
        raise MemprofError(f"{file} has no baseline for {_describe_key(measured.key)}, only for {known}: {_UPDATE}")
    rows = []
    old_peak, new_peak = before.peak_bytes, measured.peak_bytes
    if _has_grown(old_peak, new_peak, rel):
        rows.append(_row("peak", old_peak, new_peak))
    old, new = _by_category(before.modules), _by_category(measured.modules)
    changes = {name: sum(sizes.values()) - sum(old.get(name, {}).values()) for name, sizes in new.items()}
    for category in sorted(changes, key=lambda name: (-changes[name], name)):
        old_modules, modules = old.get(category, {}), new[category]
        if not _has_grown(sum(old_modules.values()), sum(modules.values()), rel):
            continue
        rows.append(_row(category, sum(old_modules.values()), sum(modules.values())))
        growth = {
            name: size - old_modules.get(name, 0) for name, size in modules.items() if size > old_modules.get(name, 0)
        }
        for name in sorted(growth, key=lambda name: (-growth[name], name))[:_TOP]:
            rows.append(_row(f"  in {name or '(no module)'}", old_modules.get(name, 0), modules[name]))
    if not rows:
        return None
    return "\n".join(
        [
            f"memory grew by {100 * rel:g} % or more against the baseline {file} for {_describe_key(measured.key)}"
            f"{_where(before, measured)}; the peak is in {measured.phase} of step {measured.step}, it was in "
            f"{before.phase} of step {before.step}",
            *rows,
        ]
    )


def _has_grown(old: int, new: int, rel: float) -> bool:
    return new > old and new - old >= rel * old


def _row(name: str, old: int, new: int) -> str:
    percent = f"{100 * (new - old) / old:+.1f} %" if old else "new"
    change = new - old
    return f"  {name:<32} {format_bytes(old):>11} -> {format_bytes(new):>11}  +{format_bytes(change)} ({percent})"


def _by_category(modules: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Returns bytes by category and module, from bytes by module and category."""
    result: dict[str, dict[str, int]] = {}
    for module, sizes in modules.items():
        for category, size in sizes.items():
            result.setdefault(category, {})[module] = size
    return result


def _describe_key(key: BaselineKey) -> str:
    return f"{key.device}, torch {key.torch}, Opacus {key.opacus}, mode {key.mode}"


def _where(before: Baseline, measured: Baseline) -> str:
    """Returns a phrase that says which of the two was measured on a virtual GPU."""
    names = [name for name, entry in (("baseline", before), ("this run", measured)) if "virtual_gpu" in entry]
    return f" ({' and '.join(names)} on a virtual GPU)" if names else ""


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Locks the directory against other writers, without a lock file, which could be committed by accident."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # the file system has no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
