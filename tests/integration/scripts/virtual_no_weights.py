# SPDX-License-Identifier: Apache-2.0
"""DIR: makes models from a configuration alone, and prints what they are and what they took of the host."""

import json
import resource
import sys

from opacus_memprof import virtual_gpu
from opacus_memprof.errors import MemprofError

virtual_gpu.start("h100")
virtual_gpu.load_no_weights()

import torch  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # noqa: E402

config = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, num_attention_heads=32,
    num_key_value_heads=8, dtype="bfloat16", use_cache=False, architectures=["LlamaForCausalLM"],
)  # fmt: skip
config.save_pretrained(sys.argv[1])


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


torch.randn(64, 64, device="cuda") @ torch.randn(64, 64, device="cuda")
before = peak()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float16, attn_implementation="eager")
found = {
    "parameters": sum(parameter.numel() for parameter in model.parameters()),
    "dtypes": {"as asked": str(model.dtype)},
    "attention": model.config._attn_implementation,
    "rotary_as_transformers": torch.equal(model.model.rotary_emb.inv_freq, LlamaRotaryEmbedding(config).inv_freq),
    "norms_are_one": bool((model.model.norm.weight == 1).all()),
    "devices": [str(model.device)],
}
model = model.cuda()
found["devices"].append(str(model.device))
found["allocated_bytes"] = torch.cuda.memory_allocated()
model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
tokens = torch.randint(0, 128256, (1, 64)).cuda()
model(input_ids=tokens, labels=tokens).loss.backward()
del model
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], device_map={"": 0})
found["devices"].append(str(model.device))
found["dtypes"]["the configuration's"] = str(model.dtype)
found["host_bytes"] = peak() - before
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[1], quantization_config={"quant_method": "bitsandbytes"})
except MemprofError as error:
    found["refusal"] = str(error)
print(json.dumps(found))
