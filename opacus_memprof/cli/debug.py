# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof debug` and `bisect`: the memory of LoRA training, and since which release a training needs more."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import typer
from rich.console import Console

from opacus_memprof.analysis.diff import GrowthLimit, diff_profiles, exceeded_limits
from opacus_memprof.analysis.profile import load_profile
from opacus_memprof.cli.options import DeviceName, Token, VirtualGpuKind, VirtualGpuOptions, VirtualMemory, hide_token
from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments.configuration import Dtype
from opacus_memprof.integrations.hub import use_cache_if_hub_unreachable
from opacus_memprof.language import tr
from opacus_memprof.profiles.files import write_text, writing
from opacus_memprof.profiles.optional import require
from opacus_memprof.profiles.profile import Profile
from opacus_memprof.virtual_gpu.devices import find_gpu

Level = Literal["model_only", "full", "custom", "comparison"]

RANKS = {
    "small_r": {"r": 8, "alpha": 16},
    "medium_r": {"r": 16, "alpha": 32},
    "large_r": {"r": 32, "alpha": 64},
}


@dataclass(frozen=True)
class _Request:
    """A model to debug, and the device."""

    model: str
    precision: str
    labels: dict[str, Any]
    log_dir: Path
    token: str | None
    device: str


def debug(
    level: Annotated[
        Level,
        typer.Option(
            "--level",
            "--debug-level",
            help="model_only: the model. full: a training. custom: its stages. comparison: three LoRA ranks.",
        ),
    ] = "full",
    model: Annotated[
        str, typer.Option(help="tiny (built in, random weights), a Hugging Face id, or a local path.")
    ] = "tiny",
    precision: Annotated[Dtype, typer.Option(help="Data type of the frozen weights and of autocast.")] = "fp32",
    pkg: Annotated[str | None, typer.Option(help="Label of the results: package of the data.")] = None,
    version: Annotated[str | None, typer.Option(help="Label of the results: version of the data.")] = None,
    knowledge_type: Annotated[str | None, typer.Option(help="Label of the results: kind of the data.")] = None,
    log_dir: Annotated[Path, typer.Option(metavar="DIR", help="Directory of the report, results and profile.")] = Path(
        "logs/memory_debug"
    ),
    token: Token = None,
    device: DeviceName = "auto",
    virtual_gpu: VirtualGpuKind = None,
    virtual_memory: VirtualMemory = None,
) -> None:
    """Debug the memory of LoRA training, on random tokens."""
    hide_token(sys.argv)
    if virtual_gpu is not None and device == "cpu":
        raise MemprofError("a virtual GPU is not a CPU: leave out --device cpu or --virtual-gpu")
    with writing(log_dir):  # fails before the training, not after it
        log_dir.mkdir(parents=True, exist_ok=True)
    # Without weights, because nobody would read their values.
    VirtualGpuOptions(virtual_gpu, virtual_memory, no_weights=virtual_gpu is not None).start()
    if model != "tiny":
        use_cache_if_hub_unreachable()
    labels = {"pkg": pkg, "version": version, "knowledge_type": knowledge_type}
    results = _LEVELS[level](_Request(model, precision, labels, log_dir, token, device))
    text = json.dumps(results, ensure_ascii=False, indent=2, default=msgspec.to_builtins)
    path = write_text(log_dir / "results.json", f"{text}\n")
    print(tr("results: {path}", path=path))


def _model_only(request: _Request) -> dict[str, Any]:
    from opacus_memprof.toolkit import lora
    from opacus_memprof.toolkit.model import analyze_model
    from opacus_memprof.toolkit.training import memory_profiled_training

    with memory_profiled_training(request.log_dir, request.device) as profiler:
        created = profiler.profile_stage(
            "model_creation",
            lora.create_model,
            lora.Settings(model=request.model),
            request.precision,
            request.token,
            request.device,
        )
    analysis = analyze_model(created, request.model)
    return {"creation_analysis": analysis, "stages": profiler.stages, "labels": request.labels}


def _full(request: _Request) -> dict[str, Any]:
    from opacus_memprof.toolkit.training import debug_lora_training

    _, results = debug_lora_training(
        {"model": request.model},
        None,
        request.precision,
        **request.labels,
        log_dir=request.log_dir,
        token=request.token,
        device=request.device,
    )
    print(Path(results["report_file"]).read_text(encoding="utf-8"))
    return results


