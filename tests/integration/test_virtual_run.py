# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof run --virtual-gpu` on a machine that may have no GPU: the profile, its mark, and how programs end."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from opacus_memprof.virtual_gpu.process import LIBRARIES
from tests.oracle.formulas import Linear
from tests.warm_python import ENVIRONMENT, interpreter

SCRIPTS = Path(__file__).parent / "scripts"
TRAIN = SCRIPTS / "train_cuda.py"
NAME = "virtual NVIDIA H200"
RUN = ("-m", "opacus_memprof", "run", "--virtual-gpu", "h200")

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or torch.version.cuda is None, reason="needs a torch with CUDA for Linux"
)

Completed = subprocess.CompletedProcess[str]


def python(*arguments: str | Path, **environment: str) -> Completed:
    return _start([*interpreter(), *map(str, arguments)], environment)


def new_python(*arguments: str | Path, **environment: str) -> Completed:
    """The same where it matters when the virtual GPU's libraries are loaded."""
    return _start([sys.executable, *map(str, arguments)], environment)


def _start(command: list[str], environment: dict[str, str]) -> Completed:
    environment = ENVIRONMENT | {"COLUMNS": "400"} | environment  # no sentence is broken in two
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)


def run(*arguments: str | Path, **environment: str) -> Completed:
    return python(*RUN, *arguments, **environment)


def of_script(path: Path, text: str, *options: str, **environment: str) -> Completed:
    """Runs a program that is written here."""
    (path / "program.py").write_text(text)
    return run(*options, "-o", path / "out", path / "program.py", **environment)


def profile_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "profile.json").read_text())  # type: ignore[no-any-return]


@cache
def report(directory: Path, *options: str) -> str:
    completed = python("-m", "opacus_memprof", "report", directory, *options)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Completed]:
    out = tmp_path_factory.mktemp("virtual") / "out"
    return out, new_python(*RUN, "-o", out, "--virtual-gpus", "2", "--virtual-memory", "64GiB", TRAIN, "--workers", "1")


def test_a_training_leaves_the_profile_of_a_real_run(trained: tuple[Path, Completed]) -> None:
    out, completed = trained
    assert completed.returncode == 0, completed.stderr
    assert "terminate called" not in completed.stderr
    counted = json.loads(completed.stdout.partition("\n")[0])
    assert counted["devices"] == [["NVIDIA H200", 64 << 30]] * 2
    profile = profile_of(out)
    assert (profile["status"], profile["exit_code"]) == ("finished", 0)
    device = profile["devices"]["cuda:0"]
    peak, clip = device["peak"], device["phases"]["clip"]["categories"]
    assert sum(peak["categories"].values()) == peak["requested_bytes"] == counted["requested"]
    assert peak["reserved_bytes"] == device["reserved_peak"]["bytes"] == counted["reserved"]
    assert [snapshot["remainder"] for snapshot in device["snapshots"]] == [0]
    layers = [Linear("float32", 8, 16, 32), Linear("float32", 8, 32, 32)]
    weights = 4 * sum(parameter.numel for layer in layers for parameter in layer.parameters)
    assert clip["model_parameters"] == clip["gradients"] == clip["optimizer_states"] == weights
    assert clip["summed_gradients"] == weights
    assert clip["per_sample_gradients"] == 8 * weights
    assert device["phases"]["backward"]["categories"]["inputs"] == 8 * 16 * 4  # the loss is done with the labels


def test_every_report_of_it_has_the_mark(trained: tuple[Path, Completed]) -> None:
    out, completed = trained
    gpu = {"gpu": "h200", "name": "NVIDIA H200", "memory_bytes": 64 << 30, "devices": 2}
    assert json.loads((out / "meta.json").read_text())["virtual"] == gpu
    profile = profile_of(out)
    assert profile["virtual"].items() >= gpu.items()
    # What has no implementation, and must have been called: the modules of kernels, which only book their names.
    assert all(isinstance(calls, int) and calls > 0 for calls in profile["virtual"]["default_answers"].values())
    assert f"on a {NAME} (64.00 GiB): " in completed.stdout
    assert f"on a {NAME} (64.00 GiB): " in report(out, "--html", "--json", "--csv")
    assert f"on a {NAME} (64.00 GiB): " in (out / "memprof.html").read_text()
    assert json.loads((out / "memprof.json").read_text())["virtual"] == profile["virtual"]
    assert (out / "memprof.csv").read_text().partition("\n")[0].rstrip().endswith(",virtual_gpu")
    (out / "profile.json").rename(out / "kept.json")  # as of a process that was killed
    try:
        assert f"on a {NAME} (64.00 GiB): " in python("-m", "opacus_memprof", "report", out).stdout
    finally:
        (out / "kept.json").rename(out / "profile.json")


