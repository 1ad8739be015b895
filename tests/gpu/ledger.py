# SPDX-License-Identifier: Apache-2.0
"""What the ledger says of cuda:0, beside what torch's own statistics say."""

import torch

from opacus_memprof.recording import native


def live_bytes() -> int:
    """Requested bytes that the ledger holds on cuda:0, after it has forgotten seeded blocks that are gone."""
    native.cuda_refresh(0)
    return sum(block["bytes"] for block in native.live_blocks() if block["device"] == "cuda:0")


def requested_bytes() -> int:
    """The same, by torch's caching allocator."""
    return torch.cuda.memory_stats(0)["requested_bytes.all.current"]


def assert_reconciled() -> None:
    waiting = native.cuda_refresh(0)
    counters = native.snapshot("reconcile")["devices"]["cuda:0"]
    assert counters["requested_bytes"] + waiting == requested_bytes()
    assert sum(counters["categories"].values()) == counters["requested_bytes"] == live_bytes()


def block_of(tensor: torch.Tensor) -> dict[str, object]:
    """The ledger's entry for the tensor's storage."""
    address = tensor.untyped_storage().data_ptr()
    (found,) = [block for block in native.live_blocks() if block["address"] == address]
    return found
