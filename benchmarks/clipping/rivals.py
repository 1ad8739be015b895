# SPDX-License-Identifier: Apache-2.0
"""Compares flash_clip with training without privacy, Opacus' modes and other libraries.

Measures time, peak memory and exactness, on the configurations of the libraries' own papers.

    python -m benchmarks.clipping.rivals --fastdp DIR --flashnorm DIR  # every configuration; needs a GPU
    python -m benchmarks.clipping.rivals --ranks 2               # Llama-3.1-8B, which FSDP2 shards over 2 GPUs (or 1)
    python -m benchmarks.clipping.rivals --tiny                  # the small copies, on the CPU: does everything run?

DIR are checkouts of https://github.com/awslabs/fast-differential-privacy and of FlashNorm's fork of Opacus; without
them their rows are left out. Each library has a process of its own for each configuration, in which its modes are
interleaved with training without privacy in shuffled order; ratios are taken within a round, and their median is
quoted. Before, each mode takes a step without noise on a small copy of the model in float64, whose update is compared
with clipping by hand, one sample at a time. Results are written as they come: rivals.json and rivals.md, and rivals.png
at the end.

With --ranks the processes of a configuration are one group, in which training without privacy, ghost_fsdp,
flash_clip and, where its checkout is given and clips a small copy, fastDP are interleaved. Parameters are made as
shards, with random numbers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import opacus

from benchmarks.clipping.modes import machine, run_worker, summarize
from benchmarks.clipping.rivals_models import CONFIGS, SHARDED_CONFIGS, RivalConfig
from benchmarks.clipping.rivals_report import markdown, write_pictures
from benchmarks.clipping.training_modes import FASTDP, FLASHNORM, OPACUS, SHARDED
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.files import write_text
from opacus_memprof.versions import installed_version

OWN = "Opacus and flash_clip"


class Library(NamedTuple):
    """Modes that run in one process, and the checkout that it imports; or in ``ranks``, over which FSDP2 shards."""

    name: str
    modes: list[str]
    checkout: Path | None = None
    ranks: int | None = None

    def environment(self) -> dict[str, str]:
        """What the process has in its environment to import the checkout."""
        if self.checkout is None:
            return {}
        return {"PYTHONPATH": os.pathsep.join([str(self.checkout), *filter(None, [os.environ.get("PYTHONPATH")])])}


def commit_of(checkout: Path) -> str:
    """The checkout's commit."""
    command = ["git", "-C", str(checkout), "rev-parse", "--show-toplevel", "--short", "HEAD"]
    ran = subprocess.run(command, capture_output=True, text=True)
    root, _, commit = ran.stdout.strip().partition("\n")
    return commit if ran.returncode == 0 and Path(root) == checkout.resolve() else "no git checkout"


def libraries(fastdp: Path | None, flashnorm: Path | None, ranks: int | None) -> list[Library]:
    """Returns the libraries to measure.

    Raises:
        MemprofError: if a directory is not a checkout, or has nothing for sharded models, or if there are no ranks to
            shard over.
    """
    for name, checkout, package in (("fastDP", fastdp, "fastDP"), ("FlashNorm", flashnorm, "opacus")):
        if checkout is not None and not (checkout / package / "__init__.py").is_file():
            raise MemprofError(f"{checkout} has no package {package}: give the root of a checkout of {name}")
    if ranks is not None:
        if ranks < 1:
            raise MemprofError(f"--ranks is {ranks}: give the number of GPUs to shard over, at least 1")
        if flashnorm is not None:
            raise MemprofError("FlashNorm's modes know no shards: leave --flashnorm out with --ranks")
        modes = [*SHARDED, *([] if fastdp is None else ["fastDP MixOpt"])]
        name = f"FSDP2 on {ranks} {'rank' if ranks == 1 else 'ranks'}"
        return [Library(name, modes, fastdp and fastdp.resolve(), ranks)]
    found = [Library(OWN, OPACUS)]
    for name, modes, checkout in (("fastDP", list(FASTDP), fastdp), ("FlashNorm", list(FLASHNORM), flashnorm)):
        if checkout is not None:
            found.append(Library(name, modes, checkout.resolve()))
    return found