READS = """
import torch
small = torch.arange(10).cuda()
assert small.sum().item() == 45
large = torch.ones(1000, 1000, device="cuda") @ torch.ones(1000, 1000, device="cuda")
for _ in range(3):
    if large.sum().item() > 0:
        raise SystemExit("it was computed")
rows = (large > 0).nonzero()
"""


def test_what_was_not_known_is_named_with_its_line(tmp_path: Path) -> None:
    completed = of_script(tmp_path, READS)
    assert completed.returncode == 0, completed.stderr
    profile, program = profile_of(tmp_path / "out"), tmp_path / "program.py"
    reads = [(use["line"], use["count"]) for use in profile["virtual"]["unknown_reads"]]
    assert reads == [(f"{program}:7", 3)]
    assert [use["line"] for use in profile["virtual"]["assumed_shapes"]] == [f"{program}:9"]
    warned = [warning for warning in profile["warnings"] if str(program) in warning]
    assert len(warned) == 2
    assert f"item at {program}:7, 3 times, read values that the virtual GPU does not compute" in warned[0]
    assert f"nonzero at {program}:9 took its shape or its indices from values" in warned[1]
    for warning in warned:
        assert warning in completed.stdout


RESERVES = """
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def hold(mib):
    return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")

def fragments(*gradients):
    if step == 1:
        hold(100)
        kept = hold(60), hold(45)  # the second does not fit into the 40 MiB that remain of the 100

def whole(*inputs):
    if step == 2:
        hold(130)

model = nn.Sequential(nn.Linear(16, 8)).cuda()
model[0].register_full_backward_hook(fragments)
model[0].register_forward_hook(whole)
data = TensorDataset(torch.randn(32, 16), torch.randint(8, (32,)))
model, optimizer, loader = PrivacyEngine().make_private(
    module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    data_loader=DataLoader(data, batch_size=8), noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False,
)
counted = 0
for step, (features, labels) in enumerate(loader):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(features.cuda()), labels.cuda()).backward()
    optimizer.step()
    counted = max(counted, torch.cuda.memory_stats()["reserved_bytes.all.peak"])
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
print(counted)
"""


def test_the_largest_reserved_memory_is_of_the_whole_run(tmp_path: Path) -> None:
    """The step with the highest requested memory reserves less than an earlier one, whose fragments it lacks."""
    completed = of_script(tmp_path, RESERVES)
    assert completed.returncode == 0, completed.stderr
    counted = int(completed.stdout.partition("\n")[0])
    device = profile_of(tmp_path / "out")["devices"]["cuda:0"]
    assert (device["peak"]["phase"], device["peak"]["step"]) == ("forward", 2)
    assert device["reserved_peak"] == {"bytes": counted, "step": 1, "phase": "backward"}
    assert device["peak"]["reserved_bytes"] < counted - (8 << 20)
    shown = f"LARGEST RESERVED {counted / 2**20:.2f} MiB in backward of step 1"
    assert shown in completed.stdout
    assert shown in report(tmp_path / "out")
    (tmp_path / "out" / "profile.json").unlink()  # as of a process that was killed
    assert shown in python("-m", "opacus_memprof", "report", tmp_path / "out").stdout


SHOWS = """
import torch
model = torch.nn.Linear(1500, 1500).cuda()
optimizer = torch.optim.Adam(model.parameters())
losses = []
for _ in range(2):
    outputs = model(torch.randn(1500, 1500, device="cuda"))
    loss = torch.nn.functional.cross_entropy(outputs, torch.randint(0, 1500, (1500,), device="cuda"))
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    print(f"{loss.item():.3f} {(outputs.argmax(1) == 3).float().mean().item():.2f}", sum(losses))
"""


