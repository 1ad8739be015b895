# SPDX-License-Identifier: Apache-2.0
"""Lightning with Opacus' data module, profiled.

DPLightningDataModule samples as the privacy guarantee needs; `configure_optimizers` makes module and optimizer private.
Lightning then steps the private optimizer as any other.

    python examples/lightning_training.py
"""

import argparse
from typing import Any

import pytorch_lightning as pl
import torch
from opacus.lightning import DPLightningDataModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_memprof
from opacus_memprof.integrations.lightning import MemprofCallback


class Data(pl.LightningDataModule):
    """Made-up features and labels."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.samples = samples

    def train_dataloader(self) -> Any:
        data = TensorDataset(torch.randn(self.samples, 64), torch.randint(10, (self.samples,)))
        return DataLoader(data, batch_size=32)


class Classifier(pl.LightningModule):
    """Two layers, trained with differential privacy."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = opacus_memprof.PrivacyEngine()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layers(features)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        features, labels = batch
        return nn.functional.cross_entropy(self(features), labels)

    def configure_optimizers(self) -> Any:
        self.trainer.fit_loop.setup_data()
        private, optimizer, _ = self.engine.make_private(
            module=self,
            optimizer=torch.optim.Adam(self.parameters()),
            data_loader=self.trainer.train_dataloader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=True,
        )
        self.wrapped = [private]  # in a list: as a module it would be its own child
        return optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("-o", "--profile", default="memprof_profile")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = Classifier()
    with opacus_memprof.profile(args.profile) as session:
        trainer = pl.Trainer(
            max_epochs=args.epochs,
            accelerator="auto",
            devices=1,
            callbacks=[MemprofCallback()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, DPLightningDataModule(Data(args.samples)))

    print(f"epsilon {model.engine.get_epsilon(delta=1e-5):.2f}")
    for name, found in session.result["devices"].items():
        print(f"{name}: peak of {found['peak']['requested_bytes']} bytes in {found['peak']['phase']}")


if __name__ == "__main__":
    main()
