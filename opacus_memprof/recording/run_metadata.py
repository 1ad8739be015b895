# SPDX-License-Identifier: Apache-2.0
"""Metadata of a run for its profile: versions, the command, and warnings about the current allocator."""

import os
import platform
import sys
from typing import Any

import torch

from opacus_memprof.profiles.launch import Launch
from opacus_memprof.profiles.versions import VERSION, installed_version
from opacus_memprof.recording import native


def allocator_warnings(device: str) -> list[str]:
    """Warnings about what cannot be measured with torch's current allocator of `device`."""
    if device == "cpu":
        return []
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ:
        return [
            "PYTORCH_NO_CUDA_MEMORY_CACHING is set: torch counts nothing itself, so the categories cannot be "
            "reconciled, and rounding and cached are unknown"
        ]
    backend = native.cuda_current_name().removeprefix("opacus_memprof over ")
    if backend == "cudaMallocAsync":
        return ["the backend is cudaMallocAsync: the driver does not tell its rounding, which counts as cached"]
    if backend != "native":
        return [f"the allocator in place is {backend}, which counts nothing: the categories cannot be reconciled"]
    return []


def describe_run(device: str, launch: Launch | None) -> dict[str, Any]:
    """The entries of meta.json about the run that the recorder does not write itself. Never initialises CUDA."""
    return {
        "versions": {
            "opacus_memprof": VERSION,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "opacus": installed_version("opacus"),
            "python": platform.python_version(),
        },
        "device": device,
        "command": sys.argv,
        "launch": None if launch is None else dict(launch),
    }
