# SPDX-License-Identifier: Apache-2.0
"""What cuDNN and cuBLAS take of torch's memory: runs operations one by one and writes what each allocates inside.

The same program runs on a real GPU and on a virtual one, so that the two files can be compared line by line:

    python benchmarks/virtual_gpu_workspaces.py h200.json
    python benchmarks/virtual_gpu_workspaces.py virtual.json --virtual-gpu h200 --cases h200.json
    python benchmarks/virtual_gpu_workspaces.py --compare h200.json virtual.json

and the table of csrc/virtual_gpu/cudnn_workspaces.inc is made of what differs while it is empty:

    python benchmarks/virtual_gpu_workspaces.py csrc/virtual_gpu/cudnn_workspaces.inc --table h200.json virtual.json

Nothing of the profiler is used on a real GPU: the sizes come from the trace of torch's caching allocator, and for a
convolution they are those allocations of the call (forward, input gradient and weight gradient each by itself, and
each for the first time) that it frees again before it returns. Other operations leave their whole sequence, frees as
negative sizes. The convolutions are those of common networks and of the gradients of single samples, and drawn ones;
the order is shuffled, so that what fits in `--seconds` is a fair sample.
"""

import argparse
import ctypes
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from convolution_cases import Conv, cases

# -- what they allocate -------------------------------------------------------------------------------------------


class Trace:
    """Reads from torch's caching allocator which sizes a call allocates and frees, in order."""

    MARK = 123 * 512

    def __init__(self) -> None:
        import torch

        self._torch = torch
        torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=400)

    def events(self, call: Callable[[], Any]) -> tuple[list[tuple[str, int, int]], Any]:
        """(action, address, requested bytes) of each event of the call, and what it returned."""
        torch = self._torch
        mark = torch.empty(self.MARK, dtype=torch.uint8, device="cuda")
        address = mark.data_ptr()
        result = call()
        traced = torch.cuda.memory._snapshot()["device_traces"][0]
        start = max(
            index
            for index, entry in enumerate(traced)
            if entry["action"] == "alloc" and entry["addr"] == address and entry["size"] == self.MARK
        )
        kept = [entry for entry in traced[start + 1 :] if entry["action"] in ("alloc", "free_requested")]
        return [(entry["action"], entry["addr"], entry["size"]) for entry in kept], result

    def sequence(self, call: Callable[[], Any]) -> tuple[list[int], Any]:
        """Sizes in order, frees as negative ones, and what the call returned."""
        events, result = self.events(call)
        return [size if action == "alloc" else -size for action, _, size in events], result

    def both(self, name: str, call: Callable[[], Any], into: dict[str, list[int] | str]) -> None:
        """Notes the sequences of a call and, where its result has a gradient, of its backward; or why it failed."""
        try:
            into[f"{name} forward"], out = self.sequence(call)
            if out.requires_grad:
                gradient = self._torch.ones_like(out)
                into[f"{name} backward"], _ = self.sequence(lambda: out.backward(gradient))
        except RuntimeError as error:
            into[name] = str(error).splitlines()[0][:80]

    def temporaries(self, call: Callable[[], Any]) -> list[int]:
        """The sizes that the call frees again itself, in the order of their allocation."""
        events, result = self.events(call)
        del result
        live: dict[int, int] = {}
        freed: dict[int, int] = {}
        for index, (action, address, size) in enumerate(events):
            if action == "alloc":
                live[address] = index
            elif address in live:
                freed[live.pop(address)] = size
        return [events[index][2] for index in sorted(freed)]


def measure_convolution(conv: Conv, trace: Trace) -> list[list[int]]:
    """Temporaries of forward, input gradient and weight gradient."""
    import torch

    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(conv.dtype, torch.float32)
    torch.backends.cudnn.allow_tf32 = conv.dtype == "tf32"
    layout = torch.contiguous_format
    if conv.channels_last:
        layout = torch.channels_last if len(conv.input) == 4 else torch.channels_last_3d

    def make(sizes: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="cuda", memory_format=layout)

    x, w, gradient = make(conv.input), make(conv.weight), make(conv.output())
    rest = (
        list(conv.stride),
        list(conv.padding),
        list(conv.dilation),
        conv.transposed,
        [0] * len(conv.stride),
        conv.groups,
    )
    forward = torch.ops.aten.convolution.default
    backward = torch.ops.aten.convolution_backward.default
    return [
        trace.temporaries(lambda: forward(x, w, None, *rest)),
        trace.temporaries(lambda: backward(gradient, x, w, None, *rest, [True, False, False])),
        trace.temporaries(lambda: backward(gradient, x, w, None, *rest, [False, True, False])),
    ]