def test_a_loss_that_is_only_shown_is_no_warning(tmp_path: Path) -> None:
    completed = of_script(tmp_path, SHOWS)
    assert completed.returncode == 0, completed.stderr
    profile = profile_of(tmp_path / "out")
    assert [use["count"] for use in profile["virtual"]["unknown_reads"]] == [2, 4]
    assert profile["warnings"] == []


IN_A_MODE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from opacus_memprof import PrivacyEngine

def main():  # after it the model is gone, as in most programs
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 8)).cuda()
    data = TensorDataset(torch.randn(256, 256), torch.randint(8, (256,)))
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.Adam(model.parameters()), data_loader=DataLoader(data, batch_size=64),
        noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False, grad_sample_mode=MODE,
        check="first" if MODE == "flash_clip" else None,
    )
    for features, labels in loader:
        nn.functional.cross_entropy(model(features.cuda()), labels.cuda()).backward()
        optimizer.step()
        optimizer.zero_grad(MODE == "flash_clip")

main()
"""


def test_what_could_be_is_what_a_run_with_it_takes(tmp_path: Path) -> None:
    devices = {}
    for mode in ("hooks", "flash_clip"):
        (tmp_path / mode).mkdir()
        completed = of_script(tmp_path / mode, f"MODE = {mode!r}{IN_A_MODE}")
        assert completed.returncode == 0, completed.stderr
        profile = profile_of(tmp_path / mode / "out")
        devices[mode] = profile["devices"]["cuda:0"]
        assert profile["virtual"]["proofs_left_out"] == (mode == "flash_clip")
        assert not [each for each in profile["warnings"] if "samples by samples" in each]
    predicted = {each["title"]: each["predicted_peak_bytes"] for each in devices["hooks"]["improvements"]}
    actual = devices["flash_clip"]["peak"]["requested_bytes"]
    assert actual < devices["hooks"]["peak"]["requested_bytes"] / 2
    assert 0.97 * actual <= predicted['grad_sample_mode="flash_clip"'] <= 1.1 * actual
    assert devices["flash_clip"]["improvements"] == []


COMPARES_SAMPLES = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from opacus_memprof import PrivacyEngine

model = nn.Linear(2048, 1000).cuda()
model, optimizer, loader = PrivacyEngine().make_private(
    module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0,
    data_loader=DataLoader(TensorDataset(torch.randn(64, 2048)), batch_size=64), poisson_sampling=False,
    grad_sample_mode=MODE, check="always",
)
for (x,) in loader:
    z = nn.functional.normalize(model(x.cuda()))
    loss = nn.functional.cross_entropy(z @ z.T, torch.arange(64).cuda())
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("mode", ["flash_clip", "hooks"])
def test_nothing_is_certified_of_values_that_are_not_computed(mode: str, tmp_path: Path) -> None:
    completed = of_script(tmp_path, f"MODE = {mode!r}{COMPARES_SAMPLES}")
    assert completed.returncode == 0, completed.stderr
    (model,) = json.loads((tmp_path / "out" / "privacy_check.json").read_text())["models"]
    assert (model["device"], model["check"], model["steps"]) == ("virtual NVIDIA H200", "off", 1)
    assert not model["checked_steps"]
    assert not model["in_every_step"]
    assert not any(situation["checks"] for situation in model["situations"])
    printed = " ".join(completed.stdout.split())
    assert "nothing was proved, because a virtual GPU does not compute large tensors" in printed
    assert "nothing refused" not in printed
    expected = 1 if mode == "flash_clip" else 0  # what flash_clip would refuse on a GPU
    assert len([each for each in profile_of(tmp_path / "out")["warnings"] if "samples by samples" in each]) == expected


CONV1D = """
import torch
from torch import nn
from opacus_memprof.clipping.layers import layer_for

class Conv1D(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(768, 2304)), nn.Parameter(torch.zeros(2304))
    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, 768), self.weight).view(*x.shape[:-1], 2304)

