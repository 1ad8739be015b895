# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a job say together: who needs most memory, for what, and what does not fit together."""

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from opacus_memprof.analysis.profile import FORMAT
from opacus_memprof.analysis.virtual import virtual_gpu_of
from opacus_memprof.launch import Launch

# A rank whose peak is this much above the median decides alone what batch fits.
STRAGGLER = 1.05
# The status of a job is the worst of its ranks', the first of these. A rank that has left nothing was killed.
_WORST_FIRST = ("out_of_memory", "failed", "killed", "running", "finished")


class Job:
    """Takes the ranks' profiles one by one, and keeps a row of each.

    Args:
        launch: of any of its processes; None where the profiles do not say.
    """

    def __init__(self, launch: Launch | None) -> None:
        self.rows: list[dict[str, Any]] = []
        self._launch = launch
        self._left_out: list[int] = []
        self._unreadable: list[int] = []
        self._notes: list[str] = []
        self._said: dict[str, list[int]] = {}  # a rank's own warning → who says it
        self._findings: dict[tuple[str, str], dict[str, Any]] = {}
        self._versions: dict[tuple[tuple[str, Any], ...], list[int]] = {}
        self._virtual: dict[str | None, list[int]] = {}  # the virtual GPU, None for a real one
        self._virtual_mark: Mapping[str, Any] | None = None
        self._model: tuple[int, frozenset[str]] | None = None
        self._other_models: dict[frozenset[str], list[int]] = {}

    def add(self, rank: int, directory: str, profile: Mapping[str, Any], modules: frozenset[str]) -> None:
        """A rank's profile, and the names of all modules that it has attached."""
        self.rows.append(_row(rank, directory, profile))
        self._versions.setdefault(tuple(sorted(profile.get("versions", {}).items())), []).append(rank)
        self._virtual.setdefault(virtual_gpu_of(profile), []).append(rank)
        self._virtual_mark = self._virtual_mark or profile.get("virtual")
        for warning in profile.get("warnings", ()):
            self._said.setdefault(warning, []).append(rank)
        for finding in profile.get("findings", ()):
            self._add_finding(rank, finding)
        if len(modules) > 1:  # more than "": it has got as far as its model
            if self._model is None:
                self._model = rank, modules
            elif modules != self._model[1]:
                self._other_models.setdefault(modules, []).append(rank)

    def leave_out(self, rank: int) -> None:
        """Its profile is of another job."""
        self._left_out.append(rank)

    def cannot_read(self, rank: int, why: str) -> None:
        self._unreadable.append(rank)
        self._notes.append(f"rank {rank} is left out: {why}")

    def summary(self) -> dict[str, Any]:
        """The content of ranks.json."""
        world_size = self._launch.world_size if self._launch is not None else len(self.rows)
        expected = self._launch.ranks if self._launch is not None else range(world_size)
        present = {row["rank"] for row in self.rows} | set(self._unreadable)
        missing = [rank for rank in expected if rank not in present]
        measured = [row for row in self.rows if row["peak"] and row["steps"]] or [r for r in self.rows if r["peak"]]
        stray = _stray_bytes(self.rows)
        statuses = [*(row["status"] for row in self.rows), *["killed"] * bool(missing)]
        return {
            "format": FORMAT,
            "launch": None if self._launch is None else self._launch.to_json(),
            "world_size": world_size,
            "status": min(statuses, key=_WORST_FIRST.index),
            "versions": dict(next(iter(self._versions))),
            **({} if self._launch is None or self._launch.played is None else {"played": self._launch.played}),
            **({} if self._virtual_mark is None else {"virtual": dict(self._virtual_mark)}),
            "ranks": self.rows,
            "missing": missing,
            "imbalance": _imbalance(measured),
            "stragglers": _stragglers(measured),
            "total": {
                "peaks_bytes": sum(row["peak"]["requested_bytes"] for row in measured),
                "categories": _sums(row["peak"]["categories"] for row in measured),
            },
            "findings": [*stray, *self._findings.values()],
            "warnings": [*self._what_does_not_fit(missing), *self._notes, *self._of_ranks()],
        }

    def _add_finding(self, rank: int, finding: Mapping[str, Any]) -> None:
        """Of what several ranks have found alike, the largest stands for all."""
        key = finding["kind"], finding["module"]
        known = self._findings.get(key)
        ranks = [*(known["ranks"] if known else ()), rank]
        largest = finding if known is None or finding["bytes"] > known["bytes"] else known
        self._findings[key] = {**largest, "ranks": ranks}

    def _of_ranks(self) -> list[str]:
        return [f"{list_ranks(ranks)}: {warning}" for warning, ranks in self._said.items()]

    def _what_does_not_fit(self, missing: list[int]) -> list[str]:
        said = _early_ends(self.rows)
        if missing:
            left = "has" if len(missing) == 1 else "have"
            said.append(f"{list_ranks(missing)} of {self._launch_size()} {left} left no profile here")
        gone = [rank for rank in self._left_out if rank >= self._launch_size()]
        if gone:
            said.append(f"what lies here of {list_ranks(gone)} is of an earlier job, and is left out")
        if len(self._versions) > 1:
            said.append(_differing_versions(self._versions))
        if len(self._virtual) > 1:
            places = [f"{list_ranks(ranks)} on a {name or 'real device'}" for name, ranks in self._virtual.items()]
            said.append(f"the ranks ran on different devices: {'; '.join(places)}")
        for modules, ranks in self._other_models.items():
            assert self._model is not None
            first, reference = self._model
            only = sorted(modules ^ reference)
            said.append(
                f"{list_ranks(ranks)} trained another model than rank {first}: {len(only)} modules are not in both, "
                f"such as {only[0]!r}"
            )
        return said + _clocks(self.rows)

    def _launch_size(self) -> int:
        return self._launch.world_size if self._launch is not None else len(self.rows)


