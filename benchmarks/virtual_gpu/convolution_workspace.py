# SPDX-License-Identifier: Apache-2.0
"""What cuDNN takes for a convolution besides operands and results, by shape, dtype and layout. Needs a GPU.

    python -m benchmarks.virtual_gpu.convolution_workspace

Prints requested bytes of forward, of the input's gradient and of the weight's, as torch's allocator counts them, and
beside them what analysis.oom reckons with for the input's gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from opacus_memprof.hooks.shapes import needs_layout_copy

MIB = 2**20
ROW = "{:34} {:>9} {:>9} {:>9} {:>9} | {:>10} {:>10} {:>10} | {:>10}"


def taken(run: Callable[[], Any]) -> int:
    """Requested bytes, at most, beyond what was there before and what is left after."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    results = run()
    counts = torch.cuda.memory_stats()
    del results
    return int(counts["requested_bytes.all.peak"] - counts["requested_bytes.all.current"])


def row(name: str, module: nn.Conv1d | nn.Conv2d, shape: tuple[int, ...], samples: int, dtype: torch.dtype) -> None:
    module = module.to("cuda", dtype)
    x, w = torch.randn(samples, *shape, device="cuda", dtype=dtype), module.weight
    if name.endswith("channels last"):
        x = x.contiguous(memory_format=torch.channels_last)
    options = (module.stride, module.padding, module.dilation, False, [0] * len(module.stride), module.groups)

    def forward() -> torch.Tensor:
        return torch.ops.aten.convolution(x, w, None, *options)  # type: ignore[no-any-return]

    def backward(*wanted: bool) -> Any:
        return torch.ops.aten.convolution_backward(g, x, w, None, *options, wanted)

    with torch.no_grad():
        y = forward()
        g = torch.randn_like(y)
        backward(True, True, False)  # plans and handles
        measured = (
            taken(forward),
            taken(lambda: backward(True, False, False)),
            taken(lambda: backward(False, True, False)),
        )
    predicted = (x.nbytes + y.nbytes + w.nbytes) * needs_layout_copy(module, y)
    sizes = [f"{size / MIB:.2f}" for size in (x.nbytes, y.nbytes, w.nbytes, *measured, predicted)]
    print(ROW.format(name, str(dtype).removeprefix("torch."), *sizes))


def rows(dtype: torch.dtype) -> None:
    for samples in (96, 7):
        row(f"3x3, {samples} samples", nn.Conv2d(64, 64, 3, padding=1), (64, 192, 192), samples, dtype)
    row("3x3 of an image", nn.Conv2d(3, 64, 3, padding=1), (3, 192, 192), 32, dtype)
    row("7x7 of an image, stride 2", nn.Conv2d(3, 64, 7, 2, 3), (3, 224, 224), 64, dtype)
    row("7x7", nn.Conv2d(64, 64, 7, padding=3), (64, 56, 56), 32, dtype)
    row("1x1", nn.Conv2d(64, 256, 1), (64, 56, 56), 32, dtype)
    row("1x1, stride 2", nn.Conv2d(64, 128, 1, 2), (64, 56, 56), 32, dtype)
    row("3x3, stride 2", nn.Conv2d(64, 128, 3, 2, 1), (64, 56, 56), 32, dtype)
    row("3x3, dilated", nn.Conv2d(64, 64, 3, padding=2, dilation=2), (64, 56, 56), 32, dtype)
    row("5x5, no padding", nn.Conv2d(16, 32, 5), (16, 40, 40), 32, dtype)
    row("3x3, few positions", nn.Conv2d(512, 512, 3, padding=1), (512, 7, 7), 32, dtype)
    row("3x3, 4 groups of 16", nn.Conv2d(64, 64, 3, padding=1, groups=4), (64, 56, 56), 32, dtype)
    row("3x3, 32 groups of 4", nn.Conv2d(128, 128, 3, padding=1, groups=32), (128, 56, 56), 32, dtype)
    row("3x3, depthwise", nn.Conv2d(64, 64, 3, padding=1, groups=64), (64, 56, 56), 32, dtype)
    row("9 of one dimension", nn.Conv1d(80, 128, 9, padding=4), (80, 3000), 16, dtype)
    row("3x3, channels last", nn.Conv2d(64, 64, 3, padding=1), (64, 192, 192), 32, dtype)


def main() -> None:
    print(torch.__version__, "cuDNN", torch.backends.cudnn.version(), torch.cuda.get_device_name())
    print(ROW.format("MiB", "dtype", "input", "output", "weight", "forward", "to input", "to weight", "reckoned"))
    rows(torch.float32)
    rows(torch.bfloat16)
    torch.backends.cudnn.allow_tf32 = False
    print("without TF32")
    row("3x3, 32 samples", nn.Conv2d(64, 64, 3, padding=1), (64, 192, 192), 32, torch.float32)


if __name__ == "__main__":
    main()
