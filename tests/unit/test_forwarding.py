# SPDX-License-Identifier: Apache-2.0
"""Every virtual method of the installed torch's CUDAAllocator is overridden, and forwarded to its namesake.

A method that is left out falls back to a default that throws or does nothing, without a sound; and the set of methods
changes with torch's minors. The declarations are read from torch's headers, the overrides from the built library.
"""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from opacus_memprof.recording import native

SOURCES = Path(__file__).parents[2] / "csrc" / "allocators"
INCLUDE = Path(torch.__file__).parent / "include" / "c10"
# (header, class), base classes first
CLASSES = [
    (INCLUDE / "core" / "Allocator.h", "Allocator"),
    (INCLUDE / "core" / "CachingDeviceAllocator.h", "DeviceAllocator"),
    (INCLUDE / "cuda" / "CUDACachingAllocator.h", "CUDAAllocator"),
]
# Reported methods: their bodies do more than forward (csrc/allocators/cuda_delegating.cpp).
REPORTED = {
    "allocate",
    "allocateWithAddress",
    "raw_alloc",
    "raw_alloc_with_stream",
    "raw_delete",
    "raw_deleter",
    "recordStream",
    "resetPeakStats",
    "setCheckpointPoolState",
}


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def class_body(text: str, name: str) -> str:
    """The text between the braces of `class name`."""
    start = re.search(rf"\b(?:class|struct)\s+(?:C10_API\s+|C10_CUDA_API\s+)?{name}\b[^;{{]*{{", text)
    assert start is not None, f"no class {name} in the header"
    depth, end = 1, start.end()
    while depth:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    return text[start.end() : end - 1]


def virtual_methods() -> set[str]:
    found: set[str] = set()
    for header, name in CLASSES:
        body = class_body(without_comments(header.read_text()), name)
        declared = re.findall(r"\bvirtual\b[^;{}()]*?(~?\w+)\s*\(", body)
        assert declared, f"nothing virtual in {name}"
        found.update(method for method in declared if not method.startswith("~"))
    return found


def test_the_parser_reads_what_is_there() -> None:
    methods = virtual_methods()
    assert {"allocate", "raw_delete", "getDeviceStats", "snapshot", "recordStream", "memcpyAsync", "name"} <= methods
    assert len(methods) >= 40


@pytest.mark.skipif(not native.HAS_CUDA, reason="built without CUDA")
@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm, of binutils")
def test_every_virtual_is_overridden_in_the_built_library() -> None:
    spec = importlib.util.find_spec("opacus_memprof._C")
    assert spec is not None
    assert spec.origin is not None
    library = spec.origin
    symbols = subprocess.run(["nm", "-C", library], capture_output=True, text=True, check=True).stdout
    overridden = set(re.findall(r"\bopacus_memprof::DelegatingCudaAllocator::(\w+)(?:\[abi:cxx11\])?\(", symbols))
    assert virtual_methods() - overridden == set()
    assert len(set(re.findall(r"DelegatingCudaAllocator::recordStream\(.*\)", symbols))) == 2


def test_every_other_override_forwards_to_its_namesake() -> None:
    body = class_body(without_comments((SOURCES / "cuda_delegating.h").read_text()), "DelegatingCudaAllocator")
    forwarded = dict(re.findall(r"(\w+)\([^{};]*\)[^{};]*override\s*{\s*(?:return\s+)?upstream_->(\w+)\(", body))
    assert {method for method, target in forwarded.items() if method != target} == set()
    assert virtual_methods() - REPORTED - set(forwarded) == set()


def test_every_reported_override_calls_upstream() -> None:
    text = "".join(without_comments((SOURCES / f"cuda_{name}.cpp").read_text()) for name in ("delegating", "reserved"))
    for method in REPORTED - {"raw_deleter"}:
        assert re.search(rf"upstream(_->|\.){method}\(", text), method
