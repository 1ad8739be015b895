# SPDX-License-Identifier: Apache-2.0
"""What planning a large model takes of a small machine: one step of one rank on a virtual GPU, as JSON.

    python -m benchmarks.virtual_gpu.large [CASE ...] [--kind h100] [--tokens 2048]

`70b` is a Llama-3.1-70B in bf16 under FSDP2 with AdamW and checkpointed blocks, rank 0 of 64. `8b-ghost` is a
Llama-3.1-8B with LoRA under FSDP2 and Opacus' ghost_fsdp, rank 0 of 1024. Each runs in a process of its own; seconds
are of the whole process, and count from its start.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

STARTED = time.monotonic()
RANKS = {"70b": 64, "8b-ghost": 1024}
SHAPES = {
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "8b-ghost": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
}
SHARED = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "use_cache": False}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(RANKS)}; all where none is named")
    parser.add_argument("--kind", default="h100")
    parser.add_argument("--tokens", type=int, default=2048, help="of a sample; each rank has one")
    parser.add_argument("--ranks", type=int, help="in place of the case's own")
    parser.add_argument("--here", action="store_true", help="run the one case in this process")
    args = parser.parse_args()
    if args.here:
        print(json.dumps(run(args.cases[0], args.kind, args.tokens, args.ranks)))
        return
    for case in args.cases or RANKS:
        command = [sys.executable, __file__, case, "--here", "--kind", args.kind, "--tokens", str(args.tokens)]
        command += ["--ranks", str(args.ranks or RANKS[case])]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        print(done.stdout.splitlines()[-1], flush=True)


def run(case: str, kind: str, tokens: int, ranks: int) -> dict[str, object]:
    from opacus_memprof import virtual_gpu

    gpu = virtual_gpu.start(kind, count=8)
    virtual_gpu.simulate_rank(0, ranks)
    phases: dict[str, float] = {}
    host: dict[str, int] = {}

    def mark(phase: str) -> None:
        phases[phase] = round(time.monotonic() - STARTED, 2)
        host[phase] = peak_rss()

    import torch
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    mark("imports")
    config = LlamaConfig(**SHAPES[case], **SHARED, dtype="bfloat16")
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    step = prepare_ghost(model, tokens) if case == "8b-ghost" else prepare_plain(model, tokens)
    allocated = torch.cuda.memory_allocated()
    mark("sharded")
    step()
    mark("step")
    return {
        "case": case,
        "gpu": gpu.gpu.name,
        "torch": torch.__version__,
        "ranks": ranks,
        "parameters": parameters,
        "tokens": tokens,
        "sharded_bytes": allocated,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "seconds": phases,
        "peak_rss_bytes": host,
    }


def peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def prepare_plain(model, tokens):  # type: ignore[no-untyped-def]
    import torch
    from torch.distributed.fsdp import fully_shard

    model.gradient_checkpointing_enable()
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cuda")
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        batch = torch.randint(0, model.config.vocab_size, (1, tokens), device="cuda")
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()

    return step


def prepare_ghost(model, tokens):  # type: ignore[no-untyped-def]
    import torch
    import torch.distributed as dist
    from opacus import PrivacyEngine
    from opacus.utils.fsdp_utils import FSDP2Wrapper
    from peft import LoraConfig, get_peft_model
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    adapters = LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], lora_dropout=0.0)
    with torch.device("meta"):
        model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
    model = FSDP2Wrapper(model)
    model.to_empty(device="cuda")
    model.train()
    private, optimizer, criterion, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(torch.zeros(1)), batch_size=1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode="ghost_fsdp",
    )

    def step() -> None:
        batch = torch.randint(0, 128256, (1, tokens), device="cuda")
        logits = private(batch).logits
        criterion(logits.flatten(0, 1), batch.flatten(), shape=logits.shape).backward()
        # Over more ranks than the adapters have rows, torch 2.15 refuses what follows on the noise: the gradients come
        # back from view_as sharded otherwise than the parameters, which AdamW updates in place.
        if dist.get_world_size() <= adapters.r:
            optimizer.step()
        else:
            optimizer.pre_step()

    return step


if __name__ == "__main__":
    main()