print(type(layer_for("layer", Conv1D().cuda(), ["weight", "bias"])).__name__)
"""


def test_flash_clip_recognizes_layers_whose_weights_are_not_computed(tmp_path: Path) -> None:
    """Of 7 MiB each: as Conv1D of transformers' GPT-2, which would be planned with per-sample gradients otherwise."""
    completed = of_script(tmp_path, CONV1D)
    assert completed.returncode == 0, completed.stderr
    assert "TransposedLinearLayer" in completed.stdout.splitlines()


def test_a_gpu_that_this_torch_has_no_kernels_for(tmp_path: Path) -> None:
    """A V100 and CUDA 13: what asks for kernels by architecture runs, and the profile says that it would not."""
    listed = torch.cuda.get_arch_list() or (torch._C._cuda_getArchFlags() or "").split()
    text = "import torch; print(torch.ones(3000, 1000, device='cuda').gt(0).nonzero().shape)"
    completed = of_script(tmp_path, text, "--virtual-gpu", "v100")
    assert completed.stdout.startswith("torch.Size([3000000, 2])\n"), completed.stderr
    warned = [warning for warning in profile_of(tmp_path / "out")["warnings"] if "(compute capability 7.0)" in warning]
    assert len(warned) == ("sm_70" not in listed)


def test_out_of_memory(tmp_path: Path) -> None:
    """512 samples' gradients of a layer of 1024 x 1024: 2 GiB, which 1 GiB does not have."""
    completed = run("-o", tmp_path / "out", "--virtual-memory", "1GiB", TRAIN, "--width", "1024", "--batch", "512")
    assert completed.returncode == 1
    assert (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total " in completed.stderr
    )
    profile = profile_of(tmp_path / "out")
    assert profile["status"] == "out_of_memory"
    (failure,) = profile["devices"]["cuda:0"]["out_of_memory"]
    assert failure["requested_bytes"] == 4 * 512 * 1024 * 1024
    found = json.loads((tmp_path / "out" / "oom_report.json").read_text())
    assert found["request"]["bytes"] == 4 * 512 * 1024 * 1024
    assert found["room"]["device_bytes"] == 1 << 30
    assert found["suggestions"]
    assert found["virtual"]["gpu"] == "h200"
    for name in ("oom_report.txt", "oom_report.html"):
        assert f"on a {NAME} (1.00 GiB): " in (tmp_path / "out" / name).read_text()
    times = 2 if sys.version_info >= (3, 11) else 1  # in the report and, where Python prints them, the exception's note
    assert completed.stderr.count(f"on a {NAME} (1.00 GiB): ") == times


@pytest.mark.parametrize(("end", "code"), [("raise", 1), ("exit_3", 3)])
def test_programs_fail_as_they_would(tmp_path: Path, end: str, code: int) -> None:
    completed = new_python(*RUN, "-o", tmp_path / "out", TRAIN, "--end", end, "--workers", "2")
    assert completed.returncode == code
    assert ("ValueError: no more data" in completed.stderr) == (end == "raise")
    assert "terminate called" not in completed.stderr
    assert profile_of(tmp_path / "out")["status"] == "failed"


CHILDREN = """
import json, multiprocessing, os, subprocess, sys
import torch
from torch.utils.data import DataLoader, Dataset

def seen(_=None):
    return [torch.cuda.device_count(), torch.cuda.get_device_properties(0).total_memory, os.getpid()]

class Seen(Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return torch.tensor(seen())

def another_program():
    text = "import os, json; print(json.dumps([dict(os.environ), open('/proc/self/maps').read()]))"
    environment, maps = json.loads(subprocess.run([sys.executable, "-c", text], capture_output=True).stdout)
    return {"changed": sorted(set(environment.items()) ^ set(os.environ.items())), "libraries": "virtual_gpu" in maps}

if __name__ == "__main__":
    told = {"program": another_program()}
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            told[method] = pool.map(seen, [0])[0]
    loader = DataLoader(Seen(), batch_size=None, num_workers=1, multiprocessing_context="spawn")
    told["loader"] = [item.tolist() for item in loader][0]
    told["self"] = seen()  # after the forks, before which CUDA must not be initialised
    print(json.dumps(told))
"""


