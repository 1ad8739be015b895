# SPDX-License-Identifier: Apache-2.0
"""What hours of sessions leave behind: `python -m benchmarks.profiling.soak [--minutes 60] [--device cpu] [--seed 0]`.

A child trains a small GPT: it begins a session before or after it makes the model private, in a mode that is drawn,
takes snapshots, writes checkpoints, ends the session, trains on without one, and begins the next. At moments that are
drawn it is killed with SIGKILL; the profile that it leaves is read, and the next child goes on from its checkpoint.

Prints a JSON object for each child: sessions, steps, snapshots, those whose remainder was not 0, what its resident
memory grew by from the fifth session on, the status of the profile that it left, and what was wrong: a remainder, a
child that ended by itself, a profile that cannot be read or whose categories do not add up to its bytes, or more than
16 MiB of growth. Exits with 1 where something was.
"""

import argparse
import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import opacus
import torch
from torch.utils.data import DataLoader, TensorDataset

import opacus_memprof
from benchmarks.profiling.small_gpt import SmallGPT, lm_loss
from opacus_memprof.analysis.profile import load_profile

MODES = ("vanilla", "hooks", "ghost", "flash_clip")
SHAPE = {"vocabulary": 64, "width": 32, "layers": 2, "heads": 2}
SETTLED = 5  # sessions, after which memory is compared
MOST_GROWTH = 16.0  # MiB
MEAN_LIFE = 60.0  # seconds from a child's first session to its death


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Child:
    """Trains until it is killed, and prints a line after each session."""

    def __init__(self, directory: Path, device: str, seed: int) -> None:
        self.directory, self.device = directory, device
        self.checkpoint = directory / "checkpoint.pt"
        self.random = random.Random(seed)
        self.steps = self.snapshots = self.with_remainder = 0

    def train(self) -> None:
        sessions = 0
        while True:
            self.session()
            sessions += 1
            gc.collect()
            row = {
                "sessions": sessions,
                "steps": self.steps,
                "snapshots": self.snapshots,
                "with_remainder": self.with_remainder,
                "resident_mib": resident_mib(),
            }
            print(json.dumps(row), flush=True)

    def session(self) -> None:
        mode = self.random.choice(MODES)
        model = SmallGPT(**SHAPE).to(self.device)
        if self.checkpoint.exists():
            model.load_state_dict(torch.load(self.checkpoint, map_location=self.device))
        is_late = self.random.random() < 0.5
        training = self.prepare(mode, model) if is_late else None
        with opacus_memprof.profile(self.directory / "profile", device=self.device) as session:
            if training is None:
                session.attach(opacus.PrivacyEngine)
                training = self.prepare(mode, model)
            if is_late or mode == "vanilla":
                session.attach(*(part for part in training[:2]))
            for _ in range(self.random.randrange(5, 40)):
                self.step(training)
                if self.random.random() < 0.2:
                    taken = session.snapshot("now")
                    self.snapshots += 1
                    self.with_remainder += any(device.remainder for device in taken.devices.values())
                if self.random.random() < 0.1:
                    self.save(model)
        for _ in range(self.random.randrange(3)):
            self.step(training)

    def prepare(self, mode: str, model: SmallGPT) -> tuple[Any, ...]:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        tokens = torch.randint(SHAPE["vocabulary"], (64, 17))
        loader = DataLoader(TensorDataset(tokens), batch_size=8)
        if mode == "vanilla":
            return model, optimizer, lm_loss, loader
        made = opacus_memprof.PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            criterion=torch.nn.CrossEntropyLoss(),
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            grad_sample_mode=mode,
        )
        private, optimizer, *criterion, loader = made
        return private, optimizer, *(criterion or [torch.nn.CrossEntropyLoss()]), loader

    def step(self, training: tuple[Any, ...]) -> None:
        model, optimizer, criterion, loader = training
        (tokens,) = next(iter(loader))
        tokens = tokens.to(self.device)
        logits = model(tokens[:, :-1].contiguous())
        is_opacus = criterion is not lm_loss  # whose own takes one target of each sample
        loss = criterion(logits[:, -1], tokens[:, -1]) if is_opacus else criterion(logits, tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        self.steps += 1

    def save(self, model: SmallGPT) -> None:
        written = self.checkpoint.with_suffix(".new")
        torch.save(model.state_dict(), written)
        written.replace(self.checkpoint)


def life_of_a_child(directory: Path, device: str, seed: int, seconds: float) -> dict[str, Any]:
    """A child's figures, from its first session to its death, and what is wrong with what it leaves."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.profiling.soak",
        "--child",
        str(directory),
        "--device",
        device,
        "--seed",
        str(seed),
    ]
    rows: list[dict[str, Any]] = []
    with (directory / "errors.txt").open("w") as errors:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert child.stdout is not None
        first = child.stdout.readline()
        time.sleep(seconds if first else 0.0)
        child.send_signal(signal.SIGKILL)
        for line in [first, *child.stdout]:
            if line.endswith("\n"):  # not where it died in the middle of one
                rows.append(json.loads(line))
        ended = child.wait()
    wrong = []
    if ended != -signal.SIGKILL or not rows:
        wrong.append(f"it ended by itself: {(directory / 'errors.txt').read_text()[-500:]}")
    resident = [row.pop("resident_mib") for row in rows]
    row: dict[str, Any] = rows[-1] if rows else {"with_remainder": 0}
    row["growth_mib"] = round(resident[-1] - resident[SETTLED - 1], 1) if len(rows) > SETTLED else 0.0
    if row["with_remainder"]:
        wrong.append("remainders are not 0")
    if row["growth_mib"] > MOST_GROWTH:
        wrong.append("its memory grew")
    try:
        profile = load_profile(directory / "profile")
        row["status"] = profile.status
        for name, found in profile.devices.items():
            if sum(found.peak.categories.values()) != found.peak.requested_bytes:
                wrong.append(f"the categories at {name}'s peak do not add up")
    except opacus_memprof.MemprofError as error:
        if "there is neither profile.json nor events.bin in it" in str(error):
            row["status"] = "not begun"  # the earlier profile had gone, and the next had no event yet
        else:
            wrong.append(str(error))
    return {**row, "wrong": wrong}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        warnings.simplefilter("ignore")  # Opacus' on its random numbers
        torch.set_num_threads(1)
        Child(options.child, options.device, options.seed).train()
    drawn = random.Random(options.seed)
    end = time.monotonic() + 60 * options.minutes
    is_right = True
    with tempfile.TemporaryDirectory() as folder:
        while (left := end - time.monotonic()) > 0:
            life = min(drawn.expovariate(1 / MEAN_LIFE), left)
            row = life_of_a_child(Path(folder), options.device, drawn.randrange(2**31), life)
            print(json.dumps(row), flush=True)
            is_right = is_right and not row["wrong"]
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
