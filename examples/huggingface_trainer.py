# SPDX-License-Identifier: Apache-2.0
"""LoRA with differential privacy in Hugging Face's Trainer, profiled.

The Trainer knows nothing of Opacus, and these are the places where the two meet:

- `make_private` comes before the Trainer, which gets the private model and optimizer as they are. LoRA's adapters are
  the only parameters that train, so only they have per-sample gradients.
- The Trainer must use the private data loader, whose Poisson sampling the privacy guarantee rests on. A loader that the
  Trainer makes itself, or that accelerate prepares, samples otherwise.
- `max_grad_norm=0`: the Trainer's own clipping, of the batch's gradient, would come after the noise. Opacus has clipped
  each sample's.
- `gradient_accumulation_steps=1`: Opacus would take each part for a batch of its own. Large batches are what its
  BatchMemoryManager is for.
- All sequences have the same number of tokens. The model averages its loss over the batch's tokens, so that a sample's
  gradient would otherwise depend on the length of the others.
- Between steps, somebody must clear the private optimizer: the Trainer clears the model only. ClearOptimizer does it.

    python examples/huggingface_trainer.py
"""

import argparse
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import opacus_memprof
from opacus_memprof.integrations.huggingface import MemprofCallback

VOCABULARY, TOKENS = 128, 16


class ClearOptimizer(TrainerCallback):
    """Clears the private optimizer after each step. Opacus refuses to step while it still has its clipped sums."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["optimizer"].zero_grad(set_to_none=True)


class PrivateTrainer(Trainer):
    """A Trainer that uses the data loader it is given, and clears the optimizer."""

    def __init__(self, *, train_dataloader: Any, **kwargs: Any) -> None:
        super().__init__(train_dataset=train_dataloader.dataset, **kwargs)
        self._loader = train_dataloader
        self.add_callback(ClearOptimizer())

    def get_train_dataloader(self) -> Any:
        return self._loader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("-o", "--profile", default="memprof_profile")
    args = parser.parse_args()

    torch.manual_seed(0)
    text = torch.randint(VOCABULARY, (args.samples, TOKENS))
    data: Any = [{"input_ids": row, "labels": row} for row in text]
    base = LlamaForCausalLM(  # from_pretrained("...") in earnest
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
    )
    model: Any = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]))
    model.to("cuda" if torch.cuda.is_available() else "cpu").train()

    with opacus_memprof.profile(args.profile) as session:
        engine = opacus_memprof.PrivacyEngine()
        private, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3),
            data_loader=DataLoader(data, batch_size=8),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        trainer = PrivateTrainer(
            model=private,
            optimizers=(optimizer, None),
            train_dataloader=loader,
            args=TrainingArguments(
                output_dir=f"{args.profile}_trainer",
                max_steps=args.steps,
                max_grad_norm=0.0,
                gradient_accumulation_steps=1,
                remove_unused_columns=False,
                save_strategy="no",
                logging_steps=1,
                report_to=[],
                disable_tqdm=True,
            ),
            callbacks=[MemprofCallback()],
        )
        trainer.train()

    print(f"epsilon {engine.get_epsilon(delta=1e-5):.2f}")
    for name, found in session.result["devices"].items():
        print(f"{name}: peak of {found['peak']['requested_bytes']} bytes in {found['peak']['phase']}")
    model.save_pretrained(f"{args.profile}_adapters")  # peft's model, without Opacus' wrapper


if __name__ == "__main__":
    main()
