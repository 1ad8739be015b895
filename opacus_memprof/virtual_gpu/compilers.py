# SPDX-License-Identifier: Apache-2.0
"""Configures Triton and torch.compile for the virtual GPU: the library that they link to, and a separate cache; and
what relies on their kernels' results."""

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opacus_memprof.recording.after_import import AfterImport


def configure(libraries: Path) -> None:
    """Configures Triton and Inductor as soon as the program imports them. Child processes inherit nothing of it."""
    _on_import("triton.knobs", lambda knobs: _set_libcuda_path(knobs, libraries))
    _on_import("torch._inductor.runtime.cache_dir_utils", _use_separate_cache)
    _on_import("torch._inductor.config", _use_one_compile_thread)
    _on_import("opacus_memprof.clipping.kernels.noise", _believe_noise_kernel)
    _on_import("opacus_memprof.clipping.proof.situations", _leave_proofs_out)


def _on_import(name: str, set_up: Callable[[Any], None]) -> None:
    AfterImport(name, lambda: set_up(importlib.import_module(name)))


def _set_libcuda_path(knobs: Any, libraries: Path) -> None:
    """Lets Triton link what it compiles to the virtual libcuda.so.1. By default it asks ldconfig for the library."""
    propagate, knobs.propagate_env = knobs.propagate_env, False  # do not set an environment variable
    knobs.nvidia.libcuda_path = str(libraries)
    knobs.propagate_env = propagate


def _use_separate_cache(cache: Any) -> None:
    """Gives Inductor a separate cache: it stores which kernels were fastest, which on a virtual GPU is meaningless and
    must not be used on a real one.

    torch itself sets TORCHINDUCTOR_CACHE_DIR to its default folder if the program does not.
    """
    default = cache.default_cache_dir
    cache.default_cache_dir = lambda: default() + "_virtual_gpu"
    if chosen := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = chosen.removesuffix("_virtual_gpu") + "_virtual_gpu"


def _believe_noise_kernel(noise: Any) -> None:
    """Lets flash_clip use its kernel for noise, of which it cannot see here that it computes what torch computes."""
    compare = noise.draws_as_torch
    noise.draws_as_torch = lambda device: compare(device) or True


def _leave_proofs_out(situations: Any) -> None:
    """flash_clip proves its clipping by numbers, most of which are not known here."""
    situations.knows_numbers = False


def _use_one_compile_thread(config: Any) -> None:
    """Compiles in this process, because Inductor's worker processes have no virtual GPU."""
    config.compile_threads = 1
