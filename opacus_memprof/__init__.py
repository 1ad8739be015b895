# SPDX-License-Identifier: Apache-2.0
"""A GPU memory profiler for DP-SGD training with Opacus. The README shows each of the names below in a few lines.

Nothing is loaded before it is asked for: importing this package is cheap, works where the extension is broken (for
`opacus-memprof doctor`), and never initialises CUDA.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from opacus_memprof import session
    from opacus_memprof.adaptors import allocator, install, library_path, uninstall
    from opacus_memprof.engine import PrivacyEngine
    from opacus_memprof.errors import MemprofError
    from opacus_memprof.session import Session, profile, tag

__all__ = [
    "MemprofError",
    "PrivacyEngine",
    "Session",
    "allocator",
    "install",
    "library_path",
    "profile",
    "session",
    "tag",
    "uninstall",
]

_HOME = {
    "MemprofError": "errors",
    "PrivacyEngine": "engine",
    "Session": "session",
    "allocator": "adaptors",
    "install": "adaptors",
    "library_path": "adaptors",
    "profile": "session",
    "tag": "session",
    "uninstall": "adaptors",
}


def __getattr__(name: str) -> Any:
    if name == "session":
        return importlib.import_module("opacus_memprof.session")
    if name in _HOME:
        return getattr(importlib.import_module(f"opacus_memprof.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
