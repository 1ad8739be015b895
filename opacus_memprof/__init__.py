# SPDX-License-Identifier: Apache-2.0
"""A GPU memory profiler for DP-SGD training with Opacus. docs/python.md and docs/toolkit.md show the names below.

Nothing is loaded before it is asked for: importing this package is cheap, works where the extension is broken (for
`opacus-memprof doctor`), and never initialises CUDA.
"""

import importlib
from typing import TYPE_CHECKING, Any

from opacus_memprof.profiles.versions import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from opacus_memprof import session
    from opacus_memprof.errors import MemprofError
    from opacus_memprof.planning.python import largest_physical_batch, plan
    from opacus_memprof.recording.allocators import allocator, install, library_path, uninstall
    from opacus_memprof.session import Session, profile, retag, tag
    from opacus_memprof.session.privacy_engine import PrivacyEngine
    from opacus_memprof.toolkit.debugger import create_memory_debugger
    from opacus_memprof.toolkit.model import analyze_model
    from opacus_memprof.toolkit.profiler import GPUMemoryProfiler
    from opacus_memprof.toolkit.snapshots import (
        check_memory_status,
        cleanup_memory,
        compare_snapshots,
        generate_report,
        memory_snapshot,
        monitor_function,
    )
    from opacus_memprof.toolkit.training import (
        debug_lora_training,
        debug_memory_with_different_configs,
        memory_profiled_training,
    )

__all__ = [
    "GPUMemoryProfiler",
    "MemprofError",
    "PrivacyEngine",
    "Session",
    "allocator",
    "analyze_model",
    "check_memory_status",
    "cleanup_memory",
    "compare_snapshots",
    "create_memory_debugger",
    "debug_lora_training",
    "debug_memory_with_different_configs",
    "generate_report",
    "install",
    "largest_physical_batch",
    "library_path",
    "memory_profiled_training",
    "memory_snapshot",
    "monitor_function",
    "plan",
    "profile",
    "retag",
    "session",
    "tag",
    "uninstall",
]

_HOME = {
    "GPUMemoryProfiler": "toolkit.profiler",
    "MemprofError": "errors",
    "PrivacyEngine": "session.privacy_engine",
    "Session": "session",
    "allocator": "recording.allocators",
    "analyze_model": "toolkit.model",
    "check_memory_status": "toolkit.snapshots",
    "cleanup_memory": "toolkit.snapshots",
    "compare_snapshots": "toolkit.snapshots",
    "create_memory_debugger": "toolkit.debugger",
    "debug_lora_training": "toolkit.training",
    "debug_memory_with_different_configs": "toolkit.training",
    "generate_report": "toolkit.snapshots",
    "install": "recording.allocators",
    "largest_physical_batch": "planning.python",
    "library_path": "recording.allocators",
    "memory_profiled_training": "toolkit.training",
    "memory_snapshot": "toolkit.snapshots",
    "monitor_function": "toolkit.snapshots",
    "plan": "planning.python",
    "profile": "session",
    "retag": "session",
    "tag": "session",
    "uninstall": "recording.allocators",
}


def __getattr__(name: str) -> Any:
    if name == "session":
        return importlib.import_module("opacus_memprof.session")
    if name in _HOME:
        if _HOME[name].startswith(("recording.", "session")):  # they import torch: first, why one cannot record here
            importlib.import_module("opacus_memprof.recording.native")
        return getattr(importlib.import_module(f"opacus_memprof.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
