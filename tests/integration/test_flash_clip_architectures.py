# SPDX-License-Identifier: Apache-2.0
"""flash_clip clips public architectures as clipping by hand does, one sample at a time.

Trains all parameters, or LoRA adapters only.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("torchvision")

from opacus_memprof.clipping.layers import GenericLayer
from opacus_memprof.clipping.layers.registry import LayerRegistry
from tests.integration.architectures import IMAGE, LANGUAGE, batch_for, build, losses
from tests.integration.clipping_by_hand import difference

IN_FLOAT32 = {"gemma", "gemma2", "gemma3", "cohere"}
"""Their normalization computes in float32, so that two ways to sum its gradients differ in rounding."""
WITHOUT_LORA = {
    "poolformer": "no linear layers",
    "squeezenet": "no linear layers",
    "mamba": "its mixer uses a linear layer's weight, and not the layer",
    "torchvision_swin": "its attention uses linear layers' weights, and not the layers",
}
PROVED = {"gpt2", "llama", "dinov2"}
"""With adapters, which are the same layers in every model: elsewhere only full training proves the model's own."""
COVERED = {
    "gpt2": ("gpt_bigcode", "gpt_neo", "gpt_neox"),
    "gptj": ("phi",),
    "llama": ("llama_tied", "mistral", "qwen2", "qwen3", "phi3", "olmo", "stablelm", "granite", "starcoder2"),
    "gemma": ("gemma2", "gemma3", "cohere"),
    "mixtral": ("qwen2_moe",),
    "falcon": ("bloom", "mpt"),
    "bert": ("roberta", "distilbert", "electra", "mpnet"),
    "flan_t5": ("t5",),
    "bart": ("marian",),
    "vit": ("deit", "clip_vision"),
    "convnext": ("convnextv2", "torchvision_convnext"),
    "torchvision_swin": ("swin",),
    "resnet_group_norm": ("mobilenet_group_norm", "squeezenet", "segformer"),
    "tests/exactness/test_architectures.py": ("mamba", "deberta"),
}
"""Architectures whose kinds of layers another one has, or its successor there: these are nightly."""
NIGHTLY = {name for others in COVERED.values() for name in others}
ADAPTED = {"gpt2", "llama", "mixtral", "falcon", "bert", "flan_t5", "dinov2", "torchvision_vit"}
"""What can be adapted differs: linear layers, Conv1D, a class of its own, experts, and weights that are used twice."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _all_but(nightly: set[str], left_out: Iterable[str] = ()) -> list[Any]:
    names = [name for name in [*LANGUAGE, *IMAGE] if name not in left_out]
    return [pytest.param(name, marks=pytest.mark.nightly if name in nightly else ()) for name in names]


@pytest.mark.parametrize("name", _all_but(NIGHTLY))
def test_full_training(name: str) -> None:
    torch.manual_seed(0)
    model = build(name)
    assert difference(model, batch_for(name), losses, passes=1) < (1e-5 if name in IN_FLOAT32 else 1e-8)


RECOGNIZED = ["gpt2", "llama", "gemma", "falcon", "cohere", "flan_t5", "bart", "dinov2", "convnext", "poolformer"]


@pytest.mark.parametrize("name", RECOGNIZED)
def test_layers_are_recognized_by_what_they_compute(name: str) -> None:
    """Only parameters that sit beside other layers in a module, and positions that a module makes, remain."""
    torch.manual_seed(0)
    left = {
        type(layer.module).__name__ for layer in LayerRegistry(build(name)).layers() if isinstance(layer, GenericLayer)
    }
    others = {
        "BartLearnedPositionalEmbedding",
        "Dinov2Embeddings",
        "Dinov2LayerScale",
        "ConvNextLayer",
        "PoolFormerLayer",
    }
    assert left <= others


@pytest.mark.parametrize("name", _all_but({*LANGUAGE, *IMAGE} - ADAPTED, WITHOUT_LORA))
def test_lora_adapters(name: str) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = build(name)
    targets = [n for n, module in base.named_modules() if _can_be_adapted(n, module)]
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=targets)).double().train()
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:  # zero at first, which would leave lora_A without gradients
            nn.init.normal_(parameter, std=0.1)
    check = "first" if name in PROVED else "off"
    assert difference(model.base_model.model, batch_for(name), losses, passes=1, check=check) < 1e-8


def _can_be_adapted(name: str, module: nn.Module) -> bool:
    kind = type(module).__name__
    return kind in ("Linear", "Conv1D", "FalconLinear") and not name.endswith(("head", "out_proj", "classifier"))
