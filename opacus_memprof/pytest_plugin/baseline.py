# SPDX-License-Identifier: Apache-2.0
"""Committed baselines: a JSON file a name, in it the peaks by what they depend on, the device's kind, torch, Opacus
and the grad-sample mode.

    {"format": 1, "baselines": [{"key": {"device", "torch", "opacus", "mode"}, "peak_bytes", "step", "phase",
                                 "modules": {module: {category: bytes}}, "virtual_gpu": kind}]}

An entry that was measured on a virtual GPU has the key of the real one, and names its kind in "virtual_gpu": the two
allocate the same, so that either is compared with the other.
"""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from opacus_memprof import virtual_gpu
from opacus_memprof.errors import MemprofError
from opacus_memprof.files import read_object, write_text, writing
from opacus_memprof.units import format_bytes

FORMAT = 1
_KEY = ("device", "torch", "opacus", "mode")
_TOP = 3  # modules that are told of a category that grew
_UPDATE = "run with --memprof-update-baselines and commit the file"
_RESTORE = "restore it from version control, or remove it and write it anew with --memprof-update-baselines"


def file_of(name: str, folder: Path) -> Path:
    """Raises MemprofError for a name that is no plain file name."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise MemprofError(f"{name!r} cannot name a baseline: use letters, digits, _, - and .")
    return folder / f"{name}.json"


def measure(devices: Mapping[str, Any], modes: set[str]) -> dict[str, Any]:
    """The entry of the device with the highest peak."""
    if not devices:
        raise MemprofError("no memory was allocated: there is nothing to compare with a baseline")
    name, device = max(devices.items(), key=lambda entry: entry[1]["peak"]["requested_bytes"])
    peak = device["peak"]
    running = virtual_gpu.active() if name != "cpu" else None
    return {
        "key": {
            "device": "cpu" if name == "cpu" else torch.cuda.get_device_name(name),
            "torch": torch.__version__.partition("+")[0],
            "opacus": importlib.metadata.version("opacus"),
            "mode": "+".join(sorted(modes)) or "none",
        },
        "peak_bytes": peak["requested_bytes"],
        "step": peak["step"],
        "phase": peak["phase"],
        "modules": peak["modules"],
        **({"virtual_gpu": running.kind} if running is not None else {}),
    }


def read(file: Path) -> list[dict[str, Any]]:
    """The entries of a file. Raises MemprofError where it is missing, damaged or of another version."""
    if not os.path.exists(file):
        raise MemprofError(f"there is no baseline {file}: {_UPDATE}")
    content = read_object(file, _RESTORE)
    if not isinstance(content.get("baselines"), list):
        raise _damaged(file, "it is not a file of baselines")
    if content.get("format") != FORMAT:
        raise MemprofError(
            f"{file} has format {content.get('format')!r}, and this release reads {FORMAT}: use the release that "
            "wrote it, or remove it and write it anew with --memprof-update-baselines"
        )
    for entry in content["baselines"]:
        if not _is_entry(entry):
            raise _damaged(file, "an entry lacks its key, peak_bytes or modules")
    entries: list[dict[str, Any]] = content["baselines"]
    return entries


def update(file: Path, measured: dict[str, Any]) -> None:
    """Puts the entry in the place of the one with the same key, and leaves the others; also from several processes.

    Raises:
        MemprofError: the file, or its directory, cannot be written.
    """
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    with _locked(file.parent):
        others = [entry for entry in read(file) if entry["key"] != measured["key"]] if file.exists() else []
        entries = sorted([*others, measured], key=lambda entry: [entry["key"][part] for part in _KEY])
        content = {"format": FORMAT, "baselines": entries}
        write_text(file, json.dumps(content, indent=1, sort_keys=True) + "\n")


def compare(entries: list[dict[str, Any]], measured: Mapping[str, Any], rel: float, file: Path) -> str | None:
    """Nothing, or what has grown by `rel` or more: the peak and categories at it, and the modules that made it.

    Raises:
        MemprofError: there is no entry with the measured key.
    """
    before = next((entry for entry in entries if entry["key"] == measured["key"]), None)
    if before is None:
        known = "; ".join(_said(entry["key"]) for entry in entries) or "nothing"
        raise MemprofError(f"{file} has no baseline for {_said(measured['key'])}, but for {known}: {_UPDATE}")
    rows = []
    then, now = before["peak_bytes"], measured["peak_bytes"]
    if _grown(then, now, rel):
        rows.append(_row("peak", then, now))
    old, new = _by_category(before["modules"]), _by_category(measured["modules"])
    changes = {name: sum(sizes.values()) - sum(old.get(name, {}).values()) for name, sizes in new.items()}
    for category in sorted(changes, key=lambda name: (-changes[name], name)):
        was, modules = old.get(category, {}), new[category]
        if not _grown(sum(was.values()), sum(modules.values()), rel):
            continue
        rows.append(_row(category, sum(was.values()), sum(modules.values())))
        grown = {name: size - was.get(name, 0) for name, size in modules.items() if size > was.get(name, 0)}
        for name in sorted(grown, key=lambda name: (-grown[name], name))[:_TOP]:
            rows.append(_row(f"  in {name or '(no module)'}", was.get(name, 0), modules[name]))
    if not rows:
        return None
    return "\n".join(
        [
            f"memory grew by {100 * rel:g} % or more against the baseline {file} for {_said(measured['key'])}"
            f"{_where(before, measured)}; the peak is in {measured['phase']} of step {measured['step']}, it was in "
            f"{before.get('phase')} of step {before.get('step')}",
            *rows,
        ]
    )


def _grown(then: int, now: int, rel: float) -> bool:
    return now > then and now - then >= rel * then


def _row(what: str, then: int, now: int) -> str:
    percent = f"{100 * (now - then) / then:+.1f} %" if then else "new"
    change = now - then
    return f"  {what:<32} {format_bytes(then):>11} -> {format_bytes(now):>11}  +{format_bytes(change)} ({percent})"


def _by_category(modules: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """category → module → bytes, the other way round."""
    result: dict[str, dict[str, int]] = {}
    for module, sizes in modules.items():
        for category, size in sizes.items():
            result.setdefault(category, {})[module] = size
    return result


def _said(key: Mapping[str, str]) -> str:
    return f"{key['device']}, torch {key['torch']}, Opacus {key['opacus']}, mode {key['mode']}"


def _where(before: Mapping[str, Any], measured: Mapping[str, Any]) -> str:
    """Which of the two was measured on a virtual GPU."""
    names = [name for name, entry in (("baseline", before), ("this run", measured)) if "virtual_gpu" in entry]
    return f" ({' and '.join(names)} on a virtual GPU)" if names else ""


def _damaged(file: Path, why: str) -> MemprofError:
    return MemprofError(f"{file} cannot be read ({why}): {_RESTORE}")


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("key"), dict)
        and all(isinstance(entry["key"].get(part), str) for part in _KEY)
        and type(entry.get("peak_bytes")) is int
        and isinstance(entry.get("modules"), dict)
        and all(
            isinstance(sizes, dict) and all(type(size) is int for size in sizes.values())
            for sizes in entry["modules"].values()
        )
    )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One writer at a time, without a file that would be committed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
