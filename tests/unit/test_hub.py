# SPDX-License-Identifier: Apache-2.0
"""Models that cannot be had are a sentence: what is missing or wrong, and what to do."""

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from opacus_memprof import hub
from opacus_memprof.errors import MemprofError


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


def test_adapters_are_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    peft = SimpleNamespace(LoraConfig=dict, get_peft_model=lambda model, config: (model, config))
    monkeypatch.setitem(sys.modules, "peft", peft)
    assert hub.with_adapters("m", 8, 16, bias="none") == ("m", {"r": 8, "lora_alpha": 16, "bias": "none"})
