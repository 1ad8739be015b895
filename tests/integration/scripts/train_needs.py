# SPDX-License-Identifier: Apache-2.0
"""Steps of DP-SGD that reserve more than they need: `lstm`, `cnn` on batches that are drawn, `transformer`."""

import sys

import torch
from opacus import PrivacyEngine
from opacus.layers import DPLSTM
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = DPLSTM(64, 256, batch_first=True), nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.ModuleList(nn.Linear(256, 768) for _ in range(4))
        self.up, self.down = (nn.ModuleList(nn.Linear(*size) for _ in range(4)) for size in ((256, 1024), (1024, 256)))
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for mix, up, down in zip(self.mix, self.up, self.down, strict=True):
            q, k, v = mix(x).chunk(3, dim=-1)
            x = x + (q @ k.mT).softmax(-1) @ v
            x = x + down(nn.functional.gelu(up(x)))
        return self.head(x.mean(1))


def convolutions() -> nn.Module:
    blocks = [
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(8, b), nn.ReLU(), nn.AvgPool2d(2))
        for a, b in ((3, 32), (32, 64), (64, 128))
    ]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


MODELS = {
    "lstm": (Recurrent, (1000, 40, 64), 0.1),
    "cnn": (convolutions, (4000, 3, 32, 32), 0.064),
    "transformer": (Attending, (400, 128, 256), 0.1),
}
make, shape, rate = MODELS[sys.argv[1]]
drawn = sys.argv[1] == "cnn"
data = TensorDataset(torch.zeros(shape), torch.zeros(shape[0], dtype=torch.int64))
model = make().cuda()
model, optimizer, loader = PrivacyEngine().make_private(
    module=model,
    optimizer=torch.optim.Adam(model.parameters()),
    data_loader=DataLoader(data, batch_size=int(shape[0] * rate)),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    poisson_sampling=drawn,
)
for _, (x, y) in zip(range(6 if drawn else 2), loader, strict=False):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
    optimizer.step()
