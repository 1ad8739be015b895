# SPDX-License-Identifier: Apache-2.0
"""Models from the Hugging Face hub, and adapters on them. Loads neither torch nor the hub's client by itself."""

import os
import socket
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from opacus_memprof.errors import MemprofError
from opacus_memprof.optional import require

_SECONDS = 10


def use_the_cache_where_there_is_no_hub() -> None:
    """Its client would try for a minute and say nothing new. Has an effect before the client is imported only."""
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    if "HF_HUB_OFFLINE" in os.environ or urllib.request.getproxies().get(endpoint.scheme):
        return
    port = endpoint.port or (443 if endpoint.scheme == "https" else 80)
    try:
        socket.create_connection((endpoint.hostname or "", port), timeout=_SECONDS).close()
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"


def load_pretrained(auto_class: str, model: str, remedy: str, *, token: str | None = None, **options: Any) -> Any:
    """A model of transformers.

    Args:
        auto_class: of transformers, "AutoModelForCausalLM".
        model: an id on the hub or a local path.
        remedy: what to do where it cannot be loaded.
        token: of the hub; HF_TOKEN without it.
        options: from_pretrained's.

    Raises:
        MemprofError: transformers is missing, or the model cannot be loaded.
    """
    transformers = require("transformers", "language models")
    token = token or os.environ.get("HF_TOKEN") or None
    try:
        return getattr(transformers, auto_class).from_pretrained(model, token=token, **options)
    except Exception as error:  # the hub's client, its network and its file formats raise anything
        raise MemprofError(f'the model "{model}" cannot be loaded ({why(error, token)}): {remedy}') from None


def with_adapters(model: Any, rank: int, alpha: int, **options: Any) -> Any:
    """The model with LoRA adapters by peft; `options` are LoraConfig's.

    Raises:
        MemprofError: peft is missing, or it cannot adapt the model.
    """
    peft = require("peft", "LoRA adapters")
    try:
        return peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=alpha, **options))
    except (TypeError, ValueError) as error:
        raise MemprofError(f"the model cannot be given LoRA adapters: {error}") from error


def why(error: BaseException, token: str | None = None) -> str:
    """The first line of what the client says, without the token, or HF_TOKEN."""
    first = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
    token = token or os.environ.get("HF_TOKEN")
    return first.replace(token, "***") if token else first
