# SPDX-License-Identifier: Apache-2.0
"""The batches: SNLI where the model has a tokenizer and the data set can be reached, otherwise random tokens."""

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from opacus_memprof.experiments.configuration import Configuration
from opacus_memprof.experiments.shapes import CLASSES
from opacus_memprof.hub import why

SNLI = "stanfordnlp/snli"


@dataclass(frozen=True)
class Data:
    """`loader` gives (input_ids [batch, tokens], targets) of `batch_size` samples; targets are the next tokens
    [batch, tokens], or classes [batch]. `source` is "snli" or "synthetic", `reason` a sentence on why."""

    loader: "DataLoader[Any]"
    source: str
    reason: str


def load(configuration: Configuration, vocabulary: int, padding: int | None) -> Data:
    """As many samples as the run needs.

    Args:
        configuration: of the run.
        vocabulary: how many tokens the model knows.
        padding: what fills samples up; None where the model has no tokenizer.
    """
    samples = configuration.batch_size * (configuration.warmup_steps + configuration.num_steps)
    source, reason = "synthetic", "random tokens: random weights have no tokenizer"
    dataset = None
    if padding is not None:
        try:
            dataset = _snli(configuration, samples, padding)
            source, reason = "snli", f"the train split of {SNLI}"
        except Exception as error:  # the hub's client, its network and its file formats raise anything
            reason = f"random tokens: SNLI cannot be loaded ({why(error)})"
    if dataset is None:
        dataset = _random_tokens(configuration, samples, vocabulary)
    return Data(DataLoader(dataset, batch_size=configuration.batch_size), source, reason)


def _random_tokens(configuration: Configuration, samples: int, vocabulary: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(configuration.seed)
    # 0 stands for padding, which a classifier looks for.
    tokens = torch.randint(1, vocabulary, (samples, configuration.seq_length + 1), generator=generator)
    if configuration.task == "classification":
        return TensorDataset(tokens[:, :-1].clone(), torch.randint(CLASSES, (samples,), generator=generator))
    return TensorDataset(tokens[:, :-1].clone(), tokens[:, 1:].clone())


def _snli(configuration: Configuration, samples: int, padding: int) -> TensorDataset:
    """Pairs of sentences, padded or cut to seq_length; from the beginning again where there are too few."""
    import datasets  # type: ignore[import-not-found, unused-ignore]
    import transformers

    token = os.environ.get("HF_TOKEN") or None
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(configuration.model, token=token)
    pairs = [
        row
        for row in datasets.load_dataset(SNLI, split=f"train[:{2 * samples + 64}]", token=token)
        if row["label"] >= 0  # -1: the annotators did not agree
    ]
    pairs = [pairs[index % len(pairs)] for index in range(samples)]
    length = configuration.seq_length + 1
    encoded = torch.full((samples, length), padding)
    for row, pair in zip(encoded, pairs, strict=True):
        tokens = tokenizer(pair["premise"], pair["hypothesis"], truncation=True, max_length=length)["input_ids"]
        row[: len(tokens)] = torch.tensor(tokens)
    if configuration.task == "classification":
        return TensorDataset(encoded[:, :-1].clone(), torch.tensor([pair["label"] for pair in pairs]))
    return TensorDataset(encoded[:, :-1].clone(), encoded[:, 1:].clone())
