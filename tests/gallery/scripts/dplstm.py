# SPDX-License-Identifier: Apache-2.0
"""Sentiment of film reviews by an LSTM: https://github.com/meta-pytorch/opacus/issues/53."""

import torch
from opacus import PrivacyEngine
from opacus.layers import DPLSTM
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class SampleNet(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.emb = nn.Embedding(vocab_size + 4, 100)
        self.lstm = DPLSTM(100, 100, batch_first=True)
        self.pool = nn.AvgPool1d(256)
        self.fc1 = nn.Linear(100, 2)

    def forward(self, x):
        x = self.emb(x)
        x, _ = self.lstm(x)
        x = self.pool(x.transpose(1, 2)).squeeze(2)
        return self.fc1(x)


device = torch.device("cuda")
model = SampleNet(10_000).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randint(10_000, (200, 256)), torch.randint(2, (200,)))
train_loader = DataLoader(data, batch_size=100)
privacy_engine = PrivacyEngine()
model, optimizer, train_loader = privacy_engine.make_private(
    module=model,
    optimizer=optimizer,
    data_loader=train_loader,
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    poisson_sampling=False,
)
criterion = nn.CrossEntropyLoss()
for step, (reviews, labels) in enumerate(train_loader):
    optimizer.zero_grad()
    loss = criterion(model(reviews.to(device)), labels.to(device))
    loss.backward()
    optimizer.step()
    print(step, privacy_engine.get_epsilon(delta=1e-5))
