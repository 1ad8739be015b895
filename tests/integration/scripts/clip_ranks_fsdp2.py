# SPDX-License-Identifier: Apache-2.0
"""flash_clip under FSDP2 alone: noise of shards, models of transformers, and checkpoints: cases of clip_ranks.py."""

import copy
import shutil
import tempfile
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from opacus_memprof.clipping.kernels import sums
from tests.integration.clipping_by_hand import Batch, by_hand
from tests.integration.flash_clip_models import Engine, criterion
from tests.integration.scripts.rank_training import (
    BOUND,
    EXPECTED,
    SAMPLES,
    WRAPPERS,
    ByHand,
    build,
    by_block,
    by_layer,
    device,
    full,
    part,
    private,
    report,
    together,
)


def shard_noise(case: str, wrap: str) -> None:
    """Noise alone is as strong as in one process and drawn at each shard's shape.

    Two shards have different noise although all ranks give the same generator; replicas have the same.
    """
    torch.manual_seed(5)
    wrapped = WRAPPERS[wrap](nn.Sequential(nn.Linear(300, 301), nn.Linear(301, 4)).to(device(), torch.float64))
    torch.manual_seed(1)
    generator = torch.Generator(device()).manual_seed(3)
    with mock.patch.object(sums, "draw_normal", side_effect=sums.draw_normal) as draw_normal:
        data = TensorDataset(torch.zeros(SAMPLES, 300, dtype=torch.float64), torch.zeros(SAMPLES))
        model, optimizer, _ = Engine().make_private(
            module=wrapped,
            optimizer=torch.optim.SGD(wrapped.parameters(), lr=1.0),
            data_loader=DataLoader(data, batch_size=EXPECTED),
            noise_multiplier=2.0,
            max_grad_norm=BOUND,
            noise_generator=generator,
            grad_sample_mode="flash_clip",
        )
        (model(torch.ones(2, 300, dtype=torch.float64, device=device())) * 0).sum().backward()
        optimizer.step()
    drawn = [tuple(each.shape) for call in draw_normal.call_args_list for each in call.args[0]]
    shapes = [tuple(p.to_local().shape) for p in model.parameters()]
    replica = dist.get_rank() // 2 if wrap == "fsdp2_hybrid" else 0
    assert drawn == ([] if replica else shapes), (drawn, shapes)
    gradient = full(next(model.parameters()).grad).cpu()
    std = 2.0 * BOUND / EXPECTED
    assert abs(float(gradient.std()) / std - 1) < 0.02  # of 90 300 numbers: 8 standard errors
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, gradient)
    assert all(torch.equal(each, gradient) for each in everyones)
    shards = gradient.chunk(2 if wrap == "fsdp2_hybrid" else dist.get_world_size())
    rows = len(shards[-1])
    correlation = float((shards[0][:rows] * shards[-1]).mean()) / std**2
    assert abs(correlation) < 5 / (rows * 300) ** 0.5, correlation
    report(case, 0.0)


def llama(case: str, adapted: bool = False) -> None:
    """A model of transformers, block by block; or adapters alone, beside frozen shards."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=31, num_hidden_layers=2, **sizes))
    if adapted:
        adapters = LoraConfig(r=3, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
        model = get_peft_model(model, adapters)
    model = model.to(device(), torch.float64).train()
    alone = copy.deepcopy(model)
    for block in [each for each in model.modules() if isinstance(each, LlamaDecoderLayer)]:
        fully_shard(block)
    fully_shard(model)
    rank, world = dist.get_rank(), dist.get_world_size()
    ids = torch.randint(0, 31, (2 * world, 7)).to(device())

    def of_samples(model: nn.Module, batch: Batch) -> torch.Tensor:
        logits = model(input_ids=batch["x"], use_cache=False).logits
        return nn.functional.cross_entropy(logits.mT, batch["x"], reduction="none").mean(1)

    module, optimizer, _ = private(model, "mlp", loss_reduction="sum")
    of_samples(module, {"x": ids[2 * rank : 2 * rank + 2]}).sum().backward()
    optimizer.step()
    _, expected = by_hand(alone, {"x": ids}, of_samples, BOUND)
    found = {n: full(p.grad) for n, p in model.named_parameters() if p.requires_grad}
    assert found.keys() == expected.keys()
    report(case, max(float((gradient - expected[n]).abs().max()) for n, gradient in found.items()))


def checkpoint(case: str) -> None:
    """Training that is saved, and loaded into a new model and optimizer, goes on as if nothing had been."""
    directory = [tempfile.mkdtemp()]
    dist.broadcast_object_list(directory, 0)

    def step(model: Any, optimizer: Any, number: int) -> None:
        batch = part("transformer", number, dist.get_rank())
        optimizer.zero_grad()
        criterion("mean")(model(batch["x"]), batch["y"]).backward()
        optimizer.step()

    def state(wrapped: nn.Module, optimizer: Any) -> dict[str, Any]:
        model, states = get_state_dict(wrapped, optimizer.original_optimizer)
        return {"model": model, "optimizer": states}

    hand = ByHand("transformer", 0.0, EXPECTED)
    wrapped = by_block(build("transformer"))
    model, optimizer, _ = private(wrapped, "transformer", check="off")
    for number in (0, 1):
        step(model, optimizer, number)
    torch.distributed.checkpoint.save(state(wrapped, optimizer), checkpoint_id=directory[0])
    again = build("transformer")
    nn.init.zeros_(again.head.weight)
    again = by_layer(again)  # sharded in another way
    other, resumed, _ = private(again, "transformer", check="off")
    loaded = state(again, resumed)
    torch.distributed.checkpoint.load(loaded, checkpoint_id=directory[0])
    set_state_dict(
        again,
        resumed.original_optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )
    step(other, resumed, 2)
    for number in range(3):
        hand.step(together([part("transformer", number, rank) for rank in range(dist.get_world_size())]))
    report(case, hand.difference(other))
    if dist.get_rank() == 0:
        shutil.rmtree(directory[0])
