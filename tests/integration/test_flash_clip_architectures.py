# SPDX-License-Identifier: Apache-2.0
"""flash_clip clips public architectures as clipping by hand does, one sample at a time.

Trains all parameters, or LoRA adapters only.
"""

from collections.abc import Iterator

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
LORA = [name for name in [*LANGUAGE, *IMAGE] if name not in WITHOUT_LORA]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", [*LANGUAGE, *IMAGE])
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


@pytest.mark.parametrize("name", LORA)
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
