# SPDX-License-Identifier: Apache-2.0
"""Components by what the modules are: of models whose names say nothing, or something else."""

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

import opacus_memprof
from opacus_memprof.analysis.components import Components
from opacus_memprof.analysis.profile import load_profile
from opacus_memprof.hooks.components import components_of
from opacus_memprof.hooks.modules import named_modules
from tests.warm_python import ENVIRONMENT, interpreter

VOCABULARY, WIDTH = 100, 16


class Block(nn.Module):
    """Names that say nothing, and no classes of its own for attention and MLP."""

    def __init__(self, widening: int = 4) -> None:
        super().__init__()
        self.n1 = nn.LayerNorm(WIDTH)
        self.a = nn.Linear(WIDTH, 3 * WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)
        self.n2 = nn.LayerNorm(WIDTH)
        self.c = nn.Linear(WIDTH, widening * WIDTH)
        self.g = nn.GELU()
        self.d = nn.Linear(widening * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.a(self.n1(x)).chunk(3, dim=-1)
        x = x + self.b(functional.scaled_dot_product_attention(q, k, v))
        return x + self.d(self.g(self.c(self.n2(x))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.Linear(WIDTH, VOCABULARY)
        self.e = nn.Embedding(VOCABULARY, WIDTH)
        self.p = nn.Embedding(8, WIDTH)
        self.l = nn.ModuleList(Block() for _ in range(2))
        self.n = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.e(tokens) + self.p(torch.arange(tokens.shape[1]).expand_as(tokens))
        for block in self.l:
            x = block(x)
        return self.h(self.n(x))


def components_by_module(model: nn.Module) -> dict[str, str]:
    """Of each module but the model itself."""
    named = list(named_modules(model))
    component = Components(known=components_of(named))
    return {name: component(name) for name, _ in named[1:]}


GPT = {
    "h": "head",
    "e": "embedding",
    "p": "embedding",
    "l": "other",
    "n": "norm",
    **{
        f"l.{block}{part}": component
        for block in range(2)
        for part, component in {
            "": "block",
            ".n1": "norm",
            ".a": "attention",
            ".b": "attention",
            ".n2": "norm",
            ".c": "mlp",
            ".g": "mlp",
            ".d": "mlp",
        }.items()
    },
}


def test_a_gpt_whose_names_say_nothing() -> None:
    assert components_by_module(Gpt()) == GPT


@pytest.mark.parametrize(("size", "component"), [(1, "conv"), (4, "embedding")])
def test_a_first_convolution_that_cuts_patches_is_an_embedding(size: int, component: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, size, size), nn.Flatten(), nn.Linear(8, 2))
    assert components_of([*model.named_modules()])["0"] == component


_BLOCKS = ["separate", "three", "grouped", "fused and grouped", "gated", "fused gate", "MLP only"]


@pytest.mark.parametrize("widths", _BLOCKS)
def test_the_widths_of_a_block_tell_what_its_linears_do(widths: str) -> None:
    d = WIDTH
    heads: dict[str, list[tuple[int, int]]] = {
        "separate": [(d, d)] * 4,
        "three": [(d, d)] * 3,
        "grouped": [(d, d), (d, d // 4), (d, d // 4), (d, d)],
        "fused and grouped": [(d, d + d // 2), (d, d)],
        "MLP only": [],
    }
    mlps = {"gated": [(d, 3 * d), (d, 3 * d), (3 * d, d)], "fused gate": [(d, 8 * d), (4 * d, d)]}
    attention, mlp = heads.get(widths, [(d, 3 * d), (d, d)]), mlps.get(widths, [(d, 4 * d), (4 * d, d)])
    if widths == "gated":  # an MLP of three widths would read as queries, keys and values in one otherwise
        attention = [(d, d)] * 4
    expected = ["attention"] * len(attention) + ["mlp"] * len(mlp)
    for kind in (nn.Linear, lambda width, to: Conv1D(to, width)):
        layers = nn.ModuleList(kind(*widths) for widths in [*attention, *mlp])
        components = components_by_module(nn.Sequential(nn.Embedding(9, d), nn.ModuleList([layers]), nn.Linear(d, 9)))
        assert [components[f"1.0.{number}"] for number in range(len(layers))] == expected


def test_a_linear_between_blocks_is_no_head() -> None:
    first, second = (nn.ModuleList([Block()]) for _ in range(2))
    model = nn.Sequential(nn.Embedding(9, WIDTH), first, nn.Linear(WIDTH, WIDTH), second, nn.Linear(WIDTH, 9))
    assert [components_by_module(model)[name] for name in ("2", "4")] == ["other", "head"]


def test_an_mlp_before_the_attention_is_told_apart() -> None:
    layers = [(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 3 * WIDTH), (WIDTH, WIDTH)]
    blocks = nn.ModuleList([nn.ModuleList(nn.Linear(*widths) for widths in layers)])
    components = components_by_module(nn.Sequential(nn.Embedding(9, WIDTH), blocks, nn.Linear(WIDTH, 9)))
    assert [components[f"1.0.{number}"] for number in range(4)] == ["mlp", "mlp", "attention", "attention"]


class Misleading(nn.Module):
    """Names of other things."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.Embedding(VOCABULARY, WIDTH)
        self.mlp_layers = nn.ModuleList(Block() for _ in range(2))
        self.embed = nn.LayerNorm(WIDTH)
        self.conv_attn = nn.LSTM(WIDTH, WIDTH)
        self.norm = nn.Conv1d(WIDTH, WIDTH, 3)
        self.mlp = nn.MultiheadAttention(WIDTH, 2)
        self.attn = nn.Linear(WIDTH, VOCABULARY)


def test_names_of_other_things_mislead_nobody() -> None:
    components = components_by_module(Misleading())
    assert {name: components[name] for name, _ in Misleading().named_children()} == {
        "attention_norm": "embedding",
        "mlp_layers": "mlp",  # a list computes nothing
        "embed": "norm",
        "conv_attn": "recurrent",
        "norm": "conv",
        "mlp": "attention",
        "attn": "head",
    }
    for part, component in {"": "block", ".n1": "norm", ".a": "attention", ".b": "attention", ".c": "mlp"}.items():
        assert components[f"mlp_layers.1{part}"] == component


def test_models_without_blocks() -> None:
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))
    assert list(components_by_module(plain).values()) == ["mlp", "mlp", "mlp", "head"]
    as_wide_as_its_vocabulary = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    assert list(components_by_module(as_wide_as_its_vocabulary).values()) == ["embedding", "mlp", "head"]
    listed = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)), nn.Linear(8, 2))
    assert list(components_by_module(listed).values()) == [*["other", "mlp", "mlp"] * 2, "head"]
    images = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2))
    assert list(components_by_module(images).values()) == ["conv", "norm", "conv", "conv", "head"]
    patches = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.Conv2d(8, 8, 2, stride=2))
    assert list(components_by_module(patches).values()) == ["embedding", "conv"]


def test_adapters_on_names_that_say_nothing() -> None:
    from peft import LoraConfig, get_peft_model

    components = components_by_module(get_peft_model(Gpt(), LoraConfig(r=2, target_modules=["a", "c", "d"])))
    inside = "base_model.model."
    for name, component in GPT.items():
        assert components[inside + name] == component, name
        for part in ("lora_A", "lora_A.default", "lora_B.default"):
            assert components.get(f"{inside}{name}.{part}", "lora") == "lora"
    assert components[f"{inside}l.0.a.base_layer"] == "attention"
    assert components[f"{inside}l.1.d.base_layer"] == "mlp"


def transformers_models() -> dict[str, Any]:
    import transformers

    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return {
        "GPT-NeoX": transformers.GPTNeoXConfig(**sizes, num_attention_heads=4),
        "Gemma 2": transformers.Gemma2Config(**sizes, **heads, head_dim=8),  # attention is wider than the model
        "Mixture of experts": transformers.Qwen2MoeConfig(
            **sizes, **heads, num_experts=4, moe_intermediate_size=8, shared_expert_intermediate_size=8
        ),
    }


@pytest.mark.parametrize("kind", ["GPT-NeoX", "Gemma 2", "Mixture of experts"])
def test_models_of_transformers(kind: str) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(transformers_models()[kind])
    components = components_by_module(model)
    for name, module in model.named_modules():
        if module._parameters:
            attention, mlp = "attention" in name or "attn" in name, "mlp" in name
            expected = "attention" if attention else "mlp" if mlp else "head"
            if "Norm" in type(module).__name__:
                expected = "norm"
            elif isinstance(module, nn.Embedding):
                expected = "embedding"
            assert components[name] == expected, name


def test_a_profile_says_what_the_modules_are(tmp_path: Path) -> None:
    model = Gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(VOCABULARY, (4, 8))
    with opacus_memprof.profile(tmp_path, device="cpu") as session:
        session.attach(model, optimizer)
        functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
    peak = session.result["devices"]["cpu"]["peak"]
    parameters: dict[str, int] = {}
    for name, module in model.named_modules():
        size = sum(parameter.nbytes for parameter in module.parameters(recurse=False))
        if size:
            parameters[GPT[name]] = parameters.get(GPT[name], 0) + size
    counted = {name: sizes.get("model_parameters", 0) for name, sizes in peak["components"].items()}
    assert {name: size for name, size in counted.items() if size and name != "other"} == parameters
    assert sum(sum(sizes.values()) for sizes in peak["components"].values()) == peak["requested_bytes"]
    assert peak["components"]["other"] == peak["modules"][""]  # the batch and the loss, which no module has made
    names = json.loads((tmp_path / "meta.json").read_text())["names"]
    assert dict(zip(names["modules"], names["components"], strict=True))["l.1.c"] == "mlp"


def test_a_killed_run_knows_them_too(tmp_path: Path) -> None:
    program = f"""
import os, signal, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch, opacus_memprof
from test_module_components import Gpt
session = opacus_memprof.profile(sys.argv[1], device="cpu")
session.start()
model = Gpt()
session.attach(model)
model(torch.zeros(2, 8, dtype=torch.int64)).sum().backward()
opacus_memprof.recording.native.write_meta()
time.sleep(1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    ran = subprocess.run([*interpreter(), "-c", program, str(tmp_path / "p")], env=ENVIRONMENT, timeout=300)
    assert ran.returncode == -signal.SIGKILL
    components = load_profile(tmp_path / "p")["devices"]["cpu"]["peak"]["components"]
    assert components.keys() >= {"attention", "mlp", "embedding", "norm", "head"}
