# SPDX-License-Identifier: Apache-2.0
"""A model in 4 bits by bitsandbytes, with private LoRA by flash_clip: the adapters alone train, in full precision."""

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import opacus_memprof


def main() -> None:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=128, **shape)).save_pretrained("llama")  # in place of a pretrained one
    quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained("llama", quantization_config=quantized, device_map={"": device})
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(base, lora).train()
    rows = torch.randint(128, (64, 16))
    private, optimizer, loader = opacus_memprof.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3),
        data_loader=DataLoader([{"input_ids": row, "labels": row} for row in rows], batch_size=16),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode="flash_clip",
        noise_generator=torch.Generator(device).manual_seed(0),
    )
    for batch in loader:
        loss = private(**{name: value.to(device) for name, value in batch.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