def _custom(request: _Request) -> dict[str, Any]:
    from opacus_memprof.toolkit import lora
    from opacus_memprof.toolkit.training import memory_profiled_training

    chosen = lora.Settings(model=request.model)
    with memory_profiled_training(request.log_dir, request.device) as profiler:
        created = profiler.profile_stage(
            "model_creation", lora.create_model, chosen, request.precision, request.token, request.device
        )
        vocabulary = lora.vocabulary_size(created)
        loader = profiler.profile_stage("data_loading", lora.synthetic_batches, chosen, vocabulary)
        training = profiler.profile_stage("preparation", lora.prepare_training, created, loader, chosen)
        batches = list(training.batches)
        training.batches = batches[:1]
        profiler.profile_stage("first_step", lora.train, training, request.precision)
        training.batches = batches[1:]
        profiler.profile_stage("further_steps", lora.train, training, request.precision)
    print(profiler.generate_training_report())
    return {"stages": profiler.stages, "memory_issues": profiler.memory_issues(), "labels": request.labels}


def _comparison(request: _Request) -> dict[str, Any]:
    from opacus_memprof.toolkit.training import debug_memory_with_different_configs

    found = debug_memory_with_different_configs(
        {"model": request.model}, RANKS, request.precision, request.log_dir, request.token, request.device
    )
    for name, result in found.items():
        print(
            tr(
                "{name}: model {size:.2f} MB, {trainable:,} trainable parameters, peak {peak}",
                name=name,
                size=result["memory_mb"],
                trainable=result["trainable"],
                peak=tr("unknown") if result["peak_memory_mb"] is None else f"{result['peak_memory_mb']:.2f} MB",
            )
        )
    best = min(found, key=lambda name: float(found[name]["memory_mb"]))
    print(tr("smallest: {name}", name=best))
    return {"configurations": found, "smallest": best, "labels": request.labels}


_LEVELS: dict[Level, Callable[[_Request], dict[str, Any]]] = {
    "model_only": _model_only,
    "full": _full,
    "custom": _custom,
    "comparison": _comparison,
}


_RELEASE = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*==\s*(\S+)\s*")


class Found(NamedTuple):
    """Two adjacent releases: the last one that is good, and the first one that is bad, with their profiles."""

    good: str
    bad: str
    before: Profile
    after: Profile


@dataclass(frozen=True)
class Bisection:
    """A search between two releases.

    Attributes:
        program: the script and its arguments.
        gpu: the kind of virtual GPU.
        limit: a release is bad if the peak grew by more, compared with that of the good release.
        wheelhouse: a directory of wheels that pip installs from; None for pip's index.
        directory: holds the environments and profiles. What is there is used again.
    """

    program: tuple[str, ...]
    gpu: str
    limit: GrowthLimit
    wheelhouse: Path | None
    directory: Path

    def find(self, good: str, bad: str, tried: Callable[[str, bool], object]) -> Found:
        """Returns the first bad release.

        Args:
            good: a requirement such as `transformers==4.57`.
            bad: a later release of the same package.
            tried: is called with each release, and whether it is bad.

        Raises:
            MemprofError: the two are not releases of one package in this order; pip knows them not, or cannot install
                one; the program fails with one; or the later one needs no more memory.
        """
        package, releases = self._between(good, bad)
        profiles = {release: self._profile(package, release) for release in (releases[0], releases[-1])}

        def is_bad(release: str) -> bool:
            profiles[release] = profiles.get(release) or self._profile(package, release)
            answer = bool(exceeded_limits(diff_profiles(profiles[releases[0]], profiles[release]), self.limit))
            tried(f"{package} {release}", answer)
            return answer

        tried(f"{package} {releases[0]}", False)
        if not is_bad(releases[-1]):
            raise MemprofError(
                f"{bad} needs no more memory than {good}, within {self.limit.text}: there is nothing to find"
            )
        low, high = 0, len(releases) - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if is_bad(releases[middle]) else (middle, high)
        first, last = releases[low], releases[high]
        return Found(f"{package} {first}", f"{package} {last}", profiles[first], profiles[last])

    def _between(self, good: str, bad: str) -> tuple[str, list[str]]:
        """Returns the package and its releases from the good to the bad one."""
        version: Any = require("packaging.version", "bisections").Version
        ends = [_RELEASE.fullmatch(end) for end in (good, bad)]
        if None in ends:
            raise MemprofError(f"{good} and {bad} are not two releases: write PACKAGE==VERSION")
        (package, first), (other, last) = (end.groups() for end in ends if end is not None)
        if _canonical(package) != _canonical(other):
            raise MemprofError(f"{good} and {bad} are releases of different packages: give two of one")
        known = self._releases(package)
        try:
            start, end = version(first), version(last)
        except ValueError as error:
            raise MemprofError(f"{error}: give a version as pip knows it") from error
        for asked in (start, end):
            if asked not in known:
                raise MemprofError(f"pip finds no {package} {asked}, only {', '.join(map(str, sorted(known)))}")
        if not start < end:
            raise MemprofError(f"{good} is not before {bad}: give the earlier release as --good")
        steps = sorted(each for each in known if start <= each <= end)
        return package, [str(each) for each in steps if each in (start, end) or not each.is_prerelease]

    def _releases(self, package: str) -> set[Any]:
        version: Any = require("packaging.version", "bisections").Version
        if self.wheelhouse is not None:
            names = [path.name.split("-") for path in self.wheelhouse.glob("*.whl")]
            return {version(parts[1]) for parts in names if _canonical(parts[0]) == _canonical(package)}
        printed = _run([sys.executable, "-m", "pip", "index", "versions", "--pre", package], f"pip knows no {package}")
        line = re.search(r"Available versions: (.*)", printed)
        return {version(each.strip()) for each in line[1].split(",")} if line else set()

    def _profile(self, package: str, release: str) -> Profile:
        environment, profile = (self.directory / kind / release for kind in ("environments", "profiles"))
        python = environment / "bin" / "python"
        if not (environment / "installed").exists():
            _run(
                [sys.executable, "-m", "venv", "--clear", "--without-pip", str(environment)], "cannot make environments"
            )
            (site,) = environment.glob("lib/python*/site-packages")
            here = [path for path in sys.path if os.path.isdir(path)]
            (site / "this_environment.pth").write_text("\n".join(map(os.path.abspath, here)) + "\n", encoding="utf-8")
            offline = [] if self.wheelhouse is None else ["--no-index", "--find-links", str(self.wheelhouse)]
            install = [str(python), "-m", "pip", "install", "-q", *offline, f"{package}=={release}"]
            _run(install, f"pip cannot install {package} {release}")
            (environment / "installed").touch()
        run = ["run", "--virtual-gpu", self.gpu, "-o", str(profile), *self.program]
        _run([str(python), "-m", "opacus_memprof", *run], f"the program fails with {package} {release}")
        return load_profile(profile)


