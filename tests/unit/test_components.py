# SPDX-License-Identifier: Apache-2.0
"""Components by the names that real models give their modules, and what rolls up."""

from collections.abc import Callable
from pathlib import Path

import pytest
from event_files import EventFile
from torch import nn

from opacus_memprof.analysis.components import Components
from opacus_memprof.analysis.profile import build_profile
from opacus_memprof.errors import MemprofError

# A model's modules that have parameters, as a set for each component. Written by reading the models.
EXPECTED: dict[str, dict[str, set[str]]] = {
    "gpt2": {
        "embedding": {"transformer.wte", "transformer.wpe"},
        "norm": {"transformer.h.0.ln_1", "transformer.h.0.ln_2", "transformer.ln_f"},
        "attention": {"transformer.h.0.attn.c_attn", "transformer.h.0.attn.c_proj"},
        "mlp": {"transformer.h.0.mlp.c_fc", "transformer.h.0.mlp.c_proj"},
        "head": {"score"},
    },
    "llama_lora": {
        "embedding": {"base_model.model.model.embed_tokens"},
        "attention": {
            *(f"base_model.model.model.layers.0.self_attn.{part}_proj" for part in "kvo"),
            "base_model.model.model.layers.0.self_attn.q_proj.base_layer",
        },
        "mlp": {
            *(f"base_model.model.model.layers.0.mlp.{part}_proj" for part in ("gate", "down")),
            "base_model.model.model.layers.0.mlp.up_proj.base_layer",
        },
        "lora": {
            f"base_model.model.model.layers.0.{layer}.lora_{half}.default"
            for layer in ("self_attn.q_proj", "mlp.up_proj")
            for half in "AB"
        },
        "norm": {
            "base_model.model.model.layers.0.input_layernorm",
            "base_model.model.model.layers.0.post_attention_layernorm",
            "base_model.model.model.norm",
        },
        "head": {"base_model.model.lm_head"},
    },
    "bert": {
        "embedding": {f"bert.embeddings.{part}_embeddings" for part in ("word", "position", "token_type")},
        "norm": {
            "bert.embeddings.LayerNorm",
            "bert.encoder.layer.0.attention.output.LayerNorm",
            "bert.encoder.layer.0.output.LayerNorm",
        },
        "attention": {
            *(f"bert.encoder.layer.0.attention.self.{part}" for part in ("query", "key", "value")),
            "bert.encoder.layer.0.attention.output.dense",
        },
        "mlp": {"bert.encoder.layer.0.intermediate.dense", "bert.encoder.layer.0.output.dense"},
        "head": {"bert.pooler.dense", "classifier"},
    },
    "lstm": {"embedding": {"embedding"}, "recurrent": {"lstm"}, "head": {"head"}},
}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    return GPT2ForSequenceClassification(GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2))


def llama_lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes))
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    return BertForSequenceClassification(BertConfig(num_attention_heads=2, **sizes))


def lstm() -> nn.Module:
    return nn.ModuleDict({"embedding": nn.Embedding(5, 4), "lstm": nn.LSTM(4, 4), "head": nn.Linear(4, 2)})


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "image_size": 8, "patch_size": 4}
    return ViTForImageClassification(ViTConfig(num_attention_heads=2, **sizes))


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic")
    )


def with_parameters(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if list(module.parameters(recurse=False))}


@pytest.mark.parametrize("build", [gpt2, llama_lora, bert, lstm])
def test_real_models(build: Callable[[], nn.Module]) -> None:
    components, found = Components(), dict[str, set[str]]()
    for name in with_parameters(build()):
        found.setdefault(components(name), set()).add(name)
    assert found == EXPECTED[build.__name__]


@pytest.mark.parametrize("build", [vit, resnet])
def test_vision_models_by_the_layers_types(build: Callable[[], nn.Module]) -> None:
    """Nothing is left over, and norms, convolutions and heads are what their classes say."""
    components = Components()
    modules = with_parameters(build())
    assert len(modules) > 8
    for name, module in modules.items():
        component = components(name)
        assert component != "other", name
        assert (component == "norm") == ("Norm" in type(module).__name__), name
        if isinstance(module, nn.Conv2d):
            assert component == ("embedding" if build is vit else "conv"), name
        assert (component == "head") == name.startswith("classifier"), name
        if build is vit and isinstance(module, nn.Linear) and component != "head":
            assert component == ("attention" if "attention" in name else "mlp"), name


@pytest.mark.parametrize(
    ("name", "component"),
    [
        ("", "other"),
        ("blocks.0.attention.qkv", "attention"),
        ("tokens", "embedding"),
        ("encoder.embed.lora_embedding_A", "lora"),
        ("model.layers.3.self_attn.q_norm", "norm"),
        ("ensemble.0", "other"),
        ("fc", "head"),
        ("fc1", "mlp"),
        ("layer1.0.downsample.0", "conv"),
        ("layer1.0.bn1", "norm"),
        ("0", "other"),
    ],
)
def test_names(name: str, component: str) -> None:
    assert Components()(name) == component


def a_file() -> EventFile:
    file = EventFile()
    file.add("alloc", 0x1000, 100, "model_parameters", module="blocks.0.attn.q_proj")
    file.add("alloc", 0x2000, 20, "gradients", module="blocks.0.attn.q_proj")
    file.add("alloc", 0x3000, 7, "gradients", module="blocks.0.attn")
    file.add("alloc", 0x4000, 3000, "gradients", module="blocks.1.mlp.c_fc")
    return file.add("alloc", 0x5000, 50_000, "inputs")


def test_a_profile_rolls_up(tmp_path: Path) -> None:
    profile = build_profile(a_file().write(tmp_path), status="finished", exit_code=0)
    peak = profile["devices"]["cuda:0"]["peak"]
    assert peak["components"] == {
        "attention": {"model_parameters": 100, "gradients": 27},
        "mlp": {"gradients": 3000},
        "other": {"inputs": 50_000},
    }
    assert peak["module_tree"] == {
        "": 53_127,
        "blocks": 3127,
        "blocks.0": 127,
        "blocks.0.attn": 127,
        "blocks.0.attn.q_proj": 120,
        "blocks.1": 3000,
        "blocks.1.mlp": 3000,
        "blocks.1.mlp.c_fc": 3000,
    }
    assert profile["components"] == {}


def test_the_user_s_rules_come_first(tmp_path: Path) -> None:
    rules = {r"^blocks\.0": "first block", r"attn": "never"}
    profile = build_profile(a_file().write(tmp_path), status="finished", exit_code=0, components=rules)
    components = profile["devices"]["cuda:0"]["peak"]["components"]
    assert {name: sum(sizes.values()) for name, sizes in components.items()} == {
        "first block": 127,
        "mlp": 3000,
        "other": 50_000,
    }
    assert profile["components"] == rules


def test_a_rule_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(MemprofError, match=r"the rule '\(' for the component 'mine' is not a regular expression"):
        build_profile(a_file().write(tmp_path), status="finished", exit_code=0, components={"(": "mine"})


def test_a_second_model_s_prefix_changes_no_component() -> None:
    component = Components({r"^encoder": "mine"})
    for prefix in ("", "MLP#2.", "AttentionNet#12."):
        names = [f"{prefix}{name}" for name in ("blocks.0.attn.qkv", "encoder.0", "fc", "0")]
        assert [component(name) for name in names] == ["attention", "mine", "head", "other"]
    assert component("MLP#2") == "other"
