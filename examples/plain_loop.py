# SPDX-License-Identifier: Apache-2.0
"""A plain training loop, profiled from inside, with memory by category as scalars for TensorBoard and Weights & Biases.

python examples/plain_loop.py --tensorboard runs --wandb offline
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_memprof
from opacus_memprof.integrations.loggers import Logger, TensorBoardLogger, WandbLogger, log_steps, scalars


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("-o", "--profile", default="memprof_profile")
    parser.add_argument("--tensorboard", metavar="DIR", help="where TensorBoard's files go")
    parser.add_argument("--wandb", choices=["online", "offline"], help="log to Weights & Biases")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    loggers: list[Logger] = []
    if args.tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(args.tensorboard)
        loggers.append(TensorBoardLogger(writer))
    if args.wandb:
        import wandb

        run = wandb.init(project="dp-sgd-memory", mode=args.wandb)
        loggers.append(WandbLogger(run))

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32 * args.steps, 64), torch.randint(10, (32 * args.steps,)))
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    with opacus_memprof.profile(args.profile) as session:
        model, optimizer, loader = opacus_memprof.PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.Adam(model.parameters()),
            data_loader=DataLoader(data, batch_size=32),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        for step, (features, labels) in enumerate(loader, start=1):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(features.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            print(f"step {step}: loss {loss.item():.4f}")
            for logger in loggers:
                logger.log(scalars(), step)  # what is live now, and at the peak so far

    for name, found in session.result["devices"].items():
        print(f"{name}: peak of {found['peak']['requested_bytes']} bytes in {found['peak']['phase']}")
    log_steps(session.result, loggers)  # each step's peak, known once the profile is complete
    if args.tensorboard:
        writer.close()
    if args.wandb:
        run.finish()


if __name__ == "__main__":
    main()
