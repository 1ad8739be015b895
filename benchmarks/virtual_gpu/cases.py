# SPDX-License-Identifier: Apache-2.0
"""The trainings that are run on the real GPU and on the virtual one: a list, and drawn ones. Knows no torch."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from benchmarks.virtual_gpu import convolution_cases


@dataclass(frozen=True)
class Case:
    """One training of three logical steps.

    Attributes:
        model: a name that models.py knows.
        mode: "vanilla" or Opacus' grad_sample_mode, flash_clip among them.
        clipping: Opacus' clipping.
        checkpoint: "", "reentrant" or "new": the blocks are computed again in backward.
        autocast: "", "bf16" or "fp16" (with a GradScaler).
        pure: "", "bf16" or "fp16": the type of the parameters and the inputs.
        tf32: whether convolutions in fp32 may use TF32, as torch lets them.
        benchmark: cudnn.benchmark.
        physical: samples of a physical batch under BatchMemoryManager; 0 is without.
        accumulate: batches that make one step.
        workers: processes that load data, into pinned memory.
        settings: PYTORCH_CUDA_ALLOC_CONF.
        wrap: "", "ddp" (Opacus' own unless vanilla) or "fsdp2".
        ranks: processes, each on a GPU of its own.
    """

    name: str
    model: str
    mode: str = "vanilla"
    batch: int = 8
    optimizer: str = "adamw"
    clipping: str = "flat"
    checkpoint: str = ""
    autocast: str = ""
    pure: str = ""
    tf32: bool = True
    benchmark: bool = False
    poisson: bool = False
    physical: int = 0
    accumulate: int = 1
    workers: int = 0
    channels_last: bool = False
    compiled: bool = False
    graph: bool = False
    settings: str = ""
    wrap: str = ""
    ranks: int = 1
    steps: int = 3


EXPANDABLE = "expandable_segments:True"

CASES = (
    # a GPT in every mode
    Case("gpt vanilla", "gpt"),
    Case("gpt hooks", "gpt", "hooks"),
    Case("gpt functorch", "gpt-small", "functorch"),
    Case("gpt ew", "gpt-small", "ew"),
    Case("gpt ghost", "gpt", "ghost"),
    Case("gpt flash_clip", "gpt", "flash_clip"),
    Case("gpt ghost_fsdp", "gpt", "ghost_fsdp", wrap="fsdp2"),
    # what a training may do besides
    Case("gpt hooks, clipping per layer", "gpt", "hooks", clipping="per_layer"),
    Case("gpt hooks, adaptive clipping", "gpt-small", "hooks", clipping="adaptive"),
    Case("gpt hooks, reentrant checkpoints", "gpt", "hooks", checkpoint="reentrant"),
    Case("gpt vanilla, checkpoints", "gpt", checkpoint="new"),
    Case("gpt flash_clip, checkpoints", "gpt", "flash_clip", checkpoint="new"),
    Case("gpt hooks, autocast bf16", "gpt", "hooks", autocast="bf16"),
    Case("gpt ghost, autocast bf16", "gpt", "ghost", autocast="bf16"),
    Case("gpt vanilla, autocast fp16", "gpt", autocast="fp16"),
    Case("gpt hooks, Poisson sampling", "gpt", "hooks", poisson=True),
    Case("gpt hooks, BatchMemoryManager", "gpt", "hooks", batch=24, physical=8, poisson=True),
    Case("gpt ghost, BatchMemoryManager", "gpt", "ghost", batch=24, physical=8, poisson=True),
    Case("gpt hooks, accumulation", "gpt-small", "hooks", accumulate=2),
    Case("gpt hooks, expandable segments", "gpt", "hooks", settings=EXPANDABLE),
    Case("gpt ghost, expandable segments", "gpt", "ghost", settings=EXPANDABLE),
    Case("gpt vanilla, split size", "gpt", settings="max_split_size_mb:64,garbage_collection_threshold:0.8"),
    Case("gpt vanilla, SGD", "gpt", optimizer="sgd"),
    Case("gpt hooks, SGD with momentum", "gpt", "hooks", optimizer="momentum"),
    Case("gpt vanilla, fused Adam", "gpt", optimizer="fused"),
    Case("gpt hooks, Adam without foreach", "gpt", "hooks", optimizer="single"),
    Case("gpt vanilla, compiled", "gpt-small", compiled=True),
    Case("gpt vanilla, CUDA graph", "gpt-small", graph=True),
    # Hugging Face
    Case("Llama vanilla", "llama"),
    Case("Llama hooks", "llama", "hooks"),
    Case("Llama ghost", "llama", "ghost"),
    Case("Llama LoRA hooks", "llama-lora", "hooks"),
    Case("Llama LoRA ghost", "llama-lora", "ghost"),
    Case("Llama LoRA flash_clip", "llama-lora", "flash_clip"),
    Case("GPT-2 hooks", "gpt2", "hooks"),
    Case("GPT-2 LoRA hooks", "gpt2-lora", "hooks"),
    Case("BERT hooks", "bert", "hooks", batch=16),
    Case("BERT vanilla, autocast bf16", "bert", batch=32, autocast="bf16"),
    Case("ViT hooks", "vit", "hooks", batch=16),
    Case("T5 vanilla", "t5", batch=16),
    Case("T5 LoRA hooks", "t5-lora", "hooks", batch=16),
    Case("Mixtral vanilla", "mixtral", batch=4),
    Case("Mixtral LoRA hooks", "mixtral-lora", "hooks", batch=4),
    # convolutions
    Case("ResNet-18 vanilla", "resnet18", batch=64),
    Case("ResNet-18 hooks", "resnet18-private", "hooks", batch=16),
    Case("ResNet-18 vanilla, channels last", "resnet18", batch=64, channels_last=True),
    Case("ResNet-50 hooks", "resnet50", "hooks", batch=12),
    Case("ResNet-50 vanilla, autocast bf16", "resnet50", batch=32, autocast="bf16"),
    Case("CIFAR CNN hooks, data workers", "cifar-cnn", "hooks", batch=256, workers=2, poisson=True),
    Case("CIFAR CNN ghost", "cifar-cnn", "ghost", batch=256),
    Case("CIFAR CNN functorch", "cifar-cnn", "functorch", batch=128),
    Case("CIFAR CNN ew", "cifar-cnn", "ew", batch=128),
    Case("VGG hooks", "vgg", "hooks", batch=16, optimizer="momentum"),
    Case("U-Net hooks", "unet", "hooks", batch=16),
    Case("audio CNN hooks", "audio", "hooks", batch=64),
    Case("text CNN hooks", "text-cnn", "hooks", batch=64),
    # recurrent, and others
    Case("LSTM vanilla", "lstm", batch=64),
    Case("DPLSTM hooks", "dp-lstm", "hooks", batch=64),
    Case("DPLSTM functorch", "dp-lstm", "functorch", batch=32),
    Case("DPGRU hooks", "dp-gru", "hooks", batch=64),
    Case("DPMultiheadAttention hooks", "dp-attention", "hooks", batch=32),
    Case("60 000 classes, hooks", "wide-head", "hooks", batch=32, optimizer="sgd"),
    Case("60 000 classes, ghost", "wide-head", "ghost", batch=64),
    Case("60 000 classes, flash_clip", "wide-head", "flash_clip", batch=64),
    # two GPUs
    Case("gpt vanilla, DDP on two GPUs", "gpt", wrap="ddp", ranks=2),
    Case("gpt hooks, DPDDP on two GPUs", "gpt", "hooks", wrap="ddp", ranks=2),
    Case("gpt vanilla, FSDP2 on two GPUs", "gpt", wrap="fsdp2", ranks=2),
    Case("gpt ghost_fsdp on two GPUs", "gpt", "ghost_fsdp", wrap="fsdp2", ranks=2),
)

BY_NAME = {case.name: case for case in CASES}
MOST_BYTES = 1 << 30  # of a drawn batch's activations, of its per-sample gradients, and of its unfolded inputs
MOST_PRODUCTS = 1 << 40


def drawn(seed: int, number: int) -> Case:
    """Draws a training of a convolutional network, the same one each time for the same two numbers."""
    model = f"drawn {seed} {number}"
    randomly = random.Random(model)
    network = convolution_cases.network(randomly)
    mode = randomly.choice(("vanilla", "vanilla", "hooks", "ghost", "flash_clip"))
    private = mode != "vanilla"
    outputs, weights, unfolded, products = 0, 0, 0, 0
    for conv in network:
        places, taps = math.prod(conv.output()[2:]), math.prod(conv.weight[2:])
        outputs += math.prod(conv.output())
        weights += math.prod(conv.weight)
        unfolded = max(unfolded, places * taps * conv.input[1])
        products += math.prod(conv.input if conv.transposed else conv.output()) * math.prod(conv.weight[1:])
    most = min(MOST_BYTES // (16 * outputs), MOST_PRODUCTS // products)
    if private:
        most = min(most, MOST_BYTES // (4 * weights), MOST_BYTES // (4 * unfolded))
    numbers = randomly.choice(("tf32", "tf32", "fp32", "autocast bf16", "autocast fp16", "bf16", "fp16"))
    if private and numbers == "autocast fp16":  # which needs a GradScaler, whose losses cannot be clipped
        numbers = "autocast bf16"
    most = max(1, min(most, 300))
    batch = randomly.randint(most // 4 + 1, most)
    last, benchmark = len(network[0].input) > 3 and randomly.random() < 0.3, randomly.random() < 0.2
    words = [model, mode, numbers, f"batch {batch}", *["channels last"] * last, *["benchmark"] * benchmark]
    *auto, kind = numbers.split()
    return Case(
        ", ".join(words), model, mode, batch, autocast=kind if auto else "", tf32=kind != "fp32",
        pure="" if auto or kind in ("tf32", "fp32") else kind, channels_last=last, benchmark=benchmark,
    )  # fmt: skip


def named(name: str) -> Case:
    """Returns the case of the list, or the drawn one, that has this name."""
    if name in BY_NAME:
        return BY_NAME[name]
    _, seed, number = name.partition(",")[0].split()
    return drawn(int(seed), int(number))
