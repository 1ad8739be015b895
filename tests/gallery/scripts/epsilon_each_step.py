# SPDX-License-Identifier: Apache-2.0
"""Opacus' tutorial of an image classifier, with epsilon in each step: https://github.com/meta-pytorch/opacus/issues/446."""

import torch
from opacus import PrivacyEngine
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

model = nn.Sequential(
    nn.Conv2d(3, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(64, 128, 3, padding=1), nn.GroupNorm(8, 128), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(128 * 8 * 8, 512), nn.ReLU(), nn.Linear(512, 10),
).cuda()  # fmt: skip
optimizer = optim.RMSprop(model.parameters(), lr=1e-3)
images = TensorDataset(torch.randn(512, 3, 32, 32), torch.randint(10, (512,)))
privacy_engine = PrivacyEngine()
model, optimizer, train_loader = privacy_engine.make_private(
    module=model,
    optimizer=optimizer,
    data_loader=DataLoader(images, batch_size=128),
    max_grad_norm=1.2,
    noise_multiplier=1.0,
    poisson_sampling=False,
)
criterion = nn.CrossEntropyLoss()
for i, (images, target) in enumerate(train_loader):
    images, target = images.cuda(), target.cuda()
    output = model(images)
    loss = criterion(output, target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    epsilon = privacy_engine.accountant.get_epsilon(delta=1e-5)
    steps = privacy_engine.accountant.history[0][2]
    print(f"step {i}: epsilon {epsilon:.2f}, {epsilon / steps:.3f} for each")
