# SPDX-License-Identifier: Apache-2.0
"""What flash_clip allocates for modules of any kind has its categories."""

import gc
import json
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import opacus_memprof
from tests.integration.test_flash_clip_modules import MODELS


@pytest.mark.parametrize("name", MODELS)
def test_steps_are_attributed(name: str, tmp_path: Path) -> None:
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    batch = {key: (x.float() if x.is_floating_point() else x).cuda() for key, x in inputs().items()}
    gc.collect()  # what earlier tests have left in cycles has no category
    with opacus_memprof.profile(tmp_path, device="cuda"):
        model = build().cuda()
        module, optimizer, _ = opacus_memprof.PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(torch.zeros(8, 1)), batch_size=4),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            grad_sample_mode="flash_clip",
        )
        for _ in range(3):
            module(*batch.values()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    steps = json.loads((tmp_path / "profile.json").read_text())["devices"]["cuda:0"]["steps"]
    assert all(step["peak_bytes"] > 0 for step in steps)
    unattributed = [step["categories"].get("unattributed", 0) for step in steps]
    assert unattributed[0] <= 1024  # EmbeddingBag, where the first step tries how it can be repeated
    assert not any(unattributed[1:])
