# SPDX-License-Identifier: Apache-2.0
"""flash_clip on two GPUs, over NCCL: every case that ranks on the CPU train, in float64, float32 and bfloat16."""

import os

import pytest
import torch

from tests.gpu.test_distributed_cuda import ROOT
from tests.integration.test_flash_clip_ranks import check_cases

PATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
ENVIRONMENT = {"PYTHONPATH": PATH, "PYTHONWARNINGS": "ignore", "NCCL_NVLS_ENABLE": "0"}


@pytest.mark.true_numbers
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("wrap", ["ddp", "dpddp", "fsdp2"])
def test_ranks_train_as_one_process(wrap: str) -> None:
    check_cases("nccl", 2, [wrap], os.environ | ENVIRONMENT)
