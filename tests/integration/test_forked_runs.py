# SPDX-License-Identifier: Apache-2.0
"""Planned runs that are forked from a process with torch: they must be what runs in new processes are."""

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from opacus_memprof.planning import fork_server
from opacus_memprof.planning.configuration import PlannedConfiguration, PlannedProgram
from opacus_memprof.planning.virtual_run import LOG, ForkedRuns, VirtualRun, run_environment, run_virtually

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = str(Path(__file__).parents[2])
GPU = "t4"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or torch.version.cuda is None, reason="needs a torch with CUDA for Linux"
    ),
]


@pytest.fixture(scope="module")
def forked() -> Iterator[ForkedRuns]:
    runs = ForkedRuns(run_environment(PlannedConfiguration(PlannedProgram(""), GPU), 1))
    yield runs
    runs.close()


def both(configuration: PlannedConfiguration, forked: ForkedRuns, folder: Path) -> tuple[VirtualRun, VirtualRun]:
    """The run in a new process, and the forked one."""
    new = run_virtually(configuration, folder / "new", 1)
    other = run_virtually(configuration, folder / "forked", 1, forked)
    assert forked.answers  # else both ran in new processes
    return new, other


def comparable(run: VirtualRun) -> dict[str, Any]:
    """All that the run says but its time and place."""
    return {name: value for name, value in asdict(run).items() if name not in ("seconds", "directory")}


