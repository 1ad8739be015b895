# SPDX-License-Identifier: Apache-2.0
"""Attention in windows, with a reentrant checkpoint around each stage."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


class WindowBlock(nn.Module):
    def __init__(self, d, h, w=4):
        super().__init__()
        self.h, self.w = h, w
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        b, s, _, d = x.shape
        w = self.w
        y = self.n1(x).view(b, s // w, w, s // w, w, d).transpose(2, 3).reshape(b, -1, w * w, d)
        q, k, v = self.qkv(y).view(b, -1, w * w, 3, self.h, d // self.h).permute(3, 0, 1, 4, 2, 5)
        a = ((q @ k.transpose(-1, -2)) * (d // self.h) ** -0.5).softmax(-1)
        y = self.proj((a @ v).transpose(2, 3).reshape(b, -1, w * w, d))
        y = y.view(b, s // w, s // w, w, w, d).transpose(2, 3).reshape(b, s, s, d)
        x = x + y
        return x + self.mlp(self.n2(x))


class Swin(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 96, 4, 4)
        self.stage1 = nn.Sequential(*[WindowBlock(96, 3) for _ in range(2)])
        self.merge = nn.Linear(384, 192)
        self.stage2 = nn.Sequential(*[WindowBlock(192, 6) for _ in range(4)])
        self.norm, self.fc = nn.LayerNorm(192), nn.Linear(192, 30)

    def forward(self, img):
        x = self.patch(img).permute(0, 2, 3, 1)
        x = checkpoint(self.stage1, x, use_reentrant=True)
        b, s, _, d = x.shape
        x = self.merge(x.view(b, s // 2, 2, s // 2, 2, d).transpose(2, 3).reshape(b, s // 2, s // 2, 4 * d))
        x = checkpoint(self.stage2, x, use_reentrant=True)
        return self.fc(self.norm(x).mean((1, 2)))


class Trainer:
    def __init__(self):
        self.model = Swin().cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.loader = DataLoader(TensorDataset(torch.randn(72, 3, 128, 128), torch.randint(30, (72,))), batch_size=24)
        self.model, self.optimizer, self.loader = PrivacyEngine().make_private(
            module=self.model,
            optimizer=self.optimizer,
            data_loader=self.loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
        )

    def run(self):
        for x, y in self.loader:
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x.cuda()), y.cuda()).backward()
            self.optimizer.step()


Trainer().run()
