# SPDX-License-Identifier: Apache-2.0
"""Lightning, with private training by flash_clip: `configure_optimizers` makes module and optimizer private.

Opacus' data module samples as the privacy guarantee needs. Lightning steps the private optimizer like any other.
"""

import pytorch_lightning as pl
import torch
from opacus.lightning import DPLightningDataModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_memprof


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(64, 64), torch.randint(10, (64,))), batch_size=16)


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch, index):
        features, labels = batch
        loss = nn.functional.cross_entropy(self.layers(features), labels)
        print(f"loss {loss.item():.6f}")
        return loss

    def configure_optimizers(self):
        self.trainer.fit_loop.setup_data()
        _, optimizer, _ = opacus_memprof.PrivacyEngine().make_private(
            module=self,
            optimizer=torch.optim.Adam(self.parameters(), lr=1e-3),
            data_loader=self.trainer.train_dataloader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            grad_sample_mode="flash_clip",
            wrap_model=False,
            noise_generator=torch.Generator(self.device).manual_seed(0),
        )
        return optimizer


def main() -> None:
    torch.manual_seed(0)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(max_epochs=2, devices=1, enable_model_summary=False, **quiet)
    trainer.fit(Classifier(), DPLightningDataModule(Data()))


if __name__ == "__main__":
    main()