def test_what_a_program_imports_of_the_profiler_is_not_imported_before_the_fork(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is beside torch where it is installed from a wheel, and refuses to record in the fork of what has used it."""
    monkeypatch.setattr(fork_server, "_INSTALLED", (str(Path(ROOT)) + os.sep,))
    imports = fork_server.ImportedModules(dict(os.environ), {})
    for name in ("opacus_memprof.recording.native", "tests.warm_python"):
        imports.find_spec(name, None)
        importlib.import_module(name)
    assert imports.modules() == {"tests.warm_python": str(Path(ROOT, "tests", "warm_python.py"))}


@pytest.mark.parametrize(
    ("script", "arguments", "memory"),
    [
        pytest.param("train_cuda.py", ["--batch", "64"], None, marks=pytest.mark.nightly),
        ("train_cuda.py", ["--width", "512", "--batch", "1024"], 2**30),
        pytest.param("train_to_plan.py", ["--batch-size", "3"], None, marks=pytest.mark.nightly),
        pytest.param("train_poisson.py", [], None, marks=pytest.mark.nightly),
    ],
    ids=["fits", "does not fit", "without Opacus", "drawn batches"],
)
def test_a_forked_run_is_the_same(
    script: str, arguments: list[str], memory: int | None, forked: ForkedRuns, tmp_path: Path
) -> None:
    changes = ({"kind": "drawn_batch", "value": 7},) if script == "train_poisson.py" else ()
    configuration = PlannedConfiguration(PlannedProgram(str(SCRIPTS / script), tuple(arguments)), GPU, memory, changes)
    new, other = both(configuration, forked, tmp_path)
    assert new.status == ("finished" if memory is None else "out_of_memory")
    assert new.requested
    assert comparable(other) == comparable(new)
    peaks, events = [], []
    for run in (new, other):
        profile = json.loads((run.profile / "profile.json").read_text())
        peaks.append({**profile["devices"]["cuda:0"]["peak"], "unix_ns": 0})
        events.append(profile["events"])
    assert peaks[0] == peaks[1]
    assert events[0] == events[1]


SEES = """
import atexit, importlib.util, os, sys, threading
print(sys.argv[1:], __name__, __file__, sys.path[0], os.getcwd(), threading.current_thread() is threading.main_thread())
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("torch", "opacus", "numpy", "scipy")))
print(importlib.util.find_spec("torch").origin, "torch" in sys.modules, sys.stdin.read(), sys.stdout.isatty())
atexit.register(print, "before torch", flush=True)
import numpy
print("torch" in sys.modules, numpy.__spec__.name, numpy.random.rand() != 0.5)
import torch.nn.functional as functional
import torch
from torch.utils.data import DataLoader
print(torch.__spec__.name, torch.__spec__.origin, functional is torch.nn.functional, "opacus" in sys.modules)
print(torch.rand(2).shape, torch.get_num_threads(), torch.cuda.is_initialized())
atexit.register(print, "after torch", flush=True)
import opacus
print(opacus.__spec__.name, isinstance(opacus.PrivacyEngine(), opacus.privacy_engine.PrivacyEngine))
print(torch.zeros(3, device="cuda").sum().item(), torch.cuda.get_device_name())
sys.exit(5)
"""


def test_the_program_sees_a_new_process(forked: ForkedRuns, tmp_path: Path) -> None:
    (tmp_path / "sees.py").write_text(SEES)
    runs = both(PlannedConfiguration(PlannedProgram(str(tmp_path / "sees.py"), ("--one", "2")), GPU), forked, tmp_path)
    logs = [(Path(run.directory) / LOG).read_text().replace(run.directory, "DIRECTORY") for run in runs]
    assert logs[0].splitlines()[0].startswith("['--one', '2'] __main__ ")
    assert logs[0].index("after torch") < logs[0].index("before torch")
    assert "0.0 Tesla T4" in logs[0]
    assert "Traceback" not in logs[0]
    assert logs[1] == logs[0]
    assert comparable(runs[1]) == comparable(runs[0])


IMPORTS_MORE = """
import os, sys
import torch
begin = os.times()
from transformers import GPT2Config, GPT2LMHeadModel
end = os.times()
open(sys.argv[1], "a").write(f"{end.user + end.system - begin.user - begin.system}\\n")
large = torch.nn.Linear(700, 800)
print(large.weight.double().sum().item(), large.bias.sum().item(), torch.empty(2**19).normal_(1, 3).std().item())
config = GPT2Config(vocab_size=99, n_embd=64, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
model = GPT2LMHeadModel(config).cuda()
print(torch.rand(1).item(), [str(parameter.sum().item()) for parameter in model.parameters()][:3])
model(torch.zeros(int(sys.argv[2]), 9, dtype=torch.int64, device="cuda")).logits.sum().backward()
torch.optim.AdamW(model.parameters()).step()
"""


def test_other_packages_are_imported_once(tmp_path: Path) -> None:
    """By the process from which runs are forked, after the first of them has named its imports."""
    pytest.importorskip("transformers")
    (tmp_path / "imports_more.py").write_text(IMPORTS_MORE)
    runs = ForkedRuns(run_environment(PlannedConfiguration(PlannedProgram(""), GPU), 1))
    file, found, logs = tmp_path / "seconds", [], []
    for server, batch in ((runs, "1"), (runs, "2"), (runs, "3"), (None, "3")):
        program = PlannedProgram(str(tmp_path / "imports_more.py"), (str(file), batch))
        run = run_virtually(PlannedConfiguration(program, GPU), tmp_path / str(len(found)), 1, server)
        assert (run.status, runs.answers) == ("finished", True)
        found.append(run)
        logs.append((Path(run.directory) / LOG).read_text().replace(run.directory, ""))
    runs.close()
    assert found[3].requested
    assert (comparable(found[2]), logs[2]) == (comparable(found[3]), logs[3])
    assert len({tuple(log.splitlines()[:2]) for log in logs}) == 1  # what the program printed
    first, *later = (float(line) for line in file.read_text().splitlines()[:3])
    assert max(later) < first / 3


IMPORTS_IN_FORKS = """
import os, sys
from opacus_memprof.planning.fork_server import ForkServer
server = ForkServer(["torch"])
for name, file in [line.split() for line in sys.stdin]:
    if os.fork() == 0:
        good = server.import_more({name: file})
        if good:
            assert name not in sys.modules
            assert __import__(name).__file__ == file
        os._exit(not good)
    print(name, os.WEXITSTATUS(os.wait()[1]), flush=True)
"""


def test_packages_whose_import_does_more_stay_with_the_runs(tmp_path: Path) -> None:
    sources = {
        "calm": "import torch, calm_too",
        "calm_too": "",
        "draws": "import random; random.random()",
        "draws_too": "import torch; torch.rand(1)",
        "starts_a_thread": "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
        "sets_a_variable": "import os; os.environ['TORCH_SET'] = '1'",
        "asks": "import torch; torch.cuda.is_available()",
        "counts": "import torch; torch.cuda.device_count()",
        "fails": "1 / 0",
    }
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    files = {name: str(tmp_path / f"{name}.py") for name in sources} | {"json": str(tmp_path / "json.py")}
    printed = subprocess.run(
        [sys.executable, "-c", IMPORTS_IN_FORKS],
        input="".join(f"{name} {file}\n" for name, file in files.items()),
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), ROOT]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    refused = {name: bool(int(code)) for name, code in (line.split() for line in printed.splitlines())}
    assert refused == {name: name not in ("calm", "calm_too") for name in files}


IMPORTS_AFTER_A_PATCH = """
import json, os, sys
from opacus_memprof.planning.fork_server import ForkServer
server = ForkServer(["torch"], learns=True)
for first, then in json.loads(sys.argv[1]):
    if os.fork() == 0:
        server.become([sys.executable], [0, 1, 2])
        import json, torch
        exec(compile(first, __file__, 'exec'))
        import pluggy
        exec(compile(then, __file__, 'exec'))
        import iniconfig
        print([name for name in server._imports.modules() if name in ("pluggy", "iniconfig")], flush=True)
        os._exit(0)
    os.wait()
"""
LEARNED_AFTER = {
    ("", ""): ["pluggy", "iniconfig"],
    ("torch.nn.functional.gelu = lambda x: x", ""): [],
    ("torch.nn.Linear = type('Mine', (torch.nn.Linear,), {})", ""): [],
    ("json.loads = json.dumps = len", ""): [],
    ("from unittest import mock; torch.rand = mock.Mock()", ""): [],
    ("", "class Mine: pass\npluggy.HookimplMarker = Mine"): ["pluggy"],
    ("torch.nn.Linear.reset_parameters = len; torch.extra = lambda: 0", ""): ["pluggy", "iniconfig"],
}


def test_what_is_imported_after_a_patch_stays_with_the_runs(tmp_path: Path) -> None:
    """An import takes what the program has put into other modules: that of the other process would not."""
    program = tmp_path / "patches.py"
    program.write_text(IMPORTS_AFTER_A_PATCH)
    environment = os.environ | {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, program, json.dumps(list(LEARNED_AFTER))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(learned) for learned in LEARNED_AFTER.values()]


def test_variables_that_a_program_sets_count(forked: ForkedRuns, tmp_path: Path) -> None:
    """They are read when torch is imported, so such programs are not forked; one that is starts over."""
    (tmp_path / "sets.py").write_text(
        "import os, sys\nos.environ['OMP_NUM_THREADS'] = '2'\nimport torch\n"
        "torch.zeros(torch.get_num_threads(), device='cuda')\nprint(torch.get_num_threads(), flush=True)\n"
    )
    run = run_virtually(
        PlannedConfiguration(PlannedProgram(str(tmp_path / "sets.py")), GPU), tmp_path / "run", 1, forked
    )
    assert forked.answers
    assert (Path(run.directory) / LOG).read_text().startswith("2\n")
    assert (run.status, run.requested) == ("finished", 2 * 4)


def test_runs_at_once_end_when_they_are_closed(tmp_path: Path) -> None:
    """Two runs side by side of one server; both are killed, with their processes."""
    runs = ForkedRuns(run_environment(PlannedConfiguration(PlannedProgram(""), GPU), 1))
    script = tmp_path / "waits.py"
    script.write_text(
        "import os, sys, time, torch\ntorch.zeros(9, device='cuda')\n"
        "open(sys.argv[1], 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    files = [tmp_path / name for name in ("a", "b")]

    def run(file: Path) -> VirtualRun:
        configuration = PlannedConfiguration(PlannedProgram(str(script), (str(file),)), GPU)
        return run_virtually(configuration, tmp_path / f"run {file.name}", 1, runs)

    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(run, file) for file in files]
        while not all(file.exists() and file.read_text() for file in files):
            assert not any(future.done() for future in futures)
            time.sleep(0.05)
        runs.close()
        assert [future.result().status for future in futures] == ["killed", "killed"]
    assert not any(Path("/proc", file.read_text()).exists() for file in files)


def test_a_run_that_is_killed_leaves_the_next_ones(forked: ForkedRuns, tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text("import os, torch\ntorch.zeros(9, device='cuda')\nos.kill(os.getpid(), 9)\n")
    dying = PlannedConfiguration(PlannedProgram(str(tmp_path / "dies.py")), GPU)
    assert run_virtually(dying, tmp_path / "run", 1, forked).status == "killed"
    configuration = PlannedConfiguration(PlannedProgram(str(SCRIPTS / "train_to_plan.py"), ("--batch-size", "3")), GPU)
    assert run_virtually(configuration, tmp_path / "next", 1, forked).status == "finished"


def test_without_a_process_to_fork_a_run_has_its_own(tmp_path: Path) -> None:
    runs = ForkedRuns(os.environ, ["no_such_package"])
    configuration = PlannedConfiguration(PlannedProgram(str(SCRIPTS / "train_to_plan.py"), ("--batch-size", "3")), GPU)
    assert runs.run("{}", tmp_path, tmp_path / "log") is None
    assert run_virtually(configuration, tmp_path / "run", 1, runs).status == "finished"
    runs.close()
    assert runs.run("{}", tmp_path, tmp_path / "log") == -9
