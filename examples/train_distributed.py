# SPDX-License-Identifier: Apache-2.0
"""Trains with Opacus on several processes, on made-up tokens. An ordinary script: it knows of no profiler.

    torchrun --nproc-per-node 2 -m opacus_memprof run -o memprof_profile examples/train_distributed.py --wrap fsdp2

The model is a GPT-like transformer of which everything is trained, or a Llama with LoRA. Under FSDP2 it is made without
memory and then in shards, so that no GPU holds all of it.
"""

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.utils.fsdp_utils import FSDP2Wrapper
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from train_transformer import Transformer

GPT = {
    "gpt-tiny": {"vocabulary": 1000, "width": 96, "heads": 4, "blocks": 2},
    "gpt": {"vocabulary": 16000, "width": 1024, "heads": 16, "blocks": 12},
}
LLAMA = {
    "llama-tiny": {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 224, "num_hidden_layers": 2},
    "llama-3.1-8b": {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
}
HEADS = {"llama-tiny": (4, 2), "llama-3.1-8b": (32, 8)}  # of queries, and of keys and values


def llama(name: str, rank: int) -> nn.Module:
    """A Llama of random weights in bf16, frozen except LoRA's adapters on the attention's projections."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    heads, kv_heads = HEADS[name]
    config = LlamaConfig(
        **LLAMA[name], num_attention_heads=heads, num_key_value_heads=kv_heads, use_cache=False, dtype="bfloat16"
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return get_peft_model(
        model, LoraConfig(r=rank, target_modules=targets, lora_dropout=0.0), autocast_adapter_dtype=False
    )


def fill(model: nn.Module, device: torch.device) -> None:
    """Gives the shards of a model that was made without memory theirs, and random values."""
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shard = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            if parameter.ndim > 1:
                shard.normal_(std=0.02)
            else:
                shard.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
    for module in model.modules():
        if hasattr(module, "inv_freq"):  # of Llama's rotary embedding: a buffer, which to_empty has emptied
            module._buffers.update(type(module)(module.config).to(device)._buffers)


def build(args: argparse.Namespace, device: torch.device) -> nn.Module:
    def make() -> nn.Module:
        return (
            Transformer(**GPT[args.model], length=args.length)
            if args.model in GPT
            else llama(args.model, args.lora_rank)
        )

    torch.manual_seed(args.seed)
    if args.wrap != "fsdp2":
        wrap = DistributedDataParallel if args.wrap == "ddp" else DifferentiallyPrivateDistributedDataParallel
        return wrap(make().to(device))
    with torch.device("meta"):
        model = make()
    computed = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if args.bf16 else MixedPrecisionPolicy()
    model = FSDP2Wrapper(model, mp_policy=computed)
    fill(model, device)
    return model


def prepare(args: argparse.Namespace, device: torch.device) -> tuple[Any, Any, Callable[[Tensor], float]]:
    """The private model, its optimizer, and what trains one step on tokens (batch, length + 1) and returns the loss."""
    model = build(args, device)
    mode = args.mode or ("ghost_fsdp" if args.wrap == "fsdp2" else "hooks")
    private, optimizer, *criteria, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(torch.zeros(args.batch)), batch_size=args.batch),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    criterion = criteria[0] if criteria else nn.CrossEntropyLoss()

    def step(tokens: Tensor) -> float:
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:]
        optimizer.zero_grad()
        output = private(inputs)
        logits = output if isinstance(output, Tensor) else output.logits
        # The criterion of ghost clipping needs to know which tokens make a sample.
        shape = {"shape": logits.shape} if criteria else {}
        loss = criterion(logits.flatten(0, 1), targets.flatten(), **shape)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return private, optimizer, step


def batch(args: argparse.Namespace, device: torch.device) -> Tensor:
    """Each rank has tokens of its own."""
    vocabulary = GPT[args.model]["vocabulary"] if args.model in GPT else LLAMA[args.model]["vocab_size"]
    return torch.randint(vocabulary, (args.batch, args.length + 1), device=device)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt-tiny", choices=[*GPT, *LLAMA])
    parser.add_argument("--wrap", default="ddp", choices=["ddp", "dpddp", "fsdp2"])
    parser.add_argument("--mode", help="Opacus' grad_sample_mode (default: hooks, and ghost_fsdp under FSDP2)")
    parser.add_argument("--bf16", action="store_true", help="FSDP2 computes in bf16")
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4, help="samples of each rank")
    parser.add_argument("--length", type=int, default=32, help="tokens of a sample")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def start() -> torch.device:
    """Joins the other processes; returns this one's device."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def main() -> None:
    args = arguments().parse_args()
    device = start()
    _, _, step = prepare(args, device)
    torch.manual_seed(args.seed + 1 + dist.get_rank())
    for number in range(args.steps):
        loss = step(batch(args, device))
        if dist.get_rank() == 0:
            print(f"step {number}: loss {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
