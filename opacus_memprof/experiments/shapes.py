# SPDX-License-Identifier: Apache-2.0
"""The built-in configurations: random weights in the shapes of known models. Needs no torch."""

from collections.abc import Mapping
from typing import Any

from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments.configuration import SIZES, Configuration

CLASSES = 3  # entailment, neutral, contradiction

_LLAMA_3: dict[str, Any] = {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}

_TRANSFORMER = {"vocab_size": 32000, "hidden_dim": 2048, "num_layers": 20, "num_heads": 16}

# Family, and sizes by the family's names. Sources: the models' own config.json.
_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": ("transformer", {"vocab_size": 256, "hidden_dim": 64, "num_layers": 2, "num_heads": 4}),
    "transformer": ("transformer", _TRANSFORMER),
    "transformer-relu": (
        "transformer",
        {**_TRANSFORMER, "activation": "relu", "attention_bias": False, "last_norm": False},
    ),
    "gpt2": ("gpt2", {"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12}),
    "llama-3.2-1b": (
        "llama",
        {
            **_LLAMA_3,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "tie_word_embeddings": True,
        },
    ),
    "llama-3.2-3b": (
        "llama",
        {
            **_LLAMA_3,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 28,
            "num_attention_heads": 24,
            "tie_word_embeddings": True,
        },
    ),
    "llama-3.1-8b": (
        "llama",
        {
            **_LLAMA_3,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "tie_word_embeddings": False,
        },
    ),
}

BUILT_IN = tuple(_SHAPES)

_SIZE_NAMES: dict[str, tuple[str, str, str, str]] = {  # the families' names of SIZES
    "transformer": SIZES,
    "gpt2": ("vocab_size", "n_embd", "n_layer", "n_head"),
    "llama": ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
}


def shape_of(configuration: Configuration) -> tuple[str, dict[str, Any]]:
    """Returns the family ("transformer", "gpt2" or "llama") and its sizes, with the overrides of the configuration.

    A Llama of another width keeps the proportion of its MLP, and a Llama with other heads that of its groups, as far as
    possible with whole numbers.

    Raises:
        MemprofError: there is no such built-in configuration, or its heads do not divide its width.
    """
    if configuration.model not in _SHAPES:
        raise MemprofError(
            f'there is no built-in configuration "{configuration.model}": use {", ".join(BUILT_IN)}, '
            "or pass a hub id or a local path as the model's name"
        )
    family, shape = _SHAPES[configuration.model]
    sizes = dict(shape)
    names = dict(zip(SIZES, _SIZE_NAMES[family], strict=True))
    for name, family_name in names.items():
        if (value := getattr(configuration, name)) is not None:
            sizes[family_name] = value
    width, heads = sizes[names["hidden_dim"]], sizes[names["num_heads"]]
    if width % heads:
        raise MemprofError(f"{heads} heads do not divide a width of {width}: choose num_heads and hidden_dim that fit")
    if family == "llama":
        _fit_llama(sizes, shape, width, heads)
    return family, sizes


def _fit_llama(sizes: dict[str, Any], shape: Mapping[str, Any], width: int, heads: int) -> None:
    if width // heads % 2:
        raise MemprofError(
            f"{heads} heads of a width of {width} are {width // heads} wide, which rotary positions cannot halve: "
            "choose num_heads and hidden_dim that fit"
        )
    sizes["head_dim"] = width // heads
    sizes["intermediate_size"] = shape["intermediate_size"] * width // shape["hidden_size"]
    groups = max(1, heads * shape["num_key_value_heads"] // shape["num_attention_heads"])
    sizes["num_key_value_heads"] = next(count for count in range(groups, 0, -1) if heads % count == 0)