def _early_ends(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Who has not finished, and why, as far as anybody knows."""
    alike: dict[tuple[str, int, str | None], list[int]] = {}
    for row in rows:
        if row["status"] != "finished":
            alike.setdefault((row["status"], row["steps"], row["error"]), []).append(row["rank"])
    said = []
    for (status, steps, error), ranks in alike.items():
        several = len(ranks) > 1
        how = {
            "out_of_memory": "ran out of memory",
            "failed": "failed",
            "killed": "were killed" if several else "was killed",
            "running": "are still running" if several else "is still running",
        }[status]
        when = f"after {steps} step{'s' if steps > 1 else ''}" if steps else "before the end of the first step"
        why = f" ({error})" if error else ""
        figures = f"{'their' if several else 'its'} figures are those until then"
        said.append(f"{list_ranks(ranks)} {how} {when}{why}: {figures}")
    return said


def list_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, or `ranks 0-3, 5`."""
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'s' if len(ordered) > 1 else ''} {shown}"


def _row(rank: int, directory: str, profile: Mapping[str, Any]) -> dict[str, Any]:
    launch = profile.get("launch") or {}
    devices = profile["devices"]
    main = max(devices, key=lambda name: devices[name]["peak"]["requested_bytes"], default=None)
    device = devices[main] if main is not None else None
    return {
        "rank": rank,
        "host": launch.get("host"),
        "local_rank": launch.get("local_rank"),
        "directory": directory,
        **{key: profile.get(key) for key in ("status", "exit_code", "error", "started_unix_ns", "ended_unix_ns")},
        "events": profile["events"]["recorded"],
        "dropped": profile["events"]["dropped"],
        "device": main,
        "steps": 0 if device is None else _steps(device),
        "peak": None if device is None else _peak(device["peak"]),
        "outside_pytorch": None if device is None else _outside(device),
        "other_devices": {name: _peak(devices[name]["peak"]) for name in devices if name != main},
    }


