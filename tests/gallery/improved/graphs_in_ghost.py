# SPDX-License-Identifier: Apache-2.0
"""Graph network over dense adjacency of each graph, ghost clipping."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class GCN(nn.Module):
    def __init__(self, d=64, w=256, out=10):
        super().__init__()
        self.l1, self.l2, self.l3 = nn.Linear(d, w), nn.Linear(w, w), nn.Linear(w, w)
        self.head = nn.Linear(w, out)

    def forward(self, x, adj):
        x = torch.relu(adj @ self.l1(x))
        x = torch.relu(adj @ self.l2(x))
        x = torch.relu(adj @ self.l3(x))
        return self.head(x.mean(1))


model = GCN().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loader = DataLoader(
    TensorDataset(torch.randn(256, 300, 64), torch.rand(256, 300, 300), torch.randint(10, (256,))), batch_size=128
)
model, optimizer, criterion, loader = PrivacyEngine().make_private(
    module=model,
    optimizer=optimizer,
    data_loader=loader,
    criterion=nn.CrossEntropyLoss(),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    poisson_sampling=False,
    grad_sample_mode="ghost",
)
for x, adj, y in loader:
    optimizer.zero_grad()
    loss = criterion(model(x.cuda(), adj.cuda()), y.cuda())
    loss.backward()
    optimizer.step()
