# SPDX-License-Identifier: Apache-2.0
"""Loads models from the Hugging Face hub, and adds LoRA adapters. Importing it loads neither torch nor the client."""

import os
import re
import socket
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.optional import require

_TIMEOUT_S = 10
_REFUSED = re.compile(r"\b(gated|private|restricted|unauthorized|40[13])\b", re.IGNORECASE)  # in the hub's messages


def use_cache_if_hub_unreachable() -> None:
    """Sets HF_HUB_OFFLINE if the hub cannot be reached, because its client would retry for a minute.

    Call it before the client is imported.
    """
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    if "HF_HUB_OFFLINE" in os.environ or urllib.request.getproxies().get(endpoint.scheme):
        return
    port = endpoint.port or (443 if endpoint.scheme == "https" else 80)
    try:
        socket.create_connection((endpoint.hostname or "", port), timeout=_TIMEOUT_S).close()
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"


def load_pretrained(auto_class: str, model: str, remedy: str, *, token: str | None = None, **options: Any) -> Any:
    """Loads a model of transformers.

    Args:
        auto_class: name of a class of transformers, such as "AutoModelForCausalLM".
        model: an id on the hub or a local path.
        remedy: a remedy for the message if it cannot be loaded.
        token: token of the hub. Default: HF_TOKEN.
        options: options of `from_pretrained`.

    Raises:
        MemprofError: transformers is missing, or the model cannot be loaded.
    """
    transformers = require("transformers", "language models", "models")
    token = token or os.environ.get("HF_TOKEN") or None
    try:
        return getattr(transformers, auto_class).from_pretrained(model, token=token, **options)
    except Exception as error:  # the client, the network and file formats raise exceptions of any type
        if _REFUSED.search(str(error)):
            remedy = (
                f"if it is gated, ask for access on its page and pass a token with --token or HF_TOKEN; or {remedy}"
            )
        raise MemprofError(f'the model "{model}" cannot be loaded ({short_message(error, token)}): {remedy}') from None


def with_adapters(model: Any, rank: int, alpha: int, **options: Any) -> Any:
    """Adds LoRA adapters to a model with peft.

    Args:
        model: a model of transformers.
        rank: `r` of LoraConfig.
        alpha: `lora_alpha` of LoraConfig.
        options: further options of LoraConfig.

    Raises:
        MemprofError: peft is missing, or it cannot adapt the model.
    """
    peft = require("peft", "LoRA adapters", "models")
    try:
        return peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=alpha, **options))
    except (TypeError, ValueError) as error:
        raise MemprofError(f"the model cannot be given LoRA adapters: {error}") from error


def short_message(error: BaseException, token: str | None = None) -> str:
    """Returns the first line of the error's message, with the token, or HF_TOKEN, replaced by ***."""
    reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
    token = token or os.environ.get("HF_TOKEN")
    return reason.replace(token, "***") if token else reason