def _run(command: list[str], otherwise: str) -> str:
    """Returns what a program prints. Raises MemprofError with its last line if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if ran.returncode:
        lines = ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"]
        raise MemprofError(f"{otherwise} ({next((line for line in lines if 'rror' in line), lines[-1]).strip()})")
    return ran.stdout


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def bisect(
    *,
    script: Annotated[str, typer.Argument(metavar="SCRIPT.py", show_default=False, help="The script.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", show_default=False, help="Arguments of the script.")
    ] = None,
    good: Annotated[
        str, typer.Option(metavar="PACKAGE==VERSION", show_default=False, help="A release that needed less memory.")
    ],
    bad: Annotated[
        str, typer.Option(metavar="PACKAGE==VERSION", show_default=False, help="A later release that needs more.")
    ],
    above: Annotated[str, typer.Option(metavar="2%|50MiB", help="A release is bad if the peak grew by more.")] = "2%",
    gpu: Annotated[str, typer.Option(metavar="KIND", help="The virtual GPU; `doctor` lists its kinds.")] = "h100",
    wheelhouse: Annotated[
        Path | None,
        typer.Option(metavar="DIR", show_default=False, help="Directory of wheels. Default: pip's index."),
    ] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Directory of environments and profiles.")
    ] = Path("memprof_bisect"),
) -> None:
    """Find the release of a package with which a training began to need more memory, and print what changed.

    Runs the script on a virtual GPU with half of the releases between, a quarter and so on, each in a virtual
    environment that differs from this one by that release.
    """
    from opacus_memprof.reports.diff import print_diff

    if not Path(script).is_file():
        raise MemprofError(f"the script {script} {'is a directory' if Path(script).is_dir() else 'does not exist'}")
    if wheelhouse is not None and not wheelhouse.is_dir():
        raise MemprofError(f"--wheelhouse: there is no directory {wheelhouse}")
    find_gpu(gpu)
    program = (script, *(arguments or ()))
    search = Bisection(program, gpu, GrowthLimit.parse(above), wheelhouse, output.absolute())
    console = Console(highlight=False)
    found = search.find(good, bad, lambda release, is_bad: console.print(f"{release}: {'bad' if is_bad else 'good'}"))
    console.print(f"\n{found.bad} is the first release that needs more; what changed since {found.good}:\n")
    print_diff(diff_profiles(found.before, found.after), console)
