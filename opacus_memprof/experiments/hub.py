# SPDX-License-Identifier: Apache-2.0
"""The Hugging Face hub, before its client is loaded. Needs no torch."""

import os
import socket
import urllib.request
from urllib.parse import urlsplit

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


def why(error: BaseException) -> str:
    """The first line of what the client says, without the token."""
    first = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
    token = os.environ.get("HF_TOKEN")
    return first.replace(token, "***") if token else first