def measure_recurrent(trace: Trace) -> dict[str, list[int] | str]:
    """LSTM, GRU and RNN, forward and backward."""
    import torch
    from torch import nn

    found: dict[str, list[int] | str] = {}
    sizes = [(32, 64, 128), (100, 128, 1), (50, 32, 300), (256, 16, 512), (7, 5, 33), (512, 8, 1024)]
    shapes = [(1, False, 0.0, 0), (2, False, 0.0, 0), (2, True, 0.0, 0), (3, False, 0.3, 0), (1, False, 0.0, 32)]
    for kind, (steps, batch, width), hidden, shape, dtype in itertools.product(
        (nn.LSTM, nn.GRU, nn.RNN), sizes, (64, 100, 512), shapes, (torch.float32, torch.float16)
    ):
        layers, bidirectional, dropout, projected = shape
        if projected and kind is not nn.LSTM:
            continue
        options = {"bidirectional": bidirectional, "dropout": dropout} | ({"proj_size": projected} if projected else {})
        x = torch.zeros(steps, batch, width, device="cuda", dtype=dtype)
        name = (
            f"{kind.__name__} steps={steps} batch={batch} width={width} hidden={hidden} layers={layers} "
            f"bidirectional={int(bidirectional)} dropout={dropout} projected={projected} {str(dtype)[6:]}"
        )

        def run(kind: Any = kind, args: Any = (width, hidden, layers), x: Any = x, options: Any = options) -> Any:
            return kind(*args, device="cuda", dtype=x.dtype, **options)(x)[0]

        trace.both(name, run, found)
    return found


