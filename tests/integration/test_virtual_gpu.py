# SPDX-License-Identifier: Apache-2.0
"""What torch asks of CUDA works on the virtual GPU, and takes the memory that torch's own rules say.

Each test is one process, since a virtual GPU must be there before torch is imported.
"""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from opacus_memprof.virtual_gpu.requirements import LIBRARIES
from tests.warm_python import ENVIRONMENT, interpreter

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (LIBRARIES / "libcuda.so.1").is_file(), reason="the virtual GPU was not built")

START = """
import ctypes, sys
from opacus_memprof.virtual_gpu import default_answers, start
gpus = start("h200", memory=24 << 30, count=2)
import torch
from torch import nn
MIB = 1 << 20
def outside():  # of what torch reserves: the context
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()
"""


def run(code: str, kind: str = "h200", **environment: str) -> subprocess.CompletedProcess[str]:
    """A program that starts with `START`, and that has ended well."""
    command = [*interpreter(), "-c", START.replace("h200", kind) + textwrap.dedent(code)]
    environment = ENVIRONMENT | environment
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


# Segments of torch's caching allocator (c10/core/AllocatorConfig.h: kSmallBuffer 2 MiB, kLargeBuffer 20 MiB, and from
# 10 MiB on multiples of 2 MiB), in MiB after: a tensor of 1.5 MiB, one of 100 MiB, one of 1000 bytes, freeing that of
# 100 MiB, one of 30 MiB, freeing what is left unused.
SEGMENTS = """
reserved = []
def note():
    reserved.append(torch.cuda.memory_reserved() // MIB)
    assert outside() == context, (reserved, outside(), context)
torch.zeros(1, device="cuda:1"); context = outside()
a = torch.empty(3 * MIB // 2, dtype=torch.uint8, device="cuda"); note()
b = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda"); note()
c = torch.empty(1000, dtype=torch.uint8, device="cuda"); note()
del b; note()
d = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda"); note()
torch.cuda.empty_cache(); note()
print(reserved)
try:
    torch.empty(25 << 30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    assert "24.00 GiB" in str(error), error
else:
    raise AssertionError("25 GiB are on a GPU of 24 GiB")
known = torch.arange(100.0).cuda()
assert torch.equal(known.cpu(), torch.arange(100.0))
model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(2):
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step(); optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("settings", "segments"),
    [
        ("", [20, 120, 122, 122, 122, 122]),
        ("max_split_size_mb:64", [20, 120, 122, 122, 152, 52]),  # that of 100 MiB is too large to be split
        ("roundup_power2_divisions:4", [20, 132, 134, 134, 134, 134]),  # 100 MiB become 112
        # One segment of pages of 20 MiB, of which the first two stay (1.5 and 30 MiB), and one of 2 MiB.
        ("expandable_segments:True", [20, 120, 122, 122, 122, 42]),
    ],
)
def test_segments_are_those_of_torchs_rules(settings: str, segments: list[int]) -> None:
    assert run(SEGMENTS, PYTORCH_CUDA_ALLOC_CONF=settings).stdout.splitlines()[0] == str(segments)


def test_cuda_malloc_async() -> None:
    run(
        """
        assert torch.cuda.get_allocator_backend() == "cudaMallocAsync"
        before = torch.cuda.memory_allocated()
        a = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_allocated() - before == 3 * MIB
        assert torch.cuda.memory_reserved() == 32 * MIB, "the driver takes whole chunks"
        context = outside()
        b = torch.empty(33 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_reserved() == 96 * MIB and outside() == context
        del b
        torch.cuda.synchronize(); torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 32 * MIB and outside() == context
        assert torch.cuda.max_memory_reserved() == 96 * MIB
        """,
        PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync",
    )


def test_streams_graphs_pools_and_devices() -> None:
    run("""
    # CUDA graphs: with a stream that joins the capture, and a second graph in the same pool.
    model, x = nn.Linear(64, 64).cuda(), torch.ones(8, 64, device="cuda")
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        model(x).sum().backward()
    torch.cuda.current_stream().wait_stream(warm)
    model.zero_grad(set_to_none=True)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        model(x).sum().backward()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            assert torch.cuda.is_current_stream_capturing()
            y = x * 2
        torch.cuda.current_stream().wait_stream(side)
    assert not torch.cuda.is_current_stream_capturing()
    graph.replay()
    second = torch.cuda.CUDAGraph()
    with torch.cuda.graph(second, pool=graph.pool()):
        z = y + 1
    second.replay()
    kept = torch.cuda.memory_reserved()
    del graph, second, y, z, model
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < kept, "a graph's memory goes with it"
    graphed = torch.cuda.make_graphed_callables(nn.Linear(64, 8).cuda(), (torch.ones(4, 64, device="cuda"),))
    graphed(torch.ones(4, 64, device="cuda")).sum().backward()

    # A pool takes segments of its own.
    before, pool = torch.cuda.memory_reserved(), torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        a = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() - before == 20 * MIB
    assert [segment["total_size"] for segment in pool.snapshot()] == [20 * MIB]

    # Two devices, each with its own books.
    first, other = torch.cuda.mem_get_info(0), torch.cuda.mem_get_info(1)
    b = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda:1")
    assert torch.cuda.mem_get_info(1)[0] == other[0] - 64 * MIB and torch.cuda.mem_get_info(0) == first
    assert torch.cuda.can_device_access_peer(0, 1)
    assert torch.equal(torch.arange(10, device="cuda:0").to("cuda:1").cpu(), torch.arange(10))
    with torch.cuda.device(1):
        assert torch.cuda.Stream().device.index == 1

    # A block that another stream uses is free again only when that stream is done with it.
    with torch.cuda.stream(side):
        c = torch.empty(5 * MIB, device="cuda")
    c.record_stream(torch.cuda.current_stream())
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(); end.record()
    assert begin.query() and begin.elapsed_time(end) == 1.0

    # The history and the snapshot, and a limit.
    torch.cuda.memory._record_memory_history()
    d = torch.empty(MIB, device="cuda")
    assert torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    torch.cuda.set_per_process_memory_fraction(0.1)
    try:
        torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        assert "2.40 GiB allowed" in str(error), error
    else:
        raise AssertionError("3 GiB are within a tenth of 24 GiB")
    """)


def test_host_memory_and_the_rest_of_torch() -> None:
    """No crash, and no size that was read where nothing had been written."""
    run("""
    from opacus_memprof.errors import MemprofError
    a = torch.randn(1000).pin_memory()
    assert a.is_pinned() and not torch.randn(10).is_pinned()
    assert torch.equal(a.to("cuda", non_blocking=True).cpu(), a)
    own = torch.randn(5000)
    assert torch.cuda.cudart().cudaHostRegister(own.data_ptr(), own.numel() * 4, 0) == 0
    assert own[2000:].is_pinned()
    torch.cuda.cudart().cudaHostUnregister(own.data_ptr())
    assert not own.is_pinned()
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    for (batch,) in torch.utils.data.DataLoader(data, batch_size=4, num_workers=1, pin_memory=True):
        assert batch.is_pinned() and torch.equal(batch.cuda(non_blocking=True).cpu(), batch)

    x = torch.randn(16, 16, device="cuda")
    for name in ("inv", "qr", "svd", "eigh", "cholesky", "eigvals", "lu", "slogdet"):
        getattr(torch.linalg, name)(torch.eye(16).cuda())
    torch.linalg.solve(torch.eye(16).cuda(), x); torch.linalg.lstsq(x, x)
    torch.linalg.eigh(torch.randn(4, 8, 8, device="cuda"))
    torch.fft.irfft(torch.fft.rfft(x)); torch.fft.fft2(x)
    torch.sparse.mm(torch.eye(16, device="cuda").to_sparse_coo(), x)
    rows, columns = torch.arange(17, dtype=torch.int32), torch.arange(16, dtype=torch.int32)
    torch.sparse_csr_tensor(rows.cuda(), columns.cuda(), torch.ones(16, device="cuda"), size=(16, 16)) @ x
    torch.special.bessel_j0(x); torch.special.zeta(x, x)  # compiled by NVRTC
    torch.multinomial(torch.ones(10, device="cuda"), 3); torch.randperm(1000, device="cuda")
    torch.cuda.memory_summary(); torch.cuda.get_device_properties(0); torch.cuda.list_gpu_processes()
    assert torch.cuda.memory_reserved() < 500 * MIB

    from torch.profiler import ProfilerActivity, profile
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], profile_memory=True) as profiler:
        (x @ x).sum()
    assert "aten::mm" in profiler.key_averages().table()

    try:
        x.untyped_storage()._share_cuda_()
    except MemprofError as error:
        assert "cannot be sent to another process" in str(error), error
    else:
        raise AssertionError("another process cannot have this memory")
    noise = [name for name in default_answers() if any(word in name for word in ("Destroy", "Set", "Register", "Gemm"))]
    assert not noise, noise
    """)


@pytest.mark.slow
def test_torch_compile_and_triton_kernels() -> None:
    run("""
    import os
    import triton
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).cuda()
    x = torch.ones(32, 64, device="cuda")
    compiled = torch.compile(model, mode="reduce-overhead")  # kernels that Triton compiles, in CUDA graphs
    for _ in range(4):
        compiled(x).sum().backward()
        model.zero_grad()
    parameters = sum(p.numel() for p in model.parameters())
    assert torch.cuda.memory_allocated() >= 4 * parameters
    assert "virtual_gpu" in os.environ["TORCHINDUCTOR_CACHE_DIR"], "a real GPU must not get what was measured here"
    assert "TRITON_LIBCUDA_PATH" not in os.environ
    from opacus_memprof.virtual_gpu.process import LIBRARIES
    assert triton.knobs.nvidia.libcuda_path == str(LIBRARIES)

    # Kernels of the program's own: what they write to, and the sum of that, each of torch's smallest size, 512 bytes.
    from opacus_memprof.clipping.kernels.gram import gram_squared_norms_cuda
    del compiled, model, x
    torch.cuda.synchronize()
    a, g = torch.randn(4, 128, 64, device="cuda"), torch.randn(4, 128, 32, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    assert gram_squared_norms_cuda(g, a).shape == (4,)
    assert torch.cuda.max_memory_allocated() - before == 4 * 512, "tiles, lost samples, norms, their sum"
    assert triton.testing.do_bench(lambda: None) == 1.0, "measuring ends, and finds every kernel as fast"
    """)


def test_errors_are_named_as_the_real_runtime_names_them() -> None:
    """The oracle is the runtime that torch's wheels bring, which knows its words without a GPU."""
    done = run("""
    from pathlib import Path
    import importlib.util
    folders = list(importlib.util.find_spec("nvidia").submodule_search_locations)
    found = [file for folder in folders for file in Path(folder).glob("*/lib/libcudart.so.*")]
    real = ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_LOCAL | 8)  # RTLD_DEEPBIND
    from opacus_memprof.virtual_gpu.process import LIBRARIES
    ours = ctypes.CDLL(str(LIBRARIES / "libcuda.so.1"))
    for library in (real, ours):
        library.cudaGetErrorName.restype = library.cudaGetErrorString.restype = ctypes.c_char_p
    assert real.cudaGetErrorString(2) == b"out of memory"
    for code in range(1100):
        for ask in ("cudaGetErrorName", "cudaGetErrorString"):
            assert getattr(ours, ask)(code) == getattr(real, ask)(code), code

    text = ctypes.c_char_p()
    assert ours.cuGetErrorName(900, ctypes.byref(text)) == 0
    assert text.value == b"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
    assert ours.cuGetErrorString(12345, ctypes.byref(text)) == 1 and text.value is None

    # An error is read once, and stays until then.
    device = ctypes.c_int()
    assert ours.cudaSetDevice(7) == 101
    assert ours.cudaGetDevice(ctypes.byref(device)) == 0
    assert ours.cudaPeekAtLastError() == 101 and ours.cudaGetLastError() == 101 and ours.cudaGetLastError() == 0

    # A library that links the runtime statically asks for this, and then says that CUDA is not supported.
    assert ours.cuGetExportTable(ctypes.byref(ctypes.c_void_p()), None) == 801

    # What is not here at all is an error with its name.
    function = ctypes.c_void_p()
    assert ours.cuGetProcAddress_v2(b"cuNoSuchThing", ctypes.byref(function), 13000, 0, None) == 500
    assert function.value is None
    for name in (b"cuMemAlloc", b"cuStreamIsCapturing", b"cuGraphInstantiate", b"cuGLInit"):
        found = ours.cuGetProcAddress_v2(name, ctypes.byref(function), 13000, 0, None) == 0
        assert found == bool(function.value) == (name != b"cuGLInit")  # graphics are not there, which needs no sentence
    """)
    assert done.stderr.count("opacus-memprof: the virtual GPU has no") == 2
    assert "has no cuNoSuchThing, which" in done.stderr
    assert "links CUDA's runtime statically" in done.stderr


def test_compiling_with_nvrtc_says_nothing(tmp_path: Path) -> None:
    """NVRTC asks for what the runtime's copies ask for, and does without."""
    code = "assert torch.special.bessel_j0(torch.zeros(3, device='cuda')).tolist() == [1.0, 1.0, 1.0]"
    done = run(code, PYTORCH_KERNEL_CACHE_PATH=str(tmp_path))
    assert list(tmp_path.iterdir())
    assert "opacus-memprof" not in done.stderr


def test_queries_that_libraries_make_are_answered() -> None:
    """Of NVML, as pynvml and nvitop ask it, and of the driver, as cuda-bindings does when it is imported."""
    done = run("""
    import importlib.util, os
    torch.ones(4, device="cuda")
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    class Memory(ctypes.Structure):
        sizes = "total reserved free used".split()
        _fields_ = [("version", ctypes.c_uint), *zip(sizes, [ctypes.c_ulonglong] * 4)]
    class Process(ctypes.Structure):
        _fields_ = [("id", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("instances", ctypes.c_uint * 2)]
    assert nvml.nvmlInit_v2() == 0
    device, memory, count, text = ctypes.c_void_p(), Memory(), ctypes.c_uint(), ctypes.create_string_buffer(96)
    assert nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0
    assert nvml.nvmlDeviceGetMemoryInfo_v2(device, ctypes.byref(memory)) == 0
    free, total = torch.cuda.mem_get_info()
    assert (memory.free, memory.total, memory.used) == (free, total, total - free)
    ask = nvml.nvmlDeviceGetComputeRunningProcesses_v3
    assert ask(device, ctypes.byref(count), None) == 7 and count.value == 1, "too small: it tells how many there are"
    process = Process()
    assert ask(device, ctypes.byref(count), ctypes.byref(process)) == 0
    assert (process.id, process.used) == (os.getpid(), total - free)
    other, others = ctypes.c_void_p(), ctypes.c_uint()
    nvml.nvmlDeviceGetHandleByIndex_v2(1, ctypes.byref(other))
    assert nvml.nvmlDeviceGetGraphicsRunningProcesses_v3(other, ctypes.byref(others), None) == 0 == others.value
    for name in ("nvmlDeviceGetTemperature", "nvmlDeviceGetClockInfo"):
        assert getattr(nvml, name)(device, 0, ctypes.byref(count)) == 0 == count.value
    assert nvml.nvmlDeviceGetPowerUsage(device, ctypes.byref(count)) == 0 == count.value
    assert nvml.nvmlDeviceGetFanSpeed(device, ctypes.byref(count)) == 3, "not supported"
    assert nvml.nvmlSystemGetDriverVersion(text, 96) == 0 and float(text.value.rpartition(b".")[0]) > 500
    if importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.bindings"):
        from cuda.bindings import driver
        assert [int(value) for value in driver.cuMemGetInfo()] == [0, free, total]
    """)
    assert "has no" not in done.stderr


@pytest.mark.parametrize(
    ("kind", "dtype", "fused"), [("t4", "bfloat16", False), ("t4", "float16", True), ("a100-40", "bfloat16", True)]
)
def test_attention_takes_the_kernel_that_the_kind_has(kind: str, dtype: str, fused: bool) -> None:
    """The kernels of an older GPU take no bfloat16: then the matrices of attention are formed."""
    run(
        f"""
        q = torch.empty(8, 12, 1024, 64, device="cuda", dtype=torch.{dtype}, requires_grad=True)
        before, matrix = torch.cuda.memory_allocated(), 8 * 12 * 1024**2 * 2
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
        assert (torch.cuda.max_memory_allocated() - before < matrix) == {fused}
        """,
        kind=kind,
    )


def test_without_a_start_there_is_no_gpu_and_no_crash() -> None:
    code = """
    import ctypes
    from opacus_memprof.virtual_gpu.requirements import LIBRARIES
    library = ctypes.CDLL(str(LIBRARIES / "libcuda.so.1"))
    count, address = ctypes.c_int(9), ctypes.c_void_p()
    assert library.cudaGetDeviceCount(ctypes.byref(count)) == 100 and count.value == 0
    assert library.cuInit(0) == 100
    for allocate in (library.cudaMalloc, library.cudaMallocManaged):
        assert allocate(ctypes.byref(address), ctypes.c_size_t(100)) == 100
    assert library.cudaMallocAsync(ctypes.byref(address), ctypes.c_size_t(100), None) == 100
    assert library.cudaSetDevice(0) == 101
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Of 2 virtual GPUs: what the program names, whether or not there are as many. As torch documents it, a number that
# occurs twice, or none, hides all.
@pytest.mark.parametrize(
    ("named", "seen"),
    [("1", 1), ("3", 1), ("6,7", 2), ("0,1,2,3", 2), ("1,-1", 1), ("", 0), ("-1", 0), ("none", 0), ("1,1", 0)],
)
def test_a_script_sees_as_many_devices_as_it_names(named: str, seen: int) -> None:
    code = f"""
    import os
    os.environ["CUDA_VISIBLE_DEVICES"] = {named!r}
    assert torch.cuda.is_available() == ({seen} > 0)
    for device in range({seen}):
        assert torch.ones(3, device=f"cuda:{{device}}").sum().item() == 3
        assert torch.cuda.get_device_properties(device).name == "NVIDIA H200"
        assert torch.cuda.mem_get_info(device)[1] == 24 << 30
    assert torch.cuda.device_count() == {seen}
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"  # too late, if the driver has been used
    assert ctypes.CDLL(None).cudaSetDevice({seen}) == (101 if {seen} else 0)
    """
    run(code)


FOREIGN = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
BY_UUID = """
import os
nvml = ctypes.CDLL("libnvidia-ml.so.1")
def handle(function, key):
    found = ctypes.c_void_p()
    assert getattr(nvml, function)(key, ctypes.byref(found)) == 0
    return found
def text(function, handle):
    found = ctypes.create_string_buffer(96)
    assert getattr(nvml, function)(handle, found, 96) == 0
    return found.value.decode()
def uuid(device):
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
"""


# NVML, CUDA and torch agree on what a device is called, as on a real machine.
@pytest.mark.parametrize(
    ("named", "seen"),
    [
        (FOREIGN, 1),
        (f"{FOREIGN},GPU-0a1b2c3d-0000-1111-2222-333344445555", 2),
        ("GPU-8932f937", 1),
        (f"MIG-{FOREIGN}/1/0", 1),
        (f"{FOREIGN},{FOREIGN}", 0),
    ],
)
def test_a_script_names_the_gpus_of_its_own_machine_by_uuid(named: str, seen: int) -> None:
    code = f"""
    os.environ["CUDA_VISIBLE_DEVICES"] = {named!r}
    assert torch.cuda.device_count() == {seen}
    for device, name in enumerate({named!r}.split(",")[:{seen}]):
        assert torch.ones(3, device=f"cuda:{{device}}").sum().item() == 3
        if name.startswith("GPU-"):
            assert uuid(device).startswith(name)
            found = handle("nvmlDeviceGetHandleByUUID", uuid(device).encode())
            assert text("nvmlDeviceGetName", found) == "NVIDIA H200"
    """
    run(BY_UUID + textwrap.dedent(code))


def test_a_script_chooses_a_gpu_by_what_nvml_calls_it() -> None:
    code = """
    handles = [handle("nvmlDeviceGetHandleByIndex_v2", each) for each in range(2)]
    names = [text("nvmlDeviceGetUUID", each) for each in handles]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(reversed(names))
    assert torch.cuda.device_count() == 2
    assert [uuid(0), uuid(1)] == names[::-1]
    kept = torch.empty(1 << 30, dtype=torch.uint8, device="cuda:0")  # NVML's second one
    used = []
    for each in names:
        memory = (ctypes.c_ulonglong * 3)()  # total, free, used
        assert nvml.nvmlDeviceGetMemoryInfo(handle("nvmlDeviceGetHandleByUUID", each.encode()), memory) == 0
        used.append(memory[2])
    assert used[1] - used[0] >= 1 << 30
    """
    run(BY_UUID + textwrap.dedent(code))


@pytest.mark.parametrize("hidden", ["", "NoDevFiles", "1"])
def test_what_this_machine_s_shell_hides_is_not_the_virtual_gpu(hidden: str) -> None:
    run("assert torch.cuda.device_count() == 2", CUDA_VISIBLE_DEVICES=hidden)


FORKED = """
import os
runtime, nvml = ctypes.CDLL(None), ctypes.CDLL("libnvidia-ml.so.1")
def answers():
    count, device = ctypes.c_int(), ctypes.c_int()
    assert nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 and count.value == 2
    results = [runtime.cudaGetDeviceCount(ctypes.byref(count)), runtime.cudaGetDevice(ctypes.byref(device))]
    results += [runtime.cudaSetDevice(1), runtime.cudaDeviceSynchronize(), runtime.cuInit(0)]
    results += [runtime.cudaPeekAtLastError()]
    results.append(runtime.cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(512)))
    return results
def of_child(function):
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            text = str(function())
        except RuntimeError as error:
            text = str(error)
        os.write(write, text.encode())
        os._exit(0)
    os.wait()
    return os.read(read, 4096).decode()
"""


def test_a_child_forked_before_the_driver_was_used_has_cuda() -> None:
    # CUDA Driver API: a context cannot be used in a forked child, and 3 is CUDA_ERROR_NOT_INITIALIZED.
    run(
        FORKED
        + """
assert of_child(lambda: torch.ones(3, device="cuda:1").sum().item()) == "3.0"
assert of_child(answers) == str([0] * 7)  # NVML did not use the driver
assert answers() == [0] * 7
assert of_child(answers) == str([3] * 7)
assert of_child(lambda: of_child(answers)) == str([3] * 7)
assert "CUDA driver initialization failed" in of_child(lambda: torch.ones(3, device="cuda"))
there = torch.ones(3, device="cuda")
assert "initialization error" in of_child(lambda: there + 1)
assert "Cannot re-initialize CUDA in forked subprocess" in of_child(lambda: torch.ones(3, device="cuda"))
assert (there + 1).tolist() == [2.0] * 3
"""
    )
