# SPDX-License-Identifier: Apache-2.0
"""The CPU's allocator in torch's place, and out of it again."""

import ctypes
from pathlib import Path

import torch

from opacus_memprof.recording import native

C10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
CPU = ctypes.c_int8(0)


def current() -> int:
    get = C10._ZN3c1012GetAllocatorERKNS_10DeviceTypeE
    get.restype = ctypes.c_void_p
    return int(get(ctypes.byref(CPU)))


def replace(allocator: int) -> None:
    """As a library does that brings an allocator of its own: at c10's default priority."""
    C10._ZN3c1012SetAllocatorENS_10DeviceTypeEPNS_9AllocatorEh(CPU, ctypes.c_void_p(allocator), ctypes.c_uint8(0))


def test_another_allocator_may_come_later() -> None:
    torchs = current()
    make = C10._ZN3c1028GetDefaultMobileCPUAllocatorEv
    make.restype = ctypes.c_void_p
    others = int(make())
    native.cpu_install()
    ours = current()
    assert ours != torchs
    try:
        replace(others)
        assert current() == others
        replace(ours)
        native.cpu_uninstall()
        assert current() == torchs
        replace(others)
        assert current() == others
    finally:
        replace(torchs)


def test_a_storage_with_our_allocator_gets_torchs_blocks_after_it() -> None:
    """FSDP1 resizes the storage of its flat parameter at every step."""
    native.cpu_install()
    flat = torch.empty(1000)
    flat.untyped_storage().resize_(0)
    native.cpu_uninstall()
    flat.untyped_storage().resize_(4000)
    addresses = {block["address"] for block in native.live_blocks()}
    assert flat.data_ptr() not in addresses
    native.cpu_install()
    flat.untyped_storage().resize_(0)
    flat.untyped_storage().resize_(4000)
    assert flat.data_ptr() in {block["address"] for block in native.live_blocks()}
    native.cpu_uninstall()
