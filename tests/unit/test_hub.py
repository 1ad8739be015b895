# SPDX-License-Identifier: Apache-2.0
"""Models that cannot be had are a sentence: what is missing or wrong, and what to do."""

import sys
from collections.abc import Callable
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
    with pytest.raises(MemprofError, match=rf"need {package}, which .*: pip install 'opacus-memprof\[models\]'$"):
        use()


def test_what_installs_it_is_there() -> None:
    root = Path(__file__).parents[2]
    assert ".[models,pictures]" in (root / "requirements.txt").read_text().splitlines()
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
def test_a_gated_model_s_error_names_both_ways_to_give_a_token(
    message: str, is_gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(model: str, **options: object) -> None:
        raise OSError(message)

    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(Auto=SimpleNamespace(from_pretrained=refuse)))
    with pytest.raises(MemprofError, match=r"use another$") as raised:
        hub.load_pretrained("Auto", "org/model", "use another")
    assert all((word in str(raised.value)) == is_gated for word in ("--token", "HF_TOKEN"))


def test_adapters_are_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    peft = SimpleNamespace(LoraConfig=dict, get_peft_model=lambda model, config: (model, config))
    monkeypatch.setitem(sys.modules, "peft", peft)
    assert hub.with_adapters("m", 8, 16, bias="none") == ("m", {"r": 8, "lora_alpha": 16, "bias": "none"})
