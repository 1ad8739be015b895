# SPDX-License-Identifier: Apache-2.0
"""The program of benchmarks/planning/run_time.py: two steps of a GPT with the sizes of GPT-2, 512 tokens a sample."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import opacus_memprof
from opacus_memprof.experiments.models import Transformer

sys.path.insert(0, str(Path(__file__).parents[2]))  # it is run as a file
from benchmarks.virtual_gpu.models import MeanCrossEntropy

VOCABULARY, WIDTH, LAYERS, HEADS, TOKENS, STEPS = 50257, 768, 12, 12, 512, 2

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--mode", default="hooks")
parser.add_argument("--batch-size", type=int, default=8)
args = parser.parse_args()

with torch.device("cuda"):
    model: Any = Transformer(VOCABULARY, WIDTH, LAYERS, HEADS, TOKENS)
tokens = torch.zeros(args.batch_size * STEPS, TOKENS, dtype=torch.int64)
model, optimizer, *criteria, loader = opacus_memprof.PrivacyEngine().make_private(
    module=model,
    optimizer=torch.optim.AdamW(model.parameters()),
    criterion=MeanCrossEntropy(),
    data_loader=DataLoader(TensorDataset(tokens, tokens), batch_size=args.batch_size),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    poisson_sampling=False,
    grad_sample_mode=args.mode,
)
criterion: Any = criteria[0] if criteria else MeanCrossEntropy()
for inputs, targets in loader:
    criterion(model(inputs.cuda()), targets.cuda()).backward()
    optimizer.step()
    optimizer.zero_grad()
