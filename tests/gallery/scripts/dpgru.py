# SPDX-License-Identifier: Apache-2.0
"""Names by language with a GRU after Opacus' char-lstm example."""

import torch
from opacus import PrivacyEngine
from opacus.layers import DPGRU
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class CharNNClassifier(nn.Module):
    def __init__(self, embedding_size, hidden_size, output_size):
        super().__init__()
        self.embedding = nn.Embedding(256, embedding_size)
        self.lstm = DPGRU(embedding_size, hidden_size, batch_first=True)
        self.out_layer = nn.Linear(hidden_size, output_size)

    def forward(self, x):
        x, _ = self.lstm(self.embedding(x), None)
        return self.out_layer(x[:, -1])


def main():
    model = CharNNClassifier(128, 512, 18).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    names = TensorDataset(torch.randint(256, (512, 10)), torch.randint(18, (512,)))
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(names, batch_size=256, drop_last=True),
        noise_multiplier=1.0,
        max_grad_norm=1.5,
        poisson_sampling=False,
    )
    losses = []
    for names, labels in loader:
        logits = model(names.to("cuda"))
        loss = nn.functional.cross_entropy(logits, labels.to("cuda"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())


if __name__ == "__main__":
    main()
