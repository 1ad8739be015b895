# SPDX-License-Identifier: Apache-2.0
"""TRL's SFTTrainer, with private training by flash_clip: make_private first, without a wrapper around the model.

The trainer gets the private optimizer and uses the private loader, whose Poisson sampling the privacy guarantee rests
on. `max_grad_norm=0`: Opacus has clipped each sample's gradient. All samples have the same number of tokens. TRL's own
loss passes the tokens of all samples together through the last layer, so that samples have no gradients of their own.
"""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import opacus_memprof


class PrivateSFTTrainer(SFTTrainer):
    def make_private(self):
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        _, self.optimizer, self.loader = opacus_memprof.PrivacyEngine().make_private(
            module=self.model.train(),
            optimizer=self.optimizer,
            data_loader=DataLoader(self.train_dataset, batch_size=8, collate_fn=self.data_collator),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            grad_sample_mode="flash_clip",
            wrap_model=False,
            noise_generator=torch.Generator(self.args.device).manual_seed(0),
        )

    def get_train_dataloader(self):
        return self.loader

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.optimizer.zero_grad()  # the Trainer clears the model only
        return model(**inputs, use_cache=False).loss


def main() -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, "<pad>"))
    settings = {"max_steps": 4, "max_grad_norm": 0.0, "save_strategy": "no", "report_to": [], "logging_steps": 1}
    trainer = PrivateSFTTrainer(
        model=LlamaForCausalLM(LlamaConfig(vocab_size=128, **shape)),
        args=SFTConfig("trainer", gradient_checkpointing=False, bf16=False, disable_tqdm=True, **settings),
        train_dataset=Dataset.from_dict({"input_ids": torch.randint(128, (64, 16)).tolist()}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"),
    )
    trainer.make_private()
    trainer.train()
    for entry in trainer.state.log_history[:-1]:
        print(f"loss {entry['loss']:.6f}")


if __name__ == "__main__":
    main()
