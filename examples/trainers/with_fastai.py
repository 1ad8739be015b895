# SPDX-License-Identifier: Apache-2.0
"""fastai, whose optimizers are its own: each of their steps counts as one, and their states are followed."""

import torch
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.torch_core import set_seed
from torch import nn


def main() -> None:
    set_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = [(torch.randn(64), torch.randint(10, ())) for _ in range(64)]
    loaders = DataLoaders.from_dsets(data, data[:16], bs=16, device=device)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    learner = Learner(loaders, model, loss_func=nn.CrossEntropyLoss())
    learner.fit(2, 1e-3)
    for value in learner.recorder.losses:
        print(f"loss {value:.6f}")


if __name__ == "__main__":
    main()
