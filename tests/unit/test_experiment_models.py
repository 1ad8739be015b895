# SPDX-License-Identifier: Apache-2.0
"""The models and the data of experiments, against published sizes and the models that they come from."""

import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments import data, models, training
from opacus_memprof.experiments.configuration import Configuration
from opacus_memprof.integrations import hub

META, CPU = torch.device("meta"), torch.device("cpu")

# Parameters as published, and of the head, which an experiment unties from the embeddings.
PUBLISHED = {
    "gpt2": 124_439_808 + 50257 * 768,
    "llama-3.2-1b": 1_235_814_400 + 128256 * 2048,
    "llama-3.2-3b": 3_212_749_824 + 128256 * 3072,
    "llama-3.1-8b": 8_030_261_248,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_built_in_shape_has_the_parameters_of_its_model(name: str) -> None:
    counted = models.count_parameters(models.build_model(Configuration(model=name), META))
    assert counted == {"total": PUBLISHED[name], "trainable": PUBLISHED[name]}


def test_the_long_sequences_transformer() -> None:
    model = models.build_model(Configuration(model="transformer", seq_length=16384, dtype="bf16"), META)
    width, block = 2048, 12 * 2048**2 + 13 * 2048
    assert models.count_parameters(model)["total"] == (2 * 32000 + 16384) * width + 20 * block + 2 * width
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_the_shape_of_the_document_s_rows() -> None:
    """Its blocks have ReLU, and no biases in attention; no LayerNorm is behind the last one."""
    model = models.build_model(Configuration(model="transformer-relu", seq_length=16384), META)
    width, block = 2048, 12 * 2048**2 + (4 + 1) * 2048 + 4 * 2048
    assert models.count_parameters(model)["total"] == (2 * 32000 + 16384) * width + 20 * block
    small = {"vocab_size": 9, "hidden_dim": 8, "num_layers": 1, "num_heads": 2}
    relu = models.build_model(Configuration(model="transformer-relu", **small), CPU)  # type: ignore[arg-type]
    mlp = relu.blocks[0].mlp  # type: ignore[index]
    x = torch.randn(3, 8)
    torch.testing.assert_close(mlp(x), mlp.down(mlp.up(x).clamp(min=0)))


def test_lora_trains_only_its_adapters() -> None:
    """peft adapts q_proj and v_proj of a Llama, the latter with 8 of 24 heads."""
    chosen = Configuration(model="llama-3.2-3b", lora_rank=16)
    counted = models.count_parameters(models.build_model(chosen, META))
    adapters = 28 * 16 * ((3072 + 3072) + (3072 + 1024))
    assert counted == {"total": 3_212_749_824 + adapters, "trainable": adapters}


@pytest.mark.parametrize("model", ["tiny", "gpt2", "llama-3.2-1b"])
@pytest.mark.parametrize("task", ["language_model", "classification"])
@pytest.mark.parametrize("rank", [None, 2])
def test_sizes_in_place_of_the_configuration_s_own(model: str, task: Any, rank: int | None) -> None:
    sizes: dict[str, Any] = {"vocab_size": 50, "hidden_dim": 32, "num_layers": 3, "num_heads": 4}
    chosen = Configuration(model=model, task=task, lora_rank=rank, seq_length=9, **sizes)
    built = models.build_model(chosen, CPU)
    logits = built(torch.ones(2, 9, dtype=torch.long))
    assert logits.shape == ((2, 9, 50) if task == "language_model" else (2, 3))
    assert models.vocabulary_size(built) == 50
    lists = [module for module in built.modules() if isinstance(module, nn.ModuleList) and len(module) == 3]
    assert len(lists) == 1
    embedding = next(module for module in built.modules() if isinstance(module, nn.Embedding))
    assert embedding.embedding_dim == 32


def test_a_llama_of_another_size_keeps_its_proportions() -> None:
    chosen = Configuration(model="llama-3.2-3b", hidden_dim=96, num_heads=6, num_layers=1)
    config = models.build_model(chosen, META).model.config  # type: ignore[union-attr]
    assert (config.intermediate_size, config.num_key_value_heads, config.head_dim) == (256, 2, 16)


@pytest.fixture(scope="module")
def saved_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 with a tokenizer of words, as a local copy from the hub would be."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as kinds
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=10, n_embd=16, n_layer=1, n_head=2, n_positions=16, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(path)
    words = ["<end>", "a", "man", "sleeps", "runs", "nobody"]
    tokenizer = Tokenizer(kinds.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<end>").save_pretrained(path)
    return path


def test_a_local_path_loads_and_computes_the_same(saved_gpt2: Path) -> None:
    """Although Conv1D became Linear and the head is tied no more."""
    from transformers import GPT2LMHeadModel
    from transformers.pytorch_utils import Conv1D

    original = GPT2LMHeadModel.from_pretrained(saved_gpt2).eval()
    built = models.build_model(Configuration(model=str(saved_gpt2), pretrained=True, seq_length=16), CPU).eval()
    ids = torch.randint(1, 10, (2, 16))
    ids[1, 12:] = 0  # GPT-2 has no token for padding, and is filled up with the one that ends a text
    expected = original(input_ids=ids, attention_mask=ids.ne(0)).logits
    torch.testing.assert_close(built(ids), expected)
    assert built.padding == 0
    assert not any(isinstance(module, Conv1D) for module in built.modules())
    assert models.count_parameters(built)["total"] == original.num_parameters() + 10 * 16
    with pytest.raises(MemprofError, match=r"seq_length is 17, and .* has 16 positions"):
        models.build_model(Configuration(model=str(saved_gpt2), pretrained=True, seq_length=17), CPU)


def test_a_classifier_of_other_classes_gets_a_new_head(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    sizes = {"vocab_size": 10, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    original = LlamaForSequenceClassification(LlamaConfig(**sizes, num_attention_heads=2, num_labels=2))
    original.save_pretrained(tmp_path)
    chosen = Configuration(model=str(tmp_path), pretrained=True, task="classification", seq_length=8)
    built = models.build_model(chosen, CPU)
    assert built(torch.ones(2, 8, dtype=torch.long)).shape == (2, 3)
    weights = dict(built.named_parameters())
    for name, weight in original.model.named_parameters():
        assert torch.equal(weights[f"model.model.{name}"], weight), name


@pytest.mark.parametrize(
    ("config", "padding"),
    [
        ({"pad_token_id": 3, "eos_token_id": 5}, 3),
        ({"pad_token_id": None, "eos_token_id": 5}, 5),
        ({"pad_token_id": None, "eos_token_id": [7, 8]}, 7),  # Llama 3's
        ({}, 0),
    ],
)
def test_what_fills_samples_up(config: dict[str, Any], padding: int) -> None:
    assert models._padding_token(SimpleNamespace(**config)) == padding


def test_a_local_copy_is_trained_privately(saved_gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    chosen = Configuration(
        model=str(saved_gpt2),
        pretrained=True,
        task="classification",
        lora_rank=2,
        seq_length=8,
        batch_size=4,
        max_physical_batch_size=2,
        num_steps=1,
        warmup_steps=1,
        device="cpu",
    )
    result = training.train(chosen, tmp_path / "profile")
    assert (result["status"], result["error"]) == ("finished", None)
    assert result["data"]["source"] == "synthetic"
    assert result["data"]["reason"].startswith("random tokens: SNLI cannot be loaded (")
    # Of the adapters on c_attn, 16 x 48; the head is trained whole.
    assert result["parameters"]["trainable"] == 2 * (16 + 48) + 3 * 16


def test_a_model_that_is_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    path = tmp_path / "hf_secret"
    with pytest.raises(MemprofError) as refused:
        models.build_model(Configuration(model=str(path), pretrained=True), CPU)
    message = str(refused.value)
    assert "\n" not in message
    assert message.startswith(f"there is no folder {path}: correct the path")
    assert "--model-name PATH" in message
    assert "--config tiny|transformer|transformer-relu|gpt2|" in message
    assert "hf_secret" not in message.replace(str(path), "")


SNLI = [
    {"premise": "a man sleeps", "hypothesis": "nobody runs", "label": 1},
    {"premise": "a man", "hypothesis": "a man", "label": -1},
    {"premise": "nobody sleeps", "hypothesis": "a man runs", "label": 2},
]


@pytest.mark.parametrize("task", ["language_model", "classification"])
def test_snli_where_it_can_be_reached(saved_gpt2: Path, monkeypatch: pytest.MonkeyPatch, task: Any) -> None:
    asked = []

    def load_dataset(name: str, split: str, token: str | None) -> list[dict[str, Any]]:
        asked.append((name, split))
        return SNLI

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    chosen = Configuration(
        model=str(saved_gpt2), pretrained=True, task=task, seq_length=6, batch_size=3, num_steps=1, warmup_steps=0
    )
    loaded = data.load_data(chosen, 10, 9)
    assert (loaded.source, loaded.reason) == ("snli", "the train split of stanfordnlp/snli")
    assert asked == [("stanfordnlp/snli", "train[:70]")]
    ((tokens, targets),) = loaded.loader
    assert tokens.tolist() == [[1, 2, 3, 5, 4, 9], [5, 3, 1, 2, 4, 9], [1, 2, 3, 5, 4, 9]]
    if task == "classification":
        assert targets.tolist() == [1, 2, 1]
    else:
        assert targets.tolist() == [[2, 3, 5, 4, 9, 9], [3, 1, 2, 4, 9, 9], [2, 3, 5, 4, 9, 9]]


def test_random_tokens_where_it_cannot(saved_gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no route for hf_secret\nand a traceback")

    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    loaded = data.load_data(Configuration(model=str(saved_gpt2), pretrained=True, seq_length=5, batch_size=2), 10, 0)
    assert loaded.source == "synthetic"
    assert loaded.reason == "random tokens: SNLI cannot be loaded (no route for ***)"
    batches = list(loaded.loader)
    assert len(batches) == 5  # two to warm up, three to measure
    for tokens, targets in batches:
        assert tokens.shape == targets.shape == (2, 5)
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        assert 0 < tokens.min() <= tokens.max() < 10


def test_the_hub_is_left_alone_where_nothing_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError("Network is unreachable")

    for name in ("HF_HUB_OFFLINE", "HF_ENDPOINT", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy")
    hub.use_cache_if_hub_unreachable()
    assert "HF_HUB_OFFLINE" not in os.environ  # whether the proxy answers is not known
    monkeypatch.delenv("HTTPS_PROXY")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # so that it is restored, and the user's word holds
    hub.use_cache_if_hub_unreachable()
    assert os.environ["HF_HUB_OFFLINE"] == "0"
    del os.environ["HF_HUB_OFFLINE"]
    hub.use_cache_if_hub_unreachable()
    assert os.environ["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize("model", ["tiny", "gpt2"])
@pytest.mark.parametrize("rank", [None, 2])
def test_checkpointing_trains_to_the_same_weights_with_fewer_activations(
    model: str, rank: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adam makes much of rounding, and dropout is drawn anew: SGD, and none of it."""
    build, kept = training.models.build_model, []

    def build_and_keep(*arguments: Any) -> Any:
        kept.append(build(*arguments))
        for module in kept[-1].modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return kept[-1]

    monkeypatch.setattr(training.models, "build_model", build_and_keep)
    monkeypatch.setattr(torch.optim, "Adam", torch.optim.SGD)
    sizes: dict[str, Any] = {"vocab_size": 50, "hidden_dim": 32, "num_layers": 4, "num_heads": 4, "batch_size": 2}
    plain = Configuration(
        model=model, seq_length=64, lora_rank=rank, num_steps=1, warmup_steps=0, device="cpu", **sizes
    )
    plain = replace(plain, sigma=0.0, learning_rate=0.1)
    results = [
        training.train(replace(plain, checkpointing=checkpointing), tmp_path / "profile")
        for checkpointing in (False, True)
    ]
    assert [result["error"] for result in results] == [None, None]
    weights = [torch.cat([parameter.detach().flatten() for parameter in built.parameters()]) for built in kept]
    torch.testing.assert_close(*weights)
    highest = [max(result["timeline"]["categories"]["activations"]) for result in results]
    assert highest[1] < 0.6 * highest[0]


@pytest.mark.parametrize("chosen", [{"mode": "ew"}, {"mode": "ghost", "nproc": 2}])
def test_where_checkpointing_cannot_be_followed_it_is_refused(chosen: Any) -> None:
    with pytest.raises(MemprofError, match="checkpointing is not possible here, because "):
        Configuration(checkpointing=True, **chosen)


OWN = """
import torch


def samples(configuration, tokenizer):
    assert tokenizer is None
    return [(torch.full((configuration.seq_length,), index), torch.tensor(index)) for index in (0, 2)]


def long(configuration, tokenizer):
    return [(torch.zeros(configuration.seq_length + 1, dtype=torch.long), torch.tensor(0))]


def nothing(configuration, tokenizer):
    return None
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_samples.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", ["my_samples:samples", "{}/my_samples.py:samples"])
def test_a_function_makes_the_data(own: Path, name: str) -> None:
    name = name.format(own)
    chosen = Configuration(task="classification", seq_length=3, batch_size=2, num_steps=2, warmup_steps=0, dataset=name)
    loaded = data.load_data(chosen, 10, None)
    assert (loaded.source, loaded.reason) == ("own", name)
    assert [(tokens.tolist(), targets.tolist()) for tokens, targets in loaded.loader] == 2 * [
        ([[0, 0, 0], [2, 2, 2]], [0, 2])
    ]


def test_a_file_of_texts_makes_the_data(saved_gpt2: Path, tmp_path: Path) -> None:
    lines, table = tmp_path / "texts.jsonl", tmp_path / "texts.csv"
    lines.write_text('{"text": "a man sleeps", "label": 2}\n{"premise": "a man", "hypothesis": "runs", "label": 0}\n')
    table.write_text("text,label\na man sleeps,2\na man runs,0\n")
    for path in (lines, table):
        chosen = Configuration(
            model=str(saved_gpt2), pretrained=True, task="classification", seq_length=4, batch_size=2, dataset=str(path)
        )
        batches = list(data.load_data(chosen, 10, 9).loader)
        assert len(batches) == 5
        tokens, targets = batches[0]
        assert tokens.tolist() == [[1, 2, 3, 9], [1, 2, 4, 9]]
        assert targets.tolist() == [2, 0]


@pytest.mark.parametrize(
    ("dataset", "content", "sentence"),
    [
        ("texts.jsonl", '{"text": "a"}\n', "row 1 of .* lacks what is needed: .* and a `label`"),
        ("texts.jsonl", '{"text": "a", "label": 7}\n', "row 1 of .* has the label 7: use 0 to 2"),
        ("texts.jsonl", "{", "cannot be read"),
        ("texts.csv", "text,label\n", "is empty"),
        ("none.csv", None, "cannot be read"),
        ("texts.parquet", None, "is not a dataset: give a .jsonl or .csv file, MODULE:FUNCTION"),
        ("my_samples:absent", None, "cannot be imported"),
        ("no_such_module:samples", None, "cannot be imported"),
        ("my_samples:nothing", None, "did not return a list of samples"),
        (
            "my_samples:long",
            None,
            r"the input_ids of the first sample .* shape \[5\]: return torch.int64 of shape \[4\]",
        ),
    ],
)
def test_other_data_is_refused_in_a_sentence(
    dataset: str, content: str | None, sentence: str, saved_gpt2: Path, own: Path
) -> None:
    if ":" not in dataset:
        dataset = str(own / dataset)
    if content is not None:
        Path(dataset).write_text(content)
    chosen = Configuration(
        model=str(saved_gpt2), pretrained=True, task="classification", seq_length=4, batch_size=2, dataset=dataset
    )
    with pytest.raises(MemprofError, match=sentence):
        data.load_data(chosen, 10, 9)


def test_texts_need_a_tokenizer() -> None:
    with pytest.raises(MemprofError, match="random weights have no tokenizer: give --model-name, or a function"):
        data.load_data(Configuration(dataset="texts.csv"), 10, None)
