# SPDX-License-Identifier: Apache-2.0
"""Loads training data: the user's own, SNLI, or random tokens.

SNLI is used if the model has a tokenizer and the hub can be reached.
"""

import csv
import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from opacus_memprof.errors import MemprofError, require
from opacus_memprof.experiments.configuration import CLASSES, Configuration
from opacus_memprof.integrations.hub import short_message

SNLI = "stanfordnlp/snli"


@dataclass(frozen=True)
class TrainingData:
    """A data set in batches.

    Attributes:
        loader: yields (input_ids [batch, tokens], targets); targets are the next tokens [batch, tokens], or classes
            [batch].
        source: "snli", "own" or "synthetic".
        reason: a sentence with the reason for this source.
    """

    loader: "DataLoader[Any]"
    source: str
    reason: str


def load_data(configuration: Configuration, vocabulary: int, padding: int | None) -> TrainingData:
    """Loads as many samples as the run needs, repeating them if there are too few.

    Args:
        configuration: the configuration of the run.
        vocabulary: the number of tokens in the model's vocabulary.
        padding: the padding token; None if the model has no tokenizer.

    Raises:
        MemprofError: the user's own data set cannot be loaded, or its samples do not fit the model.
    """
    samples = configuration.batch_size * (configuration.warmup_steps + configuration.num_steps)
    source, reason = "synthetic", "random tokens: random weights have no tokenizer"
    dataset: Any = None
    if configuration.dataset is not None:
        dataset = _load_own(configuration, configuration.dataset, samples, vocabulary, padding)
        source, reason = "own", configuration.dataset
    elif padding is not None:
        try:
            dataset = _load_snli(configuration, samples, padding)
            source, reason = "snli", f"the train split of {SNLI}"
        except Exception as error:  # the hub's client, its network and its file formats may raise anything
            reason = f"random tokens: SNLI cannot be loaded ({short_message(error)})"
    if dataset is None:
        dataset = _random_tokens(configuration, samples, vocabulary)
    return TrainingData(DataLoader(dataset, batch_size=configuration.batch_size), source, reason)