def test_children_have_the_gpus_and_other_programs_have_none(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(CHILDREN)
    options = ("--virtual-gpus", "3", "--virtual-memory", "2GiB", "-o", tmp_path / "out")
    completed = new_python(*RUN, *options, tmp_path / "program.py")
    assert completed.returncode == 0, completed.stderr
    facts = json.loads(completed.stdout.partition("\n")[0])
    assert facts["program"] == {"changed": [], "libraries": False}
    processes = [facts.pop(which) for which in ("self", "fork", "spawn", "forkserver", "loader")]
    assert [seen[:2] for seen in processes] == [[3, 2 << 30]] * 5
    assert len({seen[2] for seen in processes}) == 5


def test_a_launcher_s_processes_take_a_gpu_each(tmp_path: Path) -> None:
    text = "import torch; print(torch.cuda.device_count(), torch.ones(3, device='cuda:3').device)"
    completed = of_script(tmp_path, text, LOCAL_WORLD_SIZE="4")
    assert completed.stdout.startswith("4 cuda:3\n"), completed.stderr


NESTED = """
from opacus_memprof import MemprofError, cli, virtual_gpu
import sys
try:
    virtual_gpu.start("h200")
except MemprofError as error:
    print(error)
sys.argv = ["opacus-memprof", "run", "--virtual-gpu", "h200", "-o", sys.argv[0] + ".out", sys.argv[0]]
cli.main()
"""


def test_one_inside_another(tmp_path: Path) -> None:
    completed = of_script(tmp_path, NESTED)
    assert completed.returncode == 2
    sentence = "this process has virtual GPUs already (1 of h200), and one cannot run inside another"
    assert sentence in completed.stdout
    assert f"opacus-memprof: {sentence}" in completed.stderr
    assert "Traceback" not in completed.stderr


def test_a_program_that_starts_one_itself(tmp_path: Path) -> None:
    completed = of_script(tmp_path, "from opacus_memprof import virtual_gpu; virtual_gpu.start('h200')")
    assert completed.returncode == 2
    assert completed.stderr.startswith("opacus-memprof: this process has virtual GPUs already (1 of h200), and one ")
    assert completed.stderr.count("\n") == 1


def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    completed = python("-m", "opacus_memprof", "run", "--virtual-gpu", "h2000", "-o", tmp_path / "out", TRAIN)
    assert completed.returncode == 2
    assert completed.stderr.startswith('opacus-memprof: there is no virtual GPU "h2000": use one of ')
    assert completed.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


LOADED = """
import ctypes
libraries = ctypes.CDLL({cuda!r}, ctypes.RTLD_GLOBAL), ctypes.CDLL({nvml!r}, ctypes.RTLD_GLOBAL)
count = ctypes.c_int(7)
print(libraries[0].cudaGetDeviceCount(ctypes.byref(count)), count.value)
print(libraries[0].cuInit(0))
print(libraries[1].nvmlDeviceGetCount_v2(ctypes.byref(count)), count.value)
import torch
print(torch.cuda.is_available(), torch.cuda.device_count())
try:
    torch.ones(1, device="cuda")
except RuntimeError as error:
    print(type(error).__name__, "No CUDA GPUs are available" in str(error) or "no CUDA-capable device" in str(error))
"""
NO_DEVICE = 100  # cudaErrorNoDevice, CUDA_ERROR_NO_DEVICE


@pytest.mark.parametrize("preloaded", [False, True])
def test_libraries_that_nobody_started_show_no_device(preloaded: bool) -> None:
    """A training that gets them by accident must not seem to train."""
    cuda, nvml = str(LIBRARIES / "libcuda.so.1"), str(LIBRARIES / "libnvidia-ml.so.1")
    environment = {"LD_PRELOAD": cuda} if preloaded else {}
    completed = new_python("-c", LOADED.format(cuda=cuda, nvml=nvml), **environment)
    lines = completed.stdout.splitlines()
    assert lines == [f"{NO_DEVICE} 0", str(NO_DEVICE), "0 0", "False 0", "RuntimeError True"], completed.stderr
