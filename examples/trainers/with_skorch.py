# SPDX-License-Identifier: Apache-2.0
"""skorch, whose `fit` passes the optimizer a closure: forward and backward happen inside of the optimizer's step."""

import numpy as np
import skorch
import torch
from torch import nn


def main() -> None:
    torch.manual_seed(0)
    numbers = np.random.default_rng(0)
    classifier = skorch.NeuralNetClassifier(
        nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.Adam,
        max_epochs=4,
        batch_size=16,
        device="cuda" if torch.cuda.is_available() else "cpu",
        verbose=0,
    )
    classifier.fit(numbers.standard_normal((64, 64), dtype=np.float32), numbers.integers(10, size=64))
    for epoch in classifier.history:
        print(f"loss {epoch['train_loss']:.6f}")


if __name__ == "__main__":
    main()