def _random_tokens(configuration: Configuration, samples: int, vocabulary: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(configuration.seed)
    # 0 stands for padding, which a classifier looks for.
    tokens = torch.randint(1, vocabulary, (samples, configuration.seq_length + 1), generator=generator)
    if configuration.task == "classification":
        return TensorDataset(tokens[:, :-1].clone(), torch.randint(CLASSES, (samples,), generator=generator))
    return TensorDataset(tokens[:, :-1].clone(), tokens[:, 1:].clone())


def _load_snli(configuration: Configuration, samples: int, padding: int) -> TensorDataset:
    datasets = require("datasets", "data sets of the hub")
    token = os.environ.get("HF_TOKEN") or None
    rows = [
        row
        for row in datasets.load_dataset(SNLI, split=f"train[:{2 * samples + 64}]", token=token)
        if row["label"] >= 0  # -1: the annotators did not agree
    ]
    return _tokenize(configuration, rows, samples, padding)


def _tokenize(
    configuration: Configuration, rows: Sequence[Mapping[str, Any]], samples: int, padding: int
) -> TensorDataset:
    """Returns the data set of texts (`text`, or `premise` and `hypothesis`) as tokens, padded or cut to seq_length."""
    tokenizer = _tokenizer(configuration)
    rows = [rows[index % len(rows)] for index in range(samples)]
    length = configuration.seq_length + 1
    encoded = torch.full((samples, length), padding)
    for line, row in zip(encoded, rows, strict=True):
        texts = [row["text"]] if "text" in row else [row["premise"], row["hypothesis"]]
        tokens = tokenizer(*texts, truncation=True, max_length=length)["input_ids"]
        line[: len(tokens)] = torch.tensor(tokens)
    if configuration.task == "classification":
        return TensorDataset(encoded[:, :-1].clone(), torch.tensor([int(row["label"]) for row in rows]))
    return TensorDataset(encoded[:, :-1].clone(), encoded[:, 1:].clone())


def _tokenizer(configuration: Configuration) -> Any:
    transformers = require("transformers", "tokenizers")
    return transformers.AutoTokenizer.from_pretrained(configuration.model, token=os.environ.get("HF_TOKEN") or None)


def _load_own(configuration: Configuration, name: str, samples: int, vocabulary: int, padding: int | None) -> Any:
    """Loads the user's data set, from a file of texts, `MODULE:FUNCTION` or `FILE.py:FUNCTION`.

    The function is called with the configuration and the tokenizer (None without one). It returns a torch data set or a
    list of (input_ids [tokens], target).

    Raises:
        MemprofError: it cannot be loaded, or its samples do not fit the model.
    """
    if Path(name).suffix in (".jsonl", ".csv"):
        if padding is None:
            raise MemprofError(
                f"{name} holds texts, and random weights have no tokenizer: give --model-name, or a function that "
                "returns tokens (--dataset MODULE:FUNCTION)"
            )
        return _tokenize(configuration, _read_texts(Path(name), configuration), samples, padding)
    dataset = _import_function(name)(configuration, None if padding is None else _tokenizer(configuration))
    try:
        count = len(dataset)
        tokens, target = (torch.as_tensor(part) for part in dataset[0])
    except (TypeError, ValueError, LookupError) as error:
        raise MemprofError(
            f"{name} did not return a list of samples (input_ids, target): {short_message(error)}"
        ) from error
    shapes = {"classification": (), "language_model": (configuration.seq_length,)}
    targets = CLASSES if configuration.task == "classification" else vocabulary
    for field, part, shape, limit in (
        ("input_ids", tokens, (configuration.seq_length,), vocabulary),
        ("target", target, shapes[configuration.task], targets),
    ):
        if tuple(part.shape) != shape or part.dtype != torch.int64 or not 0 <= part.min() <= part.max() < limit:
            raise MemprofError(
                f"the {field} of the first sample of {name} are {part.dtype} of shape {list(part.shape)}: return "
                f"torch.int64 of shape {list(shape)}, from 0 to {limit - 1}"
            )
    return Subset(dataset, [index % count for index in range(samples)])


def _read_texts(path: Path, configuration: Configuration) -> list[dict[str, Any]]:
    """Returns the rows of a file of JSON lines, or of CSV with a header. Raises MemprofError if it is not usable."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file)) if path.suffix == ".csv" else [json.loads(line) for line in file]
    except (OSError, ValueError, RecursionError) as error:
        raise MemprofError(f"the data set {path} cannot be read ({error}): correct it or its path") from error
    needed = ["label"] if configuration.task == "classification" else []
    for number, row in enumerate(rows, 1):
        texts = isinstance(row, dict) and ("text" in row or {"premise", "hypothesis"} <= row.keys())
        if not texts or any(key not in row for key in needed):
            raise MemprofError(
                f"row {number} of {path} lacks what is needed: give each a `text` (or `premise` and `hypothesis`)"
                + (" and a `label`" if needed else "")
            )
        if needed and str(row["label"]) not in map(str, range(CLASSES)):
            raise MemprofError(f"row {number} of {path} has the label {row['label']!r}: use 0 to {CLASSES - 1}")
    if not rows:
        raise MemprofError(f"the data set {path} is empty: give it at least one row")
    return rows


def _import_function(name: str) -> Any:
    module, colon, function = name.rpartition(":")
    if not colon:
        raise MemprofError(f"{name} is not a dataset: give a .jsonl or .csv file, MODULE:FUNCTION or FILE.py:FUNCTION")
    if module.endswith(".py"):
        sys.path.insert(0, str(Path(module).parent))
        module = Path(module).stem
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise MemprofError(
            f"the data set {name} cannot be imported ({short_message(error)}): correct its name"
        ) from error
