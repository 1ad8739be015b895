# SPDX-License-Identifier: Apache-2.0
"""Accelerate, with private training by flash_clip: make_private first, then `prepare` for model and optimizer only.

The loader stays Opacus' own, whose Poisson sampling the privacy guarantee rests on. Run it as it is, under
`opacus-memprof run`, or `opacus-memprof plan`.
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_memprof


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    data = TensorDataset(torch.randn(64, 64), torch.randint(10, (64,)))
    private, optimizer, loader = opacus_memprof.PrivacyEngine().make_private(
        module=model.to(accelerator.device),
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        data_loader=DataLoader(data, batch_size=16),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode="flash_clip",
        noise_generator=torch.Generator(accelerator.device).manual_seed(0),
    )
    private, optimizer = accelerator.prepare(private, optimizer)
    for features, labels in loader:
        features, labels = features.to(accelerator.device), labels.to(accelerator.device)
        loss = nn.functional.cross_entropy(private(features), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
