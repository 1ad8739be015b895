# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof debug` and `bisect`: the memory of LoRA training, and since which release a training needs more."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
import typer
from rich.console import Console

from opacus_memprof.cli.options import DeviceName, Token, VirtualGpuKind, VirtualGpuOptions, VirtualMemory, hide_token
from opacus_memprof.errors import MemprofError, require
from opacus_memprof.experiments.configuration import Dtype
from opacus_memprof.language import tr, tr_sentence
from opacus_memprof.profiles.files import write_text, writing
from opacus_memprof.profiles.profile import Profile
from opacus_memprof.virtual_gpu.devices import find_gpu

if TYPE_CHECKING:  # no other command needs it
    from opacus_memprof.analysis.diff import GrowthLimit

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
        from opacus_memprof.integrations.hub import use_cache_if_hub_unreachable

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


_NAME = r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*"
_RELEASE = re.compile(_NAME + r"==\s*(\S+)\s*")
_COMMIT = re.compile(_NAME + r"@\s*git\+([a-z]+://\S+)@([^\s@#]+)(#\S+)?\s*")


class Candidate(NamedTuple):
    """A release or a commit of a package: its name in reports, its directories' name, and what pip installs."""

    name: str
    directory: str
    requirement: str


class BisectionResult(NamedTuple):
    """The last good candidate and the first bad one, their profiles, and how many between them cannot run."""

    good: str
    bad: str
    before: Profile
    after: Profile
    left_out: int


@dataclass(frozen=True)
class Bisection:
    """A search between two releases, or two commits, of a package.

    Attributes:
        program: the script and its arguments.
        gpu: the kind of virtual GPU.
        limit: a candidate is bad if the peak grew by more, compared with that of the good end.
        wheelhouse: a directory of wheels that pip installs from; None for pip's index.
        directory: holds environments, profiles and a copy of the repository. Environments are used again.
    """

    program: tuple[str, ...]
    gpu: str
    limit: "GrowthLimit"
    wheelhouse: Path | None
    directory: Path

    def find(self, good: str, bad: str, tried: Callable[[str, str], object]) -> BisectionResult:
        """Returns the first bad candidate. Leaves out those between the ends that cannot be installed or run.

        Args:
            good: a requirement such as `transformers==4.57` or `transformers @ git+https://HOST/REPOSITORY@COMMIT`.
            bad: a later release, or a later commit, of the same package.
            tried: is called with each candidate, and "good", "bad" or why it is left out.

        Raises:
            MemprofError: the two are not releases or commits of one package in this order; pip or git does not know
                one, or cannot install it; the program fails with one; or the later one needs no more memory.
        """
        from opacus_memprof.analysis.diff import diff_profiles, exceeded_limits

        both_commits = all(_COMMIT.fullmatch(end) for end in (good, bad))
        known = self._commits(good, bad) if both_commits else self._releases(good, bad)
        first, last = known[0], known[-1]
        profiles = {each: self._profile(each) for each in (first, last)}

        def is_bad(each: Candidate) -> bool:
            profiles[each] = profiles.get(each) or self._profile(each)
            answer = bool(exceeded_limits(diff_profiles(profiles[first], profiles[each]), self.limit))
            tried(each.name, "bad" if answer else "good")
            return answer

        tried(first.name, "good")
        if not is_bad(last):
            raise MemprofError(
                f"{bad} needs no more memory than {good}, within {self.limit.text}: there is nothing to find"
            )
        left = list(known)
        while len(left) > 2:
            middle = (len(left) - 1) // 2
            try:
                left = left[: middle + 1] if is_bad(left[middle]) else left[middle:]
            except MemprofError as error:
                tried(left.pop(middle).name, f"left out, because {error}")
        before, after = left
        between = known.index(after) - known.index(before) - 1
        return BisectionResult(before.name, after.name, profiles[before], profiles[after], between)

    def _releases(self, good: str, bad: str) -> list[Candidate]:
        version: Any = require("packaging.version", "bisections").Version
        ends = [_RELEASE.fullmatch(end) for end in (good, bad)]
        if None in ends:
            raise MemprofError(
                f"{good} and {bad} are not two releases, or two commits: write PACKAGE==VERSION or "
                "'PACKAGE @ git+URL@COMMIT' twice, where the URL of a directory is file:///DIRECTORY"
            )
        (package, first), (other, last) = (end.groups() for end in ends if end is not None)
        if _canonical(package) != _canonical(other):
            raise MemprofError(f"{good} and {bad} are releases of different packages: give two of one")
        known = self._known_releases(package)
        try:
            start, end = version(first), version(last)
        except ValueError as error:
            raise MemprofError(f"{error}: give a version as pip knows it") from error
        for asked in (start, end):
            if asked not in known:
                raise MemprofError(f"pip finds no {package} {asked}, only {', '.join(map(str, sorted(known)))}")
        if not start < end:
            raise MemprofError(f"{good} is not before {bad}: give the earlier release as --good")
        steps = [each for each in sorted(known) if start <= each <= end]
        shown = [each for each in steps if each in (start, end) or not each.is_prerelease]
        return [Candidate(f"{package} {each}", f"{package}-{each}", f"{package}=={each}") for each in shown]

    def _known_releases(self, package: str) -> set[Any]:
        version: Any = require("packaging.version", "bisections").Version
        if self.wheelhouse is not None:
            names = [path.name.split("-") for path in self.wheelhouse.glob("*.whl")]
            return {version(parts[1]) for parts in names if _canonical(parts[0]) == _canonical(package)}
        printed = _run([sys.executable, "-m", "pip", "index", "versions", "--pre", package], f"pip knows no {package}")
        line = re.search(r"Available versions: (.*)", printed)
        return {version(each.strip()) for each in line[1].split(",")} if line else set()

    def _commits(self, good: str, bad: str) -> list[Candidate]:
        """Returns the commits from the good one to the bad one, both included. Follows only first parents of merges."""
        (package, url, first, subdirectory), (other, other_url, last, _) = (
            match.groups() for end in (good, bad) if (match := _COMMIT.fullmatch(end))
        )
        if (_canonical(package), url) != (_canonical(other), other_url):
            raise MemprofError(f"{good} and {bad} are commits of different packages: give two of one")
        if shutil.which("git") is None:
            raise MemprofError("comparing commits needs git, which is not installed: install git, or give releases")
        copy = self.directory / f"{re.sub(r'[^A-Za-z0-9]+', '-', url)}.git"
        git = ["git", "--git-dir", str(copy)]
        _run(["git", "init", "-q", "--bare", str(copy)], "git cannot make a copy")
        _run([*git, "fetch", "-q", "--tags", url, "+refs/heads/*:refs/heads/*"], f"git cannot read {url}")
        for end in (first, last):
            _run([*git, "rev-parse", "--verify", "--end-of-options", f"{end}^{{commit}}"], f"{url} has no commit {end}")
        _run([*git, "update-ref", "--no-deref", "HEAD", f"{last}^{{commit}}"], url)  # pip reads no copy without
        log = [*git, "log", "--format=%H %h %s"]
        after = _run([*log, "--reverse", "--first-parent", f"{first}..{last}"], url)
        if not after or _run([*log, "-1", f"{last}..{first}"], url):
            raise MemprofError(f"{bad} does not come after {good}: give the earlier commit as --good")
        rows = [line.split(" ", 2) for line in (_run([*log, "-1", first], url) + after).splitlines()]
        source = f"git+{copy.as_uri()}@"  # without the name, because pip 23 refuses it with file://
        return [
            Candidate(f"{package} {short} ({subject})", f"{package}-{commit}", f"{source}{commit}{subdirectory or ''}")
            for commit, short, subject in rows
        ]

    def _profile(self, candidate: Candidate) -> Profile:
        from opacus_memprof.analysis.profile import load_profile

        environment, profile = (self.directory / kind / candidate.directory for kind in ("environments", "profiles"))
        python = environment / "bin" / "python"
        if not (environment / "installed").exists():
            _run(
                [sys.executable, "-m", "venv", "--clear", "--without-pip", str(environment)], "cannot make environments"
            )
            (site,) = environment.glob("lib/python*/site-packages")
            standard = re.escape(sysconfig.get_path("stdlib")) + "(/lib-dynload)?"  # which pip would hide from builds
            here = [path for path in map(os.path.abspath, sys.path) if not re.fullmatch(standard, path)]
            (site / "this_environment.pth").write_text("\n".join(here) + "\n", encoding="utf-8")
            offline = [] if self.wheelhouse is None else ["--no-index", "--find-links", str(self.wheelhouse)]
            install = [str(python), "-m", "pip", "install", "-q", *offline]
            wanted, failed = candidate.requirement, f"pip cannot install {candidate.name}"
            if wanted.startswith("git+"):  # for which pip takes an installed package of the same version
                _run([*install, "--no-deps", "--force-reinstall", wanted], failed)
                wanted = candidate.name.split()[0]  # for what it requires
            _run([*install, wanted], failed)
            (environment / "installed").touch()
        run = ["run", "--virtual-gpu", self.gpu, "-o", str(profile), *self.program]
        _run([str(python), "-m", "opacus_memprof", *run], f"the program fails with {candidate.name}")
        return load_profile(profile)


