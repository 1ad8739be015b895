# SPDX-License-Identifier: Apache-2.0
"""flash_clip on two GPUs, over NCCL.

Runs every case of the ranks on the CPU, in float64, float32 and bfloat16, and kills a rank.
"""

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from opacus_memprof.analysis.job import load_ranks
from opacus_memprof.clipping.agreement import Agreement
from tests.gpu.test_distributed_cuda import ROOT, TRAIN, started_ranks
from tests.integration.test_distributed import PARAMETERS
from tests.integration.test_flash_clip_ranks import check_cases

PATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
ENVIRONMENT = {"PYTHONPATH": PATH, "PYTHONWARNINGS": "ignore", "NCCL_NVLS_ENABLE": "0"}


@pytest.mark.true_numbers
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("wrap", ["ddp", "dpddp", "fsdp2"])
def test_ranks_train_as_one_process(wrap: str) -> None:
    check_cases("nccl", 2, [wrap], os.environ | ENVIRONMENT)


@pytest.mark.true_numbers
def test_the_host_does_not_wait_for_the_device() -> None:
    """Ranks agree while their devices are still at work, so that the host can be ahead of them."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        agreement, done = Agreement(torch.device("cuda", 0)), torch.cuda.Event()
        assert agreement.settle(None, [3, -4]) == [(3, 3), (-4, -4)]  # sets up NCCL
        torch.cuda._sleep(4_000_000_000)  # clock cycles: two seconds
        done.record()
        assert agreement.settle(None, [5]) == [(5, 5)]
        assert not done.query()
        done.synchronize()
    finally:
        dist.destroy_process_group()


TIMEOUT = 15.0  # of a collective; the default of ten minutes is for large jobs
# NCCL's watchdog ends the process, a minute later unless it is told not to wait until the last collectives of all ranks
# are written out.
AT_ONCE = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000"}


@pytest.mark.true_numbers
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_a_rank_is_killed(tmp_path: Path, wrap: str) -> None:
    """The other one ends when NCCL's time is over, with its sentence, and both profiles are whole."""
    command = ["-m", "opacus_memprof", "run", "-o", str(tmp_path), TRAIN, f"{wrap}/flash_clip/flat"]
    command += ["--kill", "1", "--timeout", str(TIMEOUT)]
    with started_ranks(*command, **AT_ONCE) as (survivor, killed):
        killed.communicate(timeout=60)
        printed, _ = survivor.communicate(timeout=TIMEOUT + 25)  # to notice it, and to write its profile
    assert (survivor.returncode, killed.returncode) == (-signal.SIGABRT, -signal.SIGKILL), printed
    assert "Watchdog caught collective operation timeout" in printed
    summary = load_ranks(tmp_path)
    assert [(row.status, row.steps) for row in summary.ranks] == [("killed", 2)] * 2
    for row in summary.ranks:
        assert row.device == f"cuda:{row.rank}"
        assert row.peak is not None
        assert row.peak.categories["model_parameters"] == PARAMETERS // (2 if wrap == "fsdp2" else 1)
        assert sum(row.peak.categories.values()) == row.peak.requested_bytes
        assert row.dropped == 0