def measure_others(trace: Trace) -> dict[str, list[int] | str]:
    """cuBLAS, batch norm, CTC and attention."""
    import torch
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    found: dict[str, list[int] | str] = {}
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.zeros(256, 256, device="cuda", dtype=dtype)
        trace.both(f"mm {dtype}", lambda a=a: a @ a, found)
        trace.both(f"linear {dtype}", lambda a=a: functional.linear(a, a, a[0]), found)
        trace.both(f"bmm {dtype}", lambda a=a: torch.bmm(a[None], a[None]), found)
    for (batch, channels, size), dtype, layout in itertools.product(
        ((32, 64, 56), (8, 512, 7), (128, 16, 32)),
        (torch.float32, torch.float16, torch.bfloat16),
        (torch.contiguous_format, torch.channels_last),
    ):
        x = torch.zeros(batch, channels, size, size, device="cuda", dtype=dtype)
        x = x.to(memory_format=layout).requires_grad_()
        norm = torch.nn.BatchNorm2d(channels, device="cuda")
        trace.both(f"BatchNorm2d {batch}x{channels}x{size} {dtype} {layout}", lambda norm=norm, x=x: norm(x), found)
    for steps, batch, classes, length in ((50, 16, 20, 30), (200, 8, 100, 60), (20, 64, 32, 10)):
        logits = torch.zeros(steps, batch, classes, device="cuda").log_softmax(2).requires_grad_()
        targets = torch.ones(batch, length, dtype=torch.int32, device="cuda")
        lengths = torch.full((batch,), steps, dtype=torch.int32), torch.full((batch,), length, dtype=torch.int32)
        trace.both(
            f"ctc_loss steps={steps} batch={batch} classes={classes} length={length}",
            lambda a=logits, t=targets, n=lengths: functional.ctc_loss(a, t, *n),
            found,
        )
    for (batch, heads, length, width), dtype, causal in itertools.product(
        ((8, 12, 128, 64), (4, 16, 512, 64), (2, 32, 1024, 128), (1, 8, 2048, 128), (16, 12, 77, 64), (3, 5, 100, 80)),
        (torch.float16, torch.bfloat16),
        (False, True),
    ):
        shape = (batch, heads, length, width)
        q, k, v = (torch.zeros(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            trace.both(
                f"attention {batch}x{heads}x{length}x{width} {dtype} causal={int(causal)}",
                lambda q=q, k=k, v=v, c=causal: functional.scaled_dot_product_attention(q, k, v, is_causal=c),
                found,
            )
    return found


def device_properties() -> str | None:
    """The GPU as cuDNN describes it (CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR), or None before cuDNN 9.8."""
    library = ctypes.CDLL("libcudnn.so.9")
    handle, descriptor, count = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int64()
    text = ctypes.create_string_buffer(8192)
    steps = (
        lambda: library.cudnnCreate(ctypes.byref(handle)),
        lambda: library.cudnnBackendCreateDescriptor(38, ctypes.byref(descriptor)),
        lambda: library.cudnnBackendSetAttribute(descriptor, 2701, 0, ctypes.c_int64(1), ctypes.byref(handle)),
        lambda: library.cudnnBackendFinalize(descriptor),
        lambda: library.cudnnBackendGetAttribute(
            descriptor, 2702, 19, ctypes.c_int64(len(text)), ctypes.byref(count), text
        ),
    )
    for index, step in enumerate(steps):
        if status := step():
            print(f"device properties: step {index} answers {status}")
            return None
    return text.raw[: count.value].rstrip(b"\0").decode()


# -- the program --------------------------------------------------------------------------------------------------


def measure(output: Path, listed: list[Conv], seconds: float) -> None:
    """Runs as many of the cases as there is time for, and writes the file, also in between."""
    import torch

    trace = Trace()
    start = time.perf_counter()
    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "others": measure_others(trace),
        "convolutions": {},
        "failed": {},
    }

    def write() -> None:
        output.write_text(json.dumps(found, separators=(",", ":")).replace('],"', '],\n"') + "\n")

    if torch.backends.cudnn.is_available():
        found["device_properties"] = device_properties()
    print(f"{time.perf_counter() - start:.0f} s: others", flush=True)
    found["recurrent"] = measure_recurrent(trace)
    print(f"{time.perf_counter() - start:.0f} s: recurrent", flush=True)
    write()
    for done, conv in enumerate(listed):
        if time.perf_counter() - start > seconds:
            break
        try:
            forward, data, filters = measure_convolution(conv, trace)
            found["convolutions"][conv.key()] = [
                sizes[0] if len(sizes) == 1 else sizes or 0 for sizes in (forward, data, filters)
            ]
        except (RuntimeError, torch.OutOfMemoryError) as error:
            found["failed"][conv.key()] = str(error).splitlines()[0][:80]
        if done % 50 == 49:
            torch.cuda.empty_cache()
        if done % 250 == 249:
            print(f"{time.perf_counter() - start:.0f} s: {done + 1} of {len(listed)} convolutions", flush=True)
            write()
    write()
    print(f"{len(found['convolutions'])} convolutions, {len(found['failed'])} failed, {output.stat().st_size} bytes")


def compare(real_path: Path, other_path: Path, shown: int = 20) -> None:
    """Says for how many calls the two files have the same sizes, and shows the worst differences."""
    real, other = json.loads(real_path.read_text()), json.loads(other_path.read_text())

    def total(sizes: int | list[int] | str) -> int:
        """The most that is live, taking what a convolution frees inside as live together; 0 for a failure."""
        if not isinstance(sizes, list):
            return sizes if isinstance(sizes, int) else 0
        live = most = 0
        for size in sizes:
            live += size
            most = max(most, live)
        return most

    for part in ("convolutions", "recurrent", "others"):
        pairs = []
        for key in real[part].keys() & other[part].keys():
            both = real[part][key], other[part][key]
            if part == "convolutions":
                pairs += [(f"{key} {name}", a, b) for name, a, b in zip("fdw", *both, strict=True)]
            else:
                pairs.append((key, *both))
        different = [(abs(total(b) - total(a)), key, a, b) for key, a, b in pairs if a != b]
        print(f"{part}: {len(pairs) - len(different)} of {len(pairs)} equal")
        for _, key, a, b in sorted(different, reverse=True, key=lambda row: row[0])[:shown]:
            print(f"  {key}: {a} != {b}")


def write_table(real_path: Path, virtual_path: Path, output: Path) -> None:
    """Writes the convolutions whose workspace is another on the real GPU, as cudnn_workspaces.cpp reads them."""
    real, virtual = json.loads(real_path.read_text()), json.loads(virtual_path.read_text())
    rows: dict[str, int] = {}
    for key, sizes in real["convolutions"].items():
        conv = Conv.parse(key)
        for direction, measured, answered in zip("fdw", sizes, virtual["convolutions"].get(key, sizes), strict=True):
            if measured != answered and isinstance(measured, int):
                rows[conv.cudnn_key(direction)] = measured
    lines = [f'{{"{key}", {rows[key]}}},' for key in sorted(rows)]
    output.write_text(
        "// SPDX-License-Identifier: Apache-2.0\n"
        "// Written by benchmarks/virtual_gpu_workspaces.py. Input, weight, stride, padding, dilation, type, layout,\n"
        f"// direction; bytes. On an {real['gpu']}, torch {real['torch']}, cuDNN {real['cudnn']}.\n"
        + "\n".join(lines)
        + "\n"
    )


def main() -> None:
    """Measures, compares or writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, nargs="?", help="the file to write")
    parser.add_argument("--most", type=int, default=5000, help="at most this many convolutions")
    parser.add_argument("--seconds", type=float, default=230)
    parser.add_argument("--virtual-gpu", help="run on a virtual GPU of this kind")
    parser.add_argument("--cases", type=Path, help="run the convolutions of this file")
    parser.add_argument("--compare", type=Path, nargs=2)
    parser.add_argument("--table", type=Path, nargs=2)
    options = parser.parse_args()
    if options.compare:
        compare(*options.compare)
        return
    if options.output is None:
        parser.error("name the file to write")
    if options.table:
        write_table(*options.table, options.output)
        return
    if options.virtual_gpu:
        from opacus_memprof import virtual_gpu

        virtual_gpu.start(options.virtual_gpu)
    if options.cases:
        listed = [Conv.parse(key) for key in json.loads(options.cases.read_text())["convolutions"]][: options.most]
    else:
        listed = cases(options.most)
    print(f"{len(listed)} convolutions to measure", flush=True)
    measure(options.output, listed, options.seconds)


if __name__ == "__main__":
    sys.exit(main())
