# SPDX-License-Identifier: Apache-2.0
"""sentence-transformers, without privacy: nothing to add, `opacus-memprof run` finds the model and its optimizer.

Contrastive losses compare each sample with the others of its batch, and so have no gradient per sample to clip.
"""

from pathlib import Path

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertConfig, BertModel, BertTokenizerFast


def main() -> None:
    torch.manual_seed(0)
    words = [f"w{number}" for number in range(100)]
    Path("bert").mkdir(exist_ok=True)  # a random model in place of a pretrained one
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    BertModel(BertConfig(vocab_size=105, **shape)).save_pretrained("bert")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    BertTokenizerFast(vocab={word: index for index, word in enumerate(special + words)}).save_pretrained("bert")
    layers = Transformer("bert", max_seq_length=16)
    model = SentenceTransformer(modules=[layers, Pooling(64)])
    rows = [[" ".join(words[index] for index in row) for row in torch.randint(100, (64, 12))] for _ in range(2)]
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            "trainer", max_steps=4, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True
        ),
        train_dataset=Dataset.from_dict({"anchor": rows[0], "positive": rows[1]}),
        loss=MultipleNegativesRankingLoss(model),
    )
    trainer.train()
    for entry in trainer.state.log_history[:-1]:
        print(f"loss {entry['loss']:.6f}")


if __name__ == "__main__":
    main()
