# SPDX-License-Identifier: Apache-2.0
"""A graph attention network: scores of all pairs of nodes are masked, normalized and dropped in turn."""

import torch
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    def __init__(self, features, heads, hidden):
        super().__init__()
        self.heads, self.hidden = heads, hidden
        self.project = nn.Parameter(torch.randn(features, heads * hidden) * 0.01)
        self.score = nn.Parameter(torch.randn(heads, 2 * hidden, 1) * 0.01)

    def forward(self, nodes, edges):
        nodes = functional.dropout(nodes @ self.project, 0.6).view(-1, self.heads, self.hidden).permute(1, 0, 2)
        scores = nodes @ self.score[:, : self.hidden] + (nodes @ self.score[:, self.hidden :]).mT
        scores = torch.where(edges > 0, functional.leaky_relu(scores, 0.2), -9e16)
        weights = functional.dropout(functional.softmax(scores, -1), 0.6)
        return (weights @ nodes).permute(1, 0, 2).flatten(1)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Attention(300, 8, 8), Attention(64, 1, 7)

    def forward(self, nodes, edges):
        return self.second(functional.elu(self.first(nodes, edges)), edges)


nodes, edges, labels = torch.rand(2000, 300).cuda(), torch.zeros(2000, 2000).cuda(), torch.zeros(2000).long().cuda()
model = Network().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
for _ in range(3):
    optimizer.zero_grad()
    functional.cross_entropy(model(nodes, edges), labels).backward()
    optimizer.step()
