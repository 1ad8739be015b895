# SPDX-License-Identifier: Apache-2.0
"""A GPU memory profiler for DP-SGD training with Opacus. docs/python.md and docs/toolkit.md show the names below.

Names are imported on first access. Therefore importing this package is fast, works where the extension is broken (for
`opacus-memprof doctor`), and never initialises CUDA.
"""

import importlib
from typing import TYPE_CHECKING, Any

from opacus_memprof.versions import PACKAGE, VERSION, folder_of_extensions

__version__ = VERSION

if (_extensions := folder_of_extensions()) != PACKAGE:
    __path__.append(str(_extensions))

if TYPE_CHECKING:
    from opacus_memprof import session as session
    from opacus_memprof.errors import MemprofError as MemprofError
    from opacus_memprof.language import set_language as set_language
    from opacus_memprof.planning.python import largest_physical_batch as largest_physical_batch
    from opacus_memprof.planning.python import plan as plan
    from opacus_memprof.recording.allocators import allocator as allocator
    from opacus_memprof.recording.allocators import install as install
    from opacus_memprof.recording.allocators import library_path as library_path
    from opacus_memprof.recording.allocators import uninstall as uninstall
    from opacus_memprof.session import Session as Session
    from opacus_memprof.session import profile as profile
    from opacus_memprof.session import retag as retag
    from opacus_memprof.session import tag as tag
    from opacus_memprof.session.privacy_engine import PrivacyEngine as PrivacyEngine
    from opacus_memprof.toolkit.debugger import create_memory_debugger as create_memory_debugger
    from opacus_memprof.toolkit.model import analyze_model as analyze_model
    from opacus_memprof.toolkit.profiler import GPUMemoryProfiler as GPUMemoryProfiler
    from opacus_memprof.toolkit.snapshots import check_memory_status as check_memory_status
    from opacus_memprof.toolkit.snapshots import cleanup_memory as cleanup_memory
    from opacus_memprof.toolkit.snapshots import compare_snapshots as compare_snapshots
    from opacus_memprof.toolkit.snapshots import generate_report as generate_report
    from opacus_memprof.toolkit.snapshots import memory_snapshot as memory_snapshot
    from opacus_memprof.toolkit.snapshots import monitor_function as monitor_function
    from opacus_memprof.toolkit.training import debug_lora_training as debug_lora_training
    from opacus_memprof.toolkit.training import (
        debug_memory_with_different_configs as debug_memory_with_different_configs,
    )
    from opacus_memprof.toolkit.training import memory_profiled_training as memory_profiled_training

# Name → the module that has it.
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
    "session": "session",
    "set_language": "language",
    "tag": "session",
    "uninstall": "recording.allocators",
}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        if _HOME[name].startswith(("recording.", "session")):  # before torch is imported
            importlib.import_module("opacus_memprof.recording.native")
        module = importlib.import_module(f"opacus_memprof.{_HOME[name]}")
        return module if name == "session" else getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_ipython_extension(shell: Any) -> None:
    """Gives a notebook %%memprof and %memprof_report, for `%load_ext opacus_memprof`."""
    importlib.import_module("opacus_memprof.recording.native")
    from opacus_memprof.integrations import register_magics

    register_magics(shell)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
