# SPDX-License-Identifier: Apache-2.0
"""What cuDNN and cuBLAS take of torch's memory: runs operations one by one and writes what each allocates inside.

The same program runs on a real GPU and on a virtual one, so that the two files can be compared line by line:

    python benchmarks/virtual_gpu_workspaces.py h200.json
    python benchmarks/virtual_gpu_workspaces.py virtual.json --virtual-gpu h200 --cases h200.json
    python benchmarks/virtual_gpu_workspaces.py --compare h200.json virtual.json

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
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

DTYPES = ("tf32", "fp32", "fp16", "bf16")
CHANNELS = (3, 16, 32, 64, 128, 256, 512, 1024, 2048)
MAX_BYTES = 6 << 30  # of one case's tensors


class Conv(NamedTuple):
    """One convolution; `weight` is as torch has it, with the groups divided out."""

    input: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool
    dtype: str
    channels_last: bool

    def key(self) -> str:
        """One word for each field, separated by blanks."""

        def join(values: tuple[int, ...]) -> str:
            return "x".join(map(str, values))

        return (
            f"{join(self.input)} {join(self.weight)} {join(self.stride)} {join(self.padding)} {join(self.dilation)} "
            f"{self.groups} {'t' if self.transposed else '-'} {self.dtype} {'last' if self.channels_last else 'first'}"
        )

    @staticmethod
    def parse(key: str) -> "Conv":
        """The convolution whose `key` this is."""
        fields = key.split()
        sizes = [tuple(map(int, field.split("x"))) for field in fields[:5]]
        return Conv(*sizes, int(fields[5]), fields[6] == "t", fields[7], fields[8] == "last")  # type: ignore[arg-type]

    def output(self) -> tuple[int, ...]:
        """The sizes of the output."""
        dims = []
        for size, kernel, stride, padding, dilation in zip(
            self.input[2:], self.weight[2:], self.stride, self.padding, self.dilation, strict=True
        ):
            extent = dilation * (kernel - 1) + 1
            if self.transposed:
                dims.append((size - 1) * stride - 2 * padding + extent)
            else:
                dims.append((size + 2 * padding - extent) // stride + 1)
        channels = self.weight[1] * self.groups if self.transposed else self.weight[0]
        return (self.input[0], channels, *dims)

    def fits(self) -> bool:
        """Whether it exists at all, and is small enough to be measured."""
        output = self.output()
        numbers = sum(_product(sizes) for sizes in (self.input, self.weight, output))
        return min(output) > 0 and numbers * 4 <= MAX_BYTES


def _product(sizes: tuple[int, ...]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


# -- which convolutions -------------------------------------------------------------------------------------------


def network_shapes() -> list[tuple[tuple[int, ...], ...]]:
    """(input, weight, stride, padding, dilation, (groups, transposed)) of networks' convolutions, for one sample."""
    import torch
    import torchvision
    from torch import nn
    from torch.utils._python_dispatch import TorchDispatchMode

    found: dict[tuple[tuple[int, ...], ...], None] = {}

    class Note(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.convolution.default:
                x, w, _, stride, padding, dilation, transposed, _, groups = args
                shape = (x.shape, w.shape, stride, padding, dilation, (groups, int(transposed)))
                found[tuple(tuple(map(int, field)) for field in shape)] = None
            return func(*args, **(kwargs or {}))

    def conv_stack(dims: int, channels: list[int], kernel: int, stride: int, padding: int) -> nn.Module:
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        pairs = itertools.pairwise(channels)
        return nn.Sequential(*(kind(a, b, kernel, stride, padding) for a, b in pairs))

    models = torchvision.models
    with torch.device("meta"):
        runs: list[tuple[nn.Module, tuple[int, ...]]] = [
            (models.resnet18(), (1, 3, 224, 224)),
            (models.resnet18(), (1, 3, 32, 32)),
            (models.resnet50(), (1, 3, 224, 224)),
            (models.resnet50(), (1, 3, 64, 64)),
            (models.vgg11(), (1, 3, 32, 32)),
            (models.vgg16(), (1, 3, 224, 224)),
            (models.efficientnet_b0(), (1, 3, 224, 224)),
            (models.convnext_tiny(), (1, 3, 224, 224)),
            (models.mobilenet_v2(), (1, 3, 224, 224)),
            (models.densenet121(), (1, 3, 224, 224)),
            (models.vit_b_16(), (1, 3, 224, 224)),
            (conv_stack(2, [3, 32, 64, 64, 128], 3, 1, 1), (1, 3, 32, 32)),  # a CNN for CIFAR-10
            (conv_stack(2, [1, 16], 8, 2, 3), (1, 1, 28, 28)),  # Opacus' example for MNIST
            (conv_stack(2, [16, 32], 4, 2, 0), (1, 16, 13, 13)),
            (conv_stack(2, [3, 64, 128, 256, 512], 3, 1, 1), (1, 3, 128, 128)),  # a U-Net's way down
            (nn.ConvTranspose2d(512, 256, 2, 2), (1, 512, 16, 16)),
            (nn.ConvTranspose2d(128, 64, 2, 2), (1, 128, 64, 64)),
            (nn.ConvTranspose2d(100, 512, 4, 1, 0), (1, 100, 1, 1)),  # DCGAN
            (nn.ConvTranspose2d(512, 256, 4, 2, 1), (1, 512, 4, 4)),
            (nn.ConvTranspose2d(128, 64, 4, 2, 1), (1, 128, 16, 16)),
            (conv_stack(2, [3, 64, 128, 256, 512], 4, 2, 1), (1, 3, 64, 64)),
            (conv_stack(1, [128, 100], 3, 1, 0), (1, 128, 64)),  # a CNN for text
            (conv_stack(1, [128, 100], 5, 1, 0), (1, 128, 64)),
            (conv_stack(1, [300, 256], 4, 1, 0), (1, 300, 256)),
            (nn.Conv1d(1, 512, 10, 5), (1, 1, 16000)),  # wav2vec 2.0
            (conv_stack(1, [512, 512], 3, 2, 0), (1, 512, 3199)),
            (conv_stack(1, [512, 512], 2, 2, 0), (1, 512, 199)),
            (nn.Conv1d(768, 768, 128, padding=64, groups=16), (1, 768, 49)),
            (conv_stack(1, [80, 384, 384], 3, 1, 1), (1, 80, 3000)),  # Whisper
            (conv_stack(3, [3, 64, 128, 256], 3, 1, 1), (1, 3, 8, 56, 56)),  # C3D
            (conv_stack(3, [1, 16, 32, 64], 3, 2, 1), (1, 1, 32, 32, 32)),
        ]
        for width, size in ((16, 32), (64, 32), (128, 16), (256, 8)):  # WideResNet-16-4
            runs.append((conv_stack(2, [width, width], 3, 1, 1), (1, width, size, size)))
            runs.append((nn.Conv2d(width, 2 * width, 3, 2, 1), (1, width, size, size)))
        with Note(), torch.no_grad():
            for model, shape in runs:
                model.eval()(torch.empty(shape))
    return list(found)


def networks() -> Iterator[Conv]:
    """Common networks' convolutions at several batch sizes."""
    for shape in network_shapes():
        one, weight, stride, padding, dilation, (groups, transposed) = shape
        for batch in (1, 8, 16, 32, 64, 128, 256):
            for dtype in DTYPES:
                for last in (False, True) if len(one) > 3 else (False,):
                    sizes = (batch, *one[1:])
                    yield Conv(sizes, weight, stride, padding, dilation, groups, bool(transposed), dtype, last)


def single_samples() -> Iterator[Conv]:
    """Gradients of single samples as functorch's vmap computes them: the samples are groups of one call."""
    for batch in (4, 16, 32, 64):
        for channels, outputs, size, kernel, stride in (
            (3, 32, 32, 3, 1),
            (16, 32, 13, 4, 2),
            (32, 64, 32, 3, 1),
            (64, 64, 56, 3, 1),
            (64, 128, 28, 1, 2),
            (128, 128, 28, 3, 1),
            (256, 512, 14, 3, 2),
            (512, 512, 7, 3, 1),
        ):
            for dtype in DTYPES:
                sizes = (1, batch * channels, size, size)
                weight = (batch * outputs, channels, kernel, kernel)
                yield Conv(sizes, weight, (stride,) * 2, (kernel // 2,) * 2, (1, 1), batch, False, dtype, False)


def grid(randomly: random.Random) -> Iterator[Conv]:
    """Drawn convolutions, without end."""
    while True:
        dims = randomly.choice((1, 2, 2, 2, 2, 3))
        channels, outputs = randomly.choice(CHANNELS), randomly.choice(CHANNELS)
        kernel = randomly.choice((1, 3, 3, 5, 7))
        groups = randomly.choice((1, 1, 1, 1, 2, 8, 32, channels))
        transposed = randomly.random() < 0.12
        if channels % groups or outputs % groups:
            continue
        size = randomly.choice({1: (32, 128, 500, 1000, 4000), 2: (7, 14, 28, 32, 56, 112, 224), 3: (8, 16, 28)}[dims])
        stride = randomly.choice((1, 1, 1, 2, 4))
        dilation = randomly.choice((1, 1, 1, 1, 2)) if kernel > 1 else 1
        batch = randomly.choice((1, 2, 8, 16, 32, 50, 64, 128, 256))
        weight = (channels, outputs // groups) if transposed else (outputs, channels // groups)
        yield Conv(
            (batch, channels, *(size,) * dims), (*weight, *(kernel,) * dims), (stride,) * dims,
            (randomly.choice((0, kernel // 2, kernel // 2)),) * dims, (dilation,) * dims, groups, transposed,
            randomly.choice(DTYPES), dims > 1 and randomly.random() < 0.5,
        )  # fmt: skip


def cases(most: int) -> list[Conv]:
    """At most `most` convolutions, shuffled: half of networks, an eighth of single samples, the others drawn."""
    randomly = random.Random(0)
    chosen: dict[Conv, None] = {}
    for source, share in ((networks(), 0.5), (single_samples(), 0.125)):
        conv = [conv for conv in source if conv.fits()]
        randomly.shuffle(conv)
        chosen.update(dict.fromkeys(conv[: int(most * share)]))
    for conv in grid(randomly):
        if len(chosen) >= most:
            break
        if conv.fits():
            chosen[conv] = None
    listed = list(chosen)
    randomly.shuffle(listed)
    return listed


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


def main() -> None:
    """Measures or compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, nargs="?", help="the file to write")
    parser.add_argument("--most", type=int, default=5000, help="at most this many convolutions")
    parser.add_argument("--seconds", type=float, default=230)
    parser.add_argument("--virtual-gpu", help="run on a virtual GPU of this kind")
    parser.add_argument("--cases", type=Path, help="run the convolutions of this file")
    parser.add_argument("--compare", type=Path, nargs=2)
    options = parser.parse_args()
    if options.compare:
        compare(*options.compare)
        return
    if options.output is None:
        parser.error("name the file to write")
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
