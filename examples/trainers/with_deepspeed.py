# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ZeRO, without privacy: DeepSpeed keeps gradients and optimizer states itself.

ZERO_STAGE is 1, 2 or 3. DeepSpeed sums gradients over the batch while backward runs, so that no sample can be clipped.
"""

import os

import deepspeed
import torch
from torch import nn


def main() -> None:
    torch.manual_seed(0)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ.update({name: os.environ.get(name, value) for name, value in address.items()})  # torchrun sets them
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 16,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": int(os.environ.get("ZERO_STAGE", "2"))},
        },
    )
    for _ in range(4):
        features, labels = torch.randn(16, 64).to(engine.device), torch.randint(10, (16,)).to(engine.device)
        loss = nn.functional.cross_entropy(engine(features), labels)
        engine.backward(loss)
        engine.step()
        print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
