# SPDX-License-Identifier: Apache-2.0
"""Runs a configuration in a new process, so that no run affects the memory of another. This process needs no torch."""

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments.configuration import Configuration
from opacus_memprof.experiments.files import PROGRESS, merge_results, read_result, write_json
from opacus_memprof.jobs.pool import Processes
from opacus_memprof.profiles.directory import RANKS, ProfileDirectory, rank_directories, refuse_foreign_files
from opacus_memprof.profiles.experiment_result import ExperimentResult

CONFIGURATION = "configuration.json"
RESULT = "result.json"
LOG = "log.txt"
PROFILE_DIRECTORY = "profile"


def run(
    configuration: Configuration,
    directory: str | os.PathLike[str],
    *,
    token: str | None = None,
    gpu: int | None = None,
    on_line: Callable[[str], object] = lambda line: None,
    processes: Processes | None = None,
) -> ExperimentResult:
    """Trains in a new process and returns the result, which is also in `directory`/result.json.

    A training that fails has a result, too: `status` is "finished", "out_of_memory", "failed" or "killed", and `error`
    is a sentence. docs/experiments.md describes the keys.

    Args:
        configuration: the configuration.
        directory: a directory for this run only: configuration.json, result.json, log.txt (the output of the process)
            and profile/. Files of an earlier run are replaced.
        token: token of the Hugging Face hub (default: HF_TOKEN). It reaches the process through its environment only,
            and is not written to any file.
        gpu: the only GPU that the process sees, as its number in this process; None: all.
        on_line: called with each line on the run's progress; all other output of the process is in the log.
        processes: starts the process, so that another thread can kill it.

    Raises:
        MemprofError: the directory cannot be written.
    """
    path = Path(directory).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        _clear_profile(path / PROFILE_DIRECTORY)
        for earlier in path.glob(f"{Path(RESULT).stem}*.json"):
            earlier.unlink()
        write_json(path / CONFIGURATION, configuration.to_json())
        command = [
            sys.executable,
            *_launcher_arguments(configuration.nproc),
            "-m",
            "opacus_memprof.experiments",
            str(path),
        ]
        code, last_line = _run_child(command, path, _environment(token, gpu), token, on_line, processes or Processes())
    except OSError as error:
        raise MemprofError(f"cannot write the experiment to {path} ({error.strerror}): choose another place") from error
    if configuration.nproc > 1:
        merge_results(path, RESULT, path / PROFILE_DIRECTORY)
    if (path / RESULT).exists():
        return read_result(path / RESULT)
    from opacus_memprof.experiments.result import result_from_events  # loads torch

    result = result_from_events(configuration, path / PROFILE_DIRECTORY, code, last_line)
    write_json(path / RESULT, result)
    return result


def run_to_file(output: str | os.PathLike[str], configuration: Configuration, **options: Any) -> ExperimentResult:
    """Does the same as `run`, with the result in the file `output` (NAME.json).

    Other files go to the directory NAME.run next to it.

    Args:
        output: the file of the result.
        configuration: the configuration.
        options: the other arguments of `run`.

    Raises:
        MemprofError: no JSON file can be written there, or the training was refused. The message has the reason. A file
            that was there before stays.
    """
    path = Path(output).absolute()
    if path.suffix != ".json" or path.is_dir():
        raise MemprofError(f"{output} is not a file name for a result: give one that ends in .json")
    directory = path.with_suffix(".run")
    result = run(configuration, directory, **options)
    if result.refused:
        raise MemprofError(str(result.error))
    move_result(result, directory, path)
    return result


def move_result(result: ExperimentResult, directory: Path, output: Path) -> None:
    """Moves the result of `run` from `directory` to the file `output` next to it, with the paths inside it."""
    if result.profile:
        result.profile = f"{directory.name}/{result.profile}"
    if result.oom_report:
        result.oom_report = f"{directory.name}/{result.oom_report}"
    write_json(output, result)
    (directory / RESULT).unlink()


def _clear_profile(path: Path) -> None:
    """Removes an earlier profile, which would be mistaken for this run's.

    Raises MemprofError for other files, before anything is removed.
    """
    ranks = list(rank_directories(path).values())
    for folder in (path, *ranks):
        refuse_foreign_files(folder)
    with contextlib.ExitStack() as releases:
        earlier = []
        for folder in ranks or [path]:
            earlier.append(ProfileDirectory(folder))
            releases.callback(earlier[-1].release)
        for claimed in earlier:
            claimed.clear()
    for folder in ranks:
        with contextlib.suppress(OSError):  # its reports stay
            folder.rmdir()
    (path / RANKS).unlink(missing_ok=True)


def _environment(token: str | None, gpu: int | None) -> dict[str, str]:
    environment = dict(os.environ)
    if token:
        environment["HF_TOKEN"] = token
    if gpu is not None:
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        if visible and gpu >= len(visible):
            raise MemprofError(f"there is no GPU {gpu}: CUDA_VISIBLE_DEVICES leaves {len(visible)}")
        environment["CUDA_VISIBLE_DEVICES"] = visible[gpu] if visible else str(gpu)
    return environment


def _launcher_arguments(nproc: int) -> list[str]:
    """Returns the arguments of Python that start `nproc` processes."""
    if nproc == 1:
        return []
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]


def _run_child(
    command: list[str],
    path: Path,
    environment: Mapping[str, str],
    token: str | None,
    on_line: Callable[[str], object],
    processes: Processes,
) -> tuple[int, str]:
    """Runs a command. Returns its exit code (negative: the signal that killed it) and the last line of its output."""
    secret = token or environment.get("HF_TOKEN")
    last_line = ""
    with open(path / LOG, "w", encoding="utf-8") as log, processes.lines(command, environment) as child:
        assert child.stdout is not None
        for line in child.stdout:
            line = line.rstrip("\n")
            if secret:
                line = line.replace(secret, "***")
            log.write(line + "\n")
            log.flush()
            message = line.removeprefix(PROGRESS)
            if message and not message.startswith(" "):  # indented lines are details of the previous one
                last_line = message
            if line.startswith(PROGRESS):
                on_line(message)
        return child.wait(), last_line
