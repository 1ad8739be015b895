# SPDX-License-Identifier: Apache-2.0
"""The DP tax of a real training of one Linear, against numbers worked out by hand."""

import gc
from pathlib import Path
from typing import Any

import opacus
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_memprof
from opacus_memprof.analysis.diff import dp_tax
from opacus_memprof.analysis.profile import load_profile

BATCH, IN, OUT, FLOAT = 8, 200, 100, 4
WEIGHT = IN * OUT * FLOAT


def one_step(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def profile(directory: Path, *, private: bool) -> dict[str, Any]:
    gc.collect()
    with opacus_memprof.profile(directory, device="cpu") as session:
        model: Any = nn.Linear(IN, OUT, bias=False)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if private:
            model, optimizer, _ = opacus.PrivacyEngine().make_private(
                module=model,
                optimizer=optimizer,
                data_loader=DataLoader(TensorDataset(torch.zeros(BATCH, 1)), batch_size=BATCH),
                noise_multiplier=1.0,
                max_grad_norm=1.0,
                poisson_sampling=False,
            )
        session.attach(model, optimizer)
        one_step(model, optimizer, torch.randn(BATCH, IN))
        del model, optimizer
        gc.collect()
    return load_profile(directory)


def test_of_one_linear(tmp_path: Path) -> None:
    private = profile(tmp_path / "private", private=True)
    vanilla = profile(tmp_path / "vanilla", private=False)
    tax = dp_tax(private, vanilla)["devices"]["cpu"]
    inputs, outputs, dataset = BATCH * IN * FLOAT, BATCH * OUT * FLOAT, BATCH * FLOAT
    losses = 2 * FLOAT  # the mean, and its gradient
    # Backward: the weight's gradient beside the output's.
    assert tax["vanilla_bytes"] == WEIGHT + inputs + losses + outputs + WEIGHT
    # In Opacus' hook: the output's gradient and its scaled copy; what the sampler returned, and the zeros that it is
    # copied into. The weight's own gradient has not been made yet.
    assert tax["private_bytes"] == WEIGHT + inputs + losses + outputs + outputs + 2 * BATCH * WEIGHT + dataset
    assert tax["total"] == tax["private_bytes"] - tax["vanilla_bytes"]
    assert tax["categories"] == {
        "per_sample_gradients": 2 * BATCH * WEIGHT,
        "backprop_copies": outputs,
        "gradients": -WEIGHT,
        "unattributed": dataset,
    }
    assert tax["modules"] == {"": tax["categories"]}
    assert sum(tax["categories"].values()) == tax["total"]
