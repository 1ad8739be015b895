# SPDX-License-Identifier: Apache-2.0
"""What flash_clip allocates for modules of any kind has its categories."""

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
    # make_private multiplies matrices to see what layers compute. Where cuBLAS takes a workspace for it, larger than
    # these models, the first step's peak is there, before the model is followed.
    followed = [step for step in steps if step["phase"] != "setup"]
    assert len(followed) >= len(steps) - 1
    assert not any(step["categories"].get("unattributed", 0) for step in followed)