def measure(
    config: RivalConfig, library: Library, seconds: float, tiny: bool, on_rows: Callable[[list[dict[str, Any]]], None]
) -> None:
    """Calls ``on_rows`` with one row for each mode, training without privacy first.

    It is called as results come, and with all of them at the end.
    """
    worker = "benchmarks.clipping.rivals_worker"
    modes = ["vanilla", *library.modes]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(library.ranks)]
    command = [sys.executable, *([] if library.ranks is None else launcher), "-m", worker, config.name]
    command += ["--seconds", str(seconds), "--modes", *modes]
    command += ["--tiny", "--rounds", "1"] if tiny else []
    lines, failed = run_worker(
        command, seconds, library.environment(), lambda lines: on_rows(rows_of(config, library, modes, lines, ""))
    )
    on_rows(rows_of(config, library, modes, lines, failed))


def rows_of(
    config: RivalConfig, library: Library, modes: list[str], lines: list[dict[str, Any]], failed: str
) -> list[dict[str, Any]]:
    """One row for each mode, from a worker's lines and how it failed."""
    exactness = {line["mode"]: line["exactness"] for line in lines if "exactness" in line}
    summary = summarize([line for line in lines if "round" in line])
    rows = []
    for mode in modes:
        fate = failed or (exactness.get(mode) or {}).get("failed") or "it was not measured"
        found = summary.get(mode, {"failed": fate})
        row = {"config": config.name, "library": library.name, "mode": mode, "exactness": exactness.get(mode)}
        rows.append(row | {key: value for key, value in found.items() if key != "time_ratios"})
    return rows


def published(config: RivalConfig) -> list[dict[str, Any]]:
    """What others say of this configuration."""
    return [
        {"config": config.name, "mode": mode, **dataclasses.asdict(each)} for mode, each in config.published.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fastdp", type=Path, metavar="DIR", help="a checkout of fastDP")
    parser.add_argument("--flashnorm", type=Path, metavar="DIR", help="a checkout of FlashNorm's fork of Opacus")
    parser.add_argument("--ranks", type=int, help="processes that FSDP2 shards Llama-3.1-8B over, a GPU each")
    parser.add_argument("--configs", nargs="+", metavar="NAME", help="names of configurations")
    parser.add_argument("--tiny", action="store_true", help="the small copies of all models, once, on the CPU")
    parser.add_argument("--seconds", type=float, default=30, help="of each process, beside its start")
    parser.add_argument("-o", "--output", type=Path, default=Path("rivals"), metavar="DIR")
    arguments = parser.parse_args()
    known = CONFIGS if arguments.ranks is None else SHARDED_CONFIGS
    configs = [c for c in known if not arguments.configs or c.name in arguments.configs]
    if unknown := set(arguments.configs or ()) - {c.name for c in known}:
        parser.error(f"no configuration {', '.join(sorted(unknown))}; there are {', '.join(c.name for c in known)}")
    if arguments.tiny:  # several have the same small copy
        configs = list({config.small.name: config for config in reversed(configs)}.values())[::-1]
    try:
        compared = libraries(arguments.fastdp, arguments.flashnorm, arguments.ranks)
    except MemprofError as error:
        parser.error(str(error))
    versions = {name: installed_version(name) for name in ("opacus_memprof", "transformers", "peft")}
    checkouts = {"fastDP": arguments.fastdp, "FlashNorm": arguments.flashnorm}
    versions |= {name: commit_of(checkout) for name, checkout in checkouts.items() if checkout}
    results: dict[str, Any] = {
        "machine": machine() | ({"device": "the CPU"} if arguments.tiny else {}),
        "versions": {"opacus": opacus.__version__} | versions,
        "tiny": arguments.tiny,
        "papers": {config.name: config.paper for config in configs},
        "rows": [],
        "published": [],
    }
    for config in configs:
        results["published"] += published(config)
        for library in compared:
            before = results["rows"]

            def write(rows: list[dict[str, Any]], before: list[dict[str, Any]] = before) -> None:
                results["rows"] = before + rows
                write_text(arguments.output / "rivals.json", json.dumps(results, indent=1))
                write_text(arguments.output / "rivals.md", markdown(results))

            measure(config, library, arguments.seconds, arguments.tiny, write)
            rows = results["rows"][len(before) :]
            ran = len([row for row in rows if "seconds" in row])
            print(f"{config.name}, {library.name}: {ran} of {len(rows)} modes ran", flush=True)
    write_pictures(results, arguments.output / "rivals.png")
    print(markdown(results))


if __name__ == "__main__":
    main()
