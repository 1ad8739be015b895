# SPDX-License-Identifier: Apache-2.0
"""What single calls of torch allocate inside: convolutions, recurrent layers, and whatever else has a workspace."""

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

from benchmarks.virtual_gpu.convolution_cases import Conv


class Trace:
    """Reads from torch's caching allocator which sizes a call allocates and frees, in order."""

    MARK = 123 * 512

    def __init__(self) -> None:
        import torch

        self._torch = torch
        torch.cuda.init()
        torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=200)

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
    sizes = [(32, 64, 128), (100, 128, 1), (50, 32, 300), (256, 16, 512), (7, 5, 33), (48, 64, 128)]
    shapes = [(1, False, 0.0, 0), (2, False, 0.0, 0), (2, True, 0.0, 0), (3, False, 0.3, 0), (1, False, 0.0, 32)]
    for kind, (steps, batch, width), hidden, shape, dtype in itertools.product(
        (nn.LSTM, nn.GRU, nn.RNN), sizes, (64, 256, 512), shapes, (torch.float32, torch.float16)
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
