# SPDX-License-Identifier: Apache-2.0
"""LoRA by peft in a decoder of transformers, whose output has a cache of keys and values."""

import torch
from opacus import PrivacyEngine
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import OPTConfig, OPTForSequenceClassification

cfg = OPTConfig(
    vocab_size=4000,
    hidden_size=384,
    word_embed_proj_dim=384,
    num_hidden_layers=6,
    num_attention_heads=6,
    ffn_dim=1536,
    max_position_embeddings=256,
    num_labels=4,
    dropout=0.0,
    pad_token_id=1,
)
base = OPTForSequenceClassification(cfg)
model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="SEQ_CLS"))
model = model.cuda().train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
loader = DataLoader(TensorDataset(torch.randint(2, 4000, (48, 192)), torch.randint(4, (48,))), batch_size=16)
model, optimizer, loader = PrivacyEngine().make_private(
    module=model,
    optimizer=optimizer,
    data_loader=loader,
    noise_multiplier=0.7,
    max_grad_norm=0.5,
    poisson_sampling=False,
)
for ids, y in loader:
    out = model(input_ids=ids.cuda(), attention_mask=torch.ones_like(ids).cuda(), labels=y.cuda())
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
