# SPDX-License-Identifier: Apache-2.0
"""A Flower client that trains privately with flash_clip: what it sends to the server is private already.

The server is not started here: it calls `fit` of each client in each round, as `main` does.
"""

import flwr
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_memprof


class PrivateClient(flwr.client.NumPyClient):
    def __init__(self):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(self.device)
        data = TensorDataset(torch.randn(64, 64), torch.randint(10, (64,)))
        self.private, self.optimizer, self.loader = opacus_memprof.PrivacyEngine().make_private(
            module=self.model,
            optimizer=torch.optim.SGD(self.model.parameters(), lr=0.1),
            data_loader=DataLoader(data, batch_size=16),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            grad_sample_mode="flash_clip",
            noise_generator=torch.Generator(self.device).manual_seed(0),
        )

    def get_parameters(self, config):
        return [value.cpu().numpy() for value in self.model.state_dict().values()]

    def fit(self, parameters, config):
        values = zip(self.model.state_dict(), map(torch.from_numpy, parameters), strict=True)
        self.model.load_state_dict(dict(values))
        for features, labels in self.loader:
            loss = nn.functional.cross_entropy(self.private(features.to(self.device)), labels.to(self.device))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            print(f"loss {loss.item():.6f}")
        return self.get_parameters(config), len(self.loader.dataset), {}


def main() -> None:
    torch.manual_seed(0)
    client = PrivateClient()
    parameters = client.get_parameters({})
    for _ in range(2):
        parameters, _, _ = client.fit(parameters, {})


if __name__ == "__main__":
    main()
