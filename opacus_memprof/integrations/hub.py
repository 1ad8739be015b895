# SPDX-License-Identifier: Apache-2.0
"""Loads models from the Hugging Face hub, and adds LoRA adapters. Importing it loads neither torch nor the client."""

import os
import re
import socket
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from opacus_memprof.errors import MemprofError, require

_TIMEOUT_S = 10
_unreachable = False  # whether this process has found the hub unreachable
_REFUSED = re.compile(r"\b(gated|private|restricted|unauthorized|40[13])\b", re.IGNORECASE)  # in the hub's messages
_PATH = re.compile(r"[./~]|.*[/\\].*[/\\]|.*[/\\]$")  # what is a path, and not an id such as org/model
_HUB = "https://huggingface.co"


def use_cache_if_hub_unreachable() -> None:
    """Sets HF_HUB_OFFLINE if the hub cannot be reached, because its client would retry for a minute.

    Call it before the client is imported.
    """
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT", _HUB))
    if "HF_HUB_OFFLINE" in os.environ or urllib.request.getproxies().get(endpoint.scheme):
        return
    port = endpoint.port or (443 if endpoint.scheme == "https" else 80)
    try:
        socket.create_connection((endpoint.hostname or "", port), timeout=_TIMEOUT_S).close()
    except OSError:
        global _unreachable
        _unreachable = True
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
    if _PATH.match(model):
        model = os.path.expanduser(model)
        if not os.path.isdir(model):
            raise MemprofError(f"there is no folder {model}: correct the path, or {remedy}")
    transformers = require("transformers", "language models")
    token = token or os.environ.get("HF_TOKEN") or None
    try:
        return getattr(transformers, auto_class).from_pretrained(model, token=token, **options)
    except Exception as error:  # the client, the network and file formats raise exceptions of any type
        reason, advice = _explain(error, model, token)
        advice = f"{advice}; or {remedy}" if advice else remedy
        raise MemprofError(f'the model "{model}" cannot be loaded ({reason}): {advice}') from None


def _explain(error: BaseException, model: str, token: str | None) -> tuple[str, str]:
    """Returns the reason why a model cannot be loaded, and what to do about it, "" if the message says it all."""
    causes = list(_causes(error))
    page = f"{_HUB}/{model}"
    responses: Iterator[Any] = (getattr(cause, "response", None) for cause in causes)
    response = next((found for found in responses if found is not None), None)
    kinds = {type(cause).__name__ for cause in causes}
    if response is None:
        if offline := _describe_offline(kinds):
            return offline
        gated = _REFUSED.search(str(error))
        ask = f"if it is gated, ask for access on {page} and pass a token with --token or HF_TOKEN"
        return short_message(error, token), ask if gated else ""
    status, sent = response.status_code, bool(token) or "authorization" in response.request.headers
    if status == 403:
        return (
            "403: this token has no access to it" if sent else "403: it is gated",
            f"ask for access on {page}; a fine-grained token (--token or HF_TOKEN) also needs the permission to read "
            "public gated repositories",
        )
    if status == 404 or "RepositoryNotFoundError" in kinds:
        return f"{status}: the hub has no such model, or it is private", (
            "check its name; a private one needs a token of its owner (--token or HF_TOKEN)"
        )
    if status == 401 and sent:
        return "401: the hub refused the token", (
            f"pass a complete one that is neither expired nor revoked, of {_HUB}/settings/tokens, with --token or "
            "HF_TOKEN"
        )
    if status == 401:
        return "401: it is gated, and there is no token", (
            f"ask for access on {page} and pass a token of {_HUB}/settings/tokens with --token or HF_TOKEN"
        )
    return short_message(error, token), ""


def _describe_offline(kinds: set[str]) -> tuple[str, str] | None:
    """Returns the reason and the advice if the hub was not asked or did not answer; otherwise None."""
    if not kinds & {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "ConnectTimeout"}:
        return None
    value = os.environ.get("HF_HUB_OFFLINE", "")
    if value.upper() in ("1", "ON", "YES", "TRUE") and not _unreachable:
        why = f"HF_HUB_OFFLINE is {value}, and the model is not in the cache"
        return why, "unset HF_HUB_OFFLINE to download it"
    endpoint = os.environ.get("HF_ENDPOINT", _HUB)
    why = f"{endpoint} cannot be reached, and the model is not in the cache"
    return why, "connect this machine, or name a mirror that it reaches in HF_ENDPOINT"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields the error and what caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


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
    peft = require("peft", "LoRA adapters")
    try:
        return peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=alpha, **options))
    except (TypeError, ValueError) as error:
        raise MemprofError(f"the model cannot be given LoRA adapters: {error}") from error


def short_message(error: BaseException, token: str | None = None) -> str:
    """Returns the first line of the error's message, with the token, or HF_TOKEN, replaced by ***."""
    reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
    token = token or os.environ.get("HF_TOKEN")
    return reason.replace(token, "***") if token else reason
