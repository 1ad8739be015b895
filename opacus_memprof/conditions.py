# SPDX-License-Identifier: Apache-2.0
"""Under what conditions a profile is recorded: versions, the command, and what the allocator in place cannot tell."""

import os
import platform
import sys
from typing import Any

import torch

import opacus_memprof
from opacus_memprof import _native, virtual_gpu
from opacus_memprof.launch import Launch
from opacus_memprof.versions import installed


def allocator_warnings(device: str) -> list[str]:
    """What cannot be known with the allocator that torch is set to."""
    if device == "cpu":
        return []
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ:
        return [
            "PYTORCH_NO_CUDA_MEMORY_CACHING is set: torch counts nothing itself, so the categories cannot be "
            "reconciled, and rounding and cached are unknown"
        ]
    backend = _native.cuda_current_name().removeprefix("opacus_memprof over ")
    if backend == "cudaMallocAsync":
        return ["the backend is cudaMallocAsync: the driver does not tell its rounding, which counts as cached"]
    if backend != "native":
        return [f"the allocator in place is {backend}, which counts nothing: the categories cannot be reconciled"]
    return []


def describe_run(device: str, launch: Launch | None) -> dict[str, Any]:
    """What meta.json says of the run beyond what the recorder knows. Never initialises CUDA."""
    gpus = virtual_gpu.describe_gpus()
    return {
        "versions": {
            "opacus_memprof": opacus_memprof.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "opacus": installed("opacus"),
            "python": platform.python_version(),
        },
        "device": device,
        "command": sys.argv,
        "launch": None if launch is None else launch.to_json(),
        **({} if gpus is None else {"virtual": gpus}),
    }