def _peak(peak: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("requested_bytes", "allocated_bytes", "reserved_bytes", "step", "phase", "remainder_bytes")
    return {
        **{key: peak.get(key) for key in keys},
        "categories": {category: size for category, size in peak["categories"].items() if size},
    }


def _steps(device: Mapping[str, Any]) -> int:
    """Optimizer steps that have ended."""
    return max((step["step"] + bool(step["complete"]) for step in device["steps"]), default=0)


def _outside(device: Mapping[str, Any]) -> int | None:
    """The most that was used on the device at a snapshot and torch knows nothing of: the CUDA context, NCCL, others."""
    seen = [snapshot.get("outside_pytorch") for snapshot in device["snapshots"]]
    return max((size for size in seen if size is not None), default=None)


def _sums(rows: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for row in rows:
        for category, size in row.items():
            total[category] = total.get(category, 0) + size
    return total


def _imbalance(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The highest peak against the mean, and by category the same: where they part is what the highest has more of."""
    if not rows:
        return None
    count = len(rows)
    highest = max(rows, key=lambda row: row["peak"]["requested_bytes"])
    total = sum(row["peak"]["requested_bytes"] for row in rows)
    mean = {category: size / count for category, size in _sums(row["peak"]["categories"] for row in rows).items()}
    above = {category: highest["peak"]["categories"].get(category, 0) - mean[category] for category in mean}
    cause = max(above, key=lambda category: above[category], default=None)
    return {
        "max_bytes": highest["peak"]["requested_bytes"],
        "mean_bytes": round(total / count),
        "ratio": highest["peak"]["requested_bytes"] * count / total if total else 1.0,
        "rank": highest["rank"],
        "cause": cause,
        "cause_bytes": 0 if cause is None else round(above[cause]),
        "categories": {category: _spread(category, rows, mean[category]) for category in mean},
    }


def _spread(category: str, rows: list[dict[str, Any]], mean: float) -> dict[str, Any]:
    highest = max(rows, key=lambda row: row["peak"]["categories"].get(category, 0))
    size = highest["peak"]["categories"].get(category, 0)
    return {"max_bytes": size, "mean_bytes": round(mean), "ratio": size / mean, "rank": highest["rank"]}


def _stragglers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ranks whose peak is far above the median, the highest first."""
    if not rows:
        return []
    median = statistics.median(row["peak"]["requested_bytes"] for row in rows)
    found = [
        {"rank": row["rank"], "bytes": size, "above_median": round(size - median)}
        for row in rows
        if (size := row["peak"]["requested_bytes"]) > STRAGGLER * median
    ]
    return sorted(found, key=lambda row: (-row["bytes"], row["rank"]))


def _stray_bytes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a rank has on the GPU that another rank of its machine trains on."""
    trainers = {(row["host"], row["device"]): row["rank"] for row in rows if row["device"]}
    found = []
    for row in rows:
        for device, peak in row["other_devices"].items():
            owner = trainers.get((row["host"], device))
            if owner is None or not device.startswith("cuda") or not peak["requested_bytes"]:
                continue
            found.append(
                {
                    "kind": "stray_gpu_memory",
                    "module": "",
                    "bytes": peak["requested_bytes"],
                    "ranks": [row["rank"]],
                    "evidence": f"rank {row['rank']} trains on {row['device']} and had {peak['requested_bytes']} bytes "
                    f"on {device}, where rank {owner} trains; its CUDA context takes more there",
                    "remedy": "call torch.cuda.set_device(local_rank) before anything else, and load files with "
                    "map_location",
                }
            )
    return found


def _differing_versions(versions: Mapping[tuple[tuple[str, Any], ...], list[int]]) -> str:
    every = [dict(known) for known in versions]
    names = [name for name in every[0] if len({known.get(name) for known in every}) > 1]
    parts = []
    for known, ranks in versions.items():
        listed = ", ".join(f"{name} {dict(known).get(name)}" for name in names)
        parts.append(f"{list_ranks(ranks)} {'have' if len(ranks) > 1 else 'has'} {listed}")
    return f"the ranks ran different versions: {'; '.join(parts)}"


def _clocks(rows: list[dict[str, Any]]) -> list[str]:
    """Ranks of a job run at the same time. Where they seem not to, and are on different machines, clocks may differ."""
    timed = [row for row in rows if row["started_unix_ns"] and row["ended_unix_ns"]]
    if not timed:
        return []
    first = min(timed, key=lambda row: row["ended_unix_ns"])
    last = max(timed, key=lambda row: row["started_unix_ns"])
    gap = last["started_unix_ns"] - first["ended_unix_ns"]
    if gap <= 0 or first["host"] == last["host"]:
        return []
    return [
        f"rank {last['rank']} on {last['host']} began {gap / 1e9:.1f} s after rank {first['rank']} on {first['host']} "
        "had ended: unless that is so, their clocks disagree, and times of different machines cannot be compared"
    ]
