# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer trains a small GPT-2, which computes its loss itself."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=384, n_head=6, vocab_size=8000, n_positions=512))
data = [{"input_ids": torch.randint(8000, (512,)), "labels": torch.randint(8000, (512,))} for _ in range(24)]
args = TrainingArguments("trained", per_device_train_batch_size=8, max_steps=2, report_to=[], save_strategy="no")
Trainer(model, args, train_dataset=data).train()
