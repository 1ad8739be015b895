# SPDX-License-Identifier: Apache-2.0
"""Models that cannot be had are a sentence: what is missing or wrong, and what to do."""

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from opacus_memprof.errors import MemprofError
from opacus_memprof.integrations import hub


@pytest.mark.parametrize(
    ("package", "use"),
    [
        ("transformers", lambda: hub.load_pretrained("AutoModelForCausalLM", "x", "use another")),
        ("peft", lambda: hub.with_adapters(object(), 8, 16)),
    ],
)
def test_a_package_that_is_missing(package: str, use: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MemprofError, match=rf"need {package}, which .*: pip install {package}$"):
        use()


def test_nothing_tells_people_to_install_this_package_from_an_index() -> None:
    """Before the first release an index does not have it."""
    root = Path(__file__).parents[2]
    files = [*(root / "opacus_memprof").rglob("*.py"), *(root / "docs").glob("*.md")]
    named = re.compile(r"pip install ['\"]?opacus-memprof\b(?! @)")
    assert [file.name for file in files if named.search(file.read_text(encoding="utf-8"))] == []


def test_what_installs_it_is_there() -> None:
    root = Path(__file__).parents[2]
    assert ".[models,pictures,train]" in (root / "requirements.txt").read_text().splitlines()
    extras = (root / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    assert {"models", "pictures"} <= {line.partition(" = ")[0] for line in extras.splitlines()}


@pytest.mark.parametrize(("token", "sent"), [("hf_given", "hf_given"), (None, "hf_own"), ("", "hf_own")])
def test_a_token_is_sent_and_never_told(token: str | None, sent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def refuse(model: str, **options: object) -> None:
        seen.update(options, model=model)
        raise RuntimeError(f"no access with {options['token']}.\nmore")

    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(Auto=SimpleNamespace(from_pretrained=refuse)))
    monkeypatch.setenv("HF_TOKEN", "hf_own")
    with pytest.raises(MemprofError) as raised:
        hub.load_pretrained("Auto", "org/model", "use another", token=token, dtype="bf16")
    assert str(raised.value) == 'the model "org/model" cannot be loaded (no access with ***): use another'
    assert seen == {"model": "org/model", "token": sent, "dtype": "bf16"}


@pytest.mark.parametrize(
    ("message", "is_gated"),
    [
        ("You are trying to access a gated repo.\n401 Client Error", True),
        ("403 Forbidden: please enable access to public gated repositories", True),
        ("x is not a local folder. If this is a private repository, pass a token", True),
        ("there is no config.json in x40133", False),
    ],
)
def test_a_gated_model_s_error_names_both_token_options(
    message: str, is_gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(model: str, **options: object) -> None:
        raise OSError(message)

    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(Auto=SimpleNamespace(from_pretrained=refuse)))
    with pytest.raises(MemprofError, match=r"use another$") as raised:
        hub.load_pretrained("Auto", "org/model", "use another")
    assert all((word in str(raised.value)) == is_gated for word in ("--token", "HF_TOKEN"))


# What the hub answers: a status, its headers.
ANSWERS = {
    "refused": (401, {"X-Error-Message": "Invalid credentials in Authorization header"}),
    "gated": (401, {"X-Error-Code": "GatedRepo"}),
    "denied": (403, {"X-Error-Code": "GatedRepo"}),
    "narrow": (403, {"X-Error-Message": "Please enable access to public gated repositories"}),
    "missing": (404, {"X-Error-Code": "RepoNotFound"}),
}
MODELS = ["org/refused", "org/gated", "org/denied", "org/narrow", "org/missing", "./not_here"]
PROGRAM = """
import sys
from opacus_memprof.errors import MemprofError
from opacus_memprof.integrations import hub
hub.use_cache_if_hub_unreachable()
for model in sys.argv[2:]:
    try:
        hub.load_pretrained("AutoModelForCausalLM", model, "use another", token=sys.argv[1])
    except MemprofError as error:
        print(error)
"""


class _Hub(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        status, headers = ANSWERS[self.path.split("/")[-4 if "resolve" in self.path else -1]]
        self.send_response(status)
        for name, value in {**headers, "Content-Length": "0"}.items():
            self.send_header(name, value)
        self.end_headers()

    do_GET = do_HEAD  # noqa: N815  (http.server's name)

    def log_message(self, *_: object) -> None:
        pass


def messages(directory: Path, endpoint: str, token: str, *models: str, **variables: str) -> list[str]:
    kept = (name for name in os.environ if not name.startswith("HF_") and not name.lower().endswith("_proxy"))
    environment = {name: os.environ[name] for name in kept}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(directory), **variables}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, token, *models]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=directory)
    assert "hf_secret" not in ran.stdout
    return ran.stdout.splitlines()


@pytest.mark.parametrize(
    ("token", "refusal", "denial"),
    [("", "no token", "403: it is gated"), ("hf_secret", "refused the token", "no access")],
)
def test_the_hub_s_answers_are_told_apart(token: str, refusal: str, denial: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        told = messages(tmp_path, f"http://127.0.0.1:{server.server_address[1]}", token, *MODELS)
    finally:
        server.shutdown()
        server.server_close()
    refused, gated, denied, narrow, missing, no_folder = told
    assert all("401" in message and refusal in message for message in (refused, gated))
    assert all(denial in message for message in (denied, narrow))
    assert "ask for access on https://huggingface.co/org/denied" in denied
    assert "404: the hub has no such model" in missing
    assert no_folder.startswith("there is no folder ./not_here:")


def test_offline_by_choice_and_by_network_differ(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = f"http://127.0.0.1:{server.getsockname()[1]}"
    (network,) = messages(tmp_path, closed, "", "org/model")
    (choice,) = messages(tmp_path, closed, "", "org/model", HF_HUB_OFFLINE="1")
    assert f"{closed} cannot be reached" in network
    assert "a mirror that it reaches in HF_ENDPOINT" in network
    assert "HF_HUB_OFFLINE is 1" in choice
    assert "unset HF_HUB_OFFLINE" in choice


def test_adapters_are_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    peft = SimpleNamespace(LoraConfig=dict, get_peft_model=lambda model, config: (model, config))
    monkeypatch.setitem(sys.modules, "peft", peft)
    assert hub.with_adapters("m", 8, 16, bias="none") == ("m", {"r": 8, "lora_alpha": 16, "bias": "none"})
