# SPDX-License-Identifier: Apache-2.0
"""Installs the recording allocator while other threads allocate: no block falls between."""

import threading

import pytest
import torch

import opacus_memprof
from opacus_memprof.recording import live, native

pytestmark = pytest.mark.cuda

LEAVES = 2000
TIMES = 5


def test_blocks_that_another_thread_allocates_meanwhile() -> None:
    """A backward pass allocates without Python's lock, which `install` holds: each leaf's gradient stays."""
    for _ in range(TIMES):
        leaves = [torch.ones(64, device="cuda", requires_grad=True) for _ in range(LEAVES)]
        total = torch.stack([leaf * 2 for leaf in leaves]).sum()
        has_begun = threading.Event()
        leaves[-1].register_hook(lambda gradient, event=has_begun: event.set())
        backward = threading.Thread(target=total.backward)
        backward.start()
        has_begun.wait(30)
        opacus_memprof.install("cuda")
        backward.join()
        try:
            device = live.take_snapshot("after").devices["cuda:0"]
            assert device.remainder == 0
            assert device.requested_bytes == torch.cuda.memory_stats()["requested_bytes.all.current"]
        finally:
            opacus_memprof.uninstall()
        del leaves, total
    assert not native.cuda_installed()