def _run(command: list[str], otherwise: str) -> str:
    """Returns what a program prints. Raises MemprofError with its last line if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if ran.returncode:
        lines = ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"]
        errors = [line for line in lines if "rror" in line and "subprocess" not in line]  # pip's, which say nothing
        raise MemprofError(f"{otherwise} ({[*errors, lines[-1]][0].strip(' │')})")
    return ran.stdout


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def bisect(
    *,
    script: Annotated[str, typer.Argument(metavar="SCRIPT.py", show_default=False, help="The script.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", show_default=False, help="Arguments of the script.")
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
    environment that differs from this one by that release. Likewise for commits: 'PACKAGE @ git+URL@COMMIT'.
    """
    from opacus_memprof.analysis.diff import GrowthLimit, diff_profiles
    from opacus_memprof.reports.diff import print_diff

    if not Path(script).is_file():
        raise MemprofError(f"the script {script} {'is a directory' if Path(script).is_dir() else 'does not exist'}")
    if wheelhouse is not None and not wheelhouse.is_dir():
        raise MemprofError(f"--wheelhouse: there is no directory {wheelhouse}")
    find_gpu(gpu)
    search = Bisection((script, *(arguments or ())), gpu, GrowthLimit.parse(above), wheelhouse, output.absolute())
    console = Console(highlight=False)
    say = partial(console.print, markup=False, soft_wrap=True)
    found = search.find(good, bad, lambda name, verdict: say(f"{name}: {tr_sentence(verdict)}"))
    first = tr("{bad} is the first that needs more", bad=found.bad)
    if found.left_out:
        first += tr(", or one of the {count} left out before it is", count=found.left_out)
    say("\n" + tr("{first}; what changed since {good}:", first=first, good=found.good) + "\n")
    print_diff(diff_profiles(found.before, found.after), console)
