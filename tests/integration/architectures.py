# SPDX-License-Identifier: Apache-2.0
"""Public architectures at toy sizes, with random weights: Hugging Face transformers and torchvision."""

from collections.abc import Callable
from typing import Any

import torch
import torchvision
import transformers as hf
from torch import nn
from torch.nn import functional

from tests.integration.clipping_by_hand import Batch

VOCABULARY, SAMPLES, TOKENS, SIDE, LABELS = 31, 4, 6, 16, 5
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_BERT = {**_TEXT, **_NO_DROPOUT}
_GQA = {**_TEXT, "num_key_value_heads": 1}
_SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
_GPT = {**_SMALL, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "resid_pdrop": 0, "embd_pdrop": 0}
_VIT: dict[str, Any] = {
    "image_size": SIDE,
    "patch_size": 4,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "num_labels": LABELS,
}
_STAGES: dict[str, Any] = {"hidden_sizes": [8, 12], "depths": [1, 1], "num_stages": 2, "num_labels": LABELS}
_FOUR: dict[str, Any] = {"hidden_sizes": [8] * 4, "depths": [1] * 4, "num_labels": LABELS, "drop_path_rate": 0.0}
_ENCODER_DECODER = {
    **_SMALL,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "dropout": 0.0,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}
_T5 = {**_SMALL, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}


def _causal(name: str, config: dict[str, Any], **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(hf, f"{name}ForCausalLM")(getattr(hf, f"{name}Config")(**config, **options))


def _masked(name: str, config: dict[str, Any], **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(hf, f"{name}ForMaskedLM")(getattr(hf, f"{name}Config")(**config, **options))


def _image(name: str, config: dict[str, Any], **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(hf, f"{name}ForImageClassification")(getattr(hf, f"{name}Config")(**config, **options))


def _model_of(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(hf, model)(getattr(hf, config)(**options))


LANGUAGE: dict[str, Callable[[], nn.Module]] = {
    "gpt2": _model_of("GPT2LMHeadModel", "GPT2Config", **_GPT, attn_pdrop=0),
    "gpt_bigcode": _causal("GPTBigCode", _GPT, attn_pdrop=0),
    "gpt_neo": _causal(
        "GPTNeo",
        {**_SMALL, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 24},
        attention_types=[[["global", "local"], 1]],
        max_position_embeddings=32,
    ),
    "gpt_neox": _causal("GPTNeoX", _TEXT),
    "gptj": _causal("GPTJ", _GPT, attn_pdrop=0, rotary_dim=4),
    "starcoder2": _causal("Starcoder2", _GQA, residual_dropout=0.0, embedding_dropout=0.0),
    "llama": _causal("Llama", _GQA),
    "llama_tied": _causal("Llama", _GQA, tie_word_embeddings=True),
    "mistral": _causal("Mistral", _GQA),
    "mixtral": _causal("Mixtral", _GQA, num_local_experts=3, experts_implementation="eager"),
    "qwen2": _causal("Qwen2", _GQA),
    "qwen2_moe": _causal(
        "Qwen2Moe",
        _GQA,
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=12,
        experts_implementation="eager",
    ),
    "qwen3": _causal("Qwen3", _GQA, head_dim=8),
    "gemma": _causal("Gemma", _GQA, head_dim=8),
    "gemma2": _causal("Gemma2", _GQA, head_dim=8),
    "gemma3": _model_of("Gemma3ForCausalLM", "Gemma3TextConfig", **_GQA, head_dim=8),
    "phi": _causal("Phi", _TEXT),
    "phi3": _causal("Phi3", _GQA),
    "falcon": _causal("Falcon", {**_SMALL, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}),
    "bloom": _causal("Bloom", {**_SMALL, "hidden_size": 16, "n_layer": 2, "n_head": 2}),
    "opt": _causal("OPT", _TEXT, ffn_dim=24, dropout=0.0, word_embed_proj_dim=16),
    "mpt": _causal("Mpt", {**_SMALL, "d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 32}),
    "olmo": _causal("Olmo", _GQA),
    "stablelm": _causal("StableLm", _GQA),
    "cohere": _causal("Cohere", _GQA),
    "granite": _causal("Granite", _GQA),
    "mamba": _causal("Mamba", {**_SMALL, "hidden_size": 8, "num_hidden_layers": 1, "state_size": 4}),
    "bert": _masked("Bert", _BERT),
    "roberta": _masked("Roberta", _BERT),
    "distilbert": _masked(
        "DistilBert",
        {"vocab_size": VOCABULARY, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24},
        dropout=0.0,
        attention_dropout=0.0,
    ),
    "albert": _masked("Albert", _TEXT, embedding_size=8),
    "electra": _masked("Electra", _BERT, embedding_size=8),
    "mpnet": _masked("MPNet", _BERT),
    "deberta": _masked("DebertaV2", _BERT, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=4),
    "xlnet": _model_of(
        "XLNetLMHeadModel", "XLNetConfig", **_SMALL, d_model=16, n_layer=1, n_head=2, d_inner=24, dropout=0.0
    ),
    "t5": _model_of("T5ForConditionalGeneration", "T5Config", **_T5, decoder_start_token_id=0),
    "flan_t5": _model_of(
        "T5ForConditionalGeneration",
        "T5Config",
        **_T5,
        decoder_start_token_id=0,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    ),
    "bart": _model_of("BartForConditionalGeneration", "BartConfig", **_ENCODER_DECODER),
    "marian": _model_of("MarianMTModel", "MarianConfig", **_ENCODER_DECODER),
}


def group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(2, channels)


def _resnet() -> nn.Module:
    resnet = torchvision.models.resnet
    return resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=LABELS, norm_layer=group_norm)


def _mobilenet() -> nn.Module:
    return torchvision.models.MobileNetV2(LABELS, 0.1, norm_layer=group_norm, dropout=0.0, round_nearest=2)


IMAGE: dict[str, Callable[[], nn.Module]] = {
    "vit": _image("ViT", _VIT),
    "deit": _image("DeiT", _VIT),
    "beit": _image("Beit", _VIT, drop_path_rate=0.0, use_relative_position_bias=True, layer_scale_init_value=0.1),
    "dinov2": _image("Dinov2", {k: v for k, v in _VIT.items() if k != "intermediate_size"}, mlp_ratio=2),
    "swin": _image(
        "Swin",
        {"image_size": SIDE, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 2},
        num_labels=LABELS,
        drop_path_rate=0.0,
    ),
    "convnext": _image("ConvNext", _STAGES, patch_size=2, layer_scale_init_value=0.1),
    "convnextv2": _image("ConvNextV2", _STAGES, patch_size=2),
    "poolformer": _image("PoolFormer", _FOUR),
    "segformer": _image(
        "Segformer", _FOUR, num_attention_heads=[1] * 4, sr_ratios=[2, 2, 1, 1], classifier_dropout_prob=0.0
    ),
    "clip_vision": _model_of("CLIPVisionModelWithProjection", "CLIPVisionConfig", **_VIT, projection_dim=LABELS),
    "siglip_vision": _model_of("SiglipVisionModel", "SiglipVisionConfig", **_VIT),
    "resnet_group_norm": _resnet,
    "mobilenet_group_norm": _mobilenet,
    "torchvision_vit": lambda: torchvision.models.VisionTransformer(SIDE, 4, 2, 2, 16, 24, num_classes=LABELS),
    "torchvision_swin": lambda: torchvision.models.SwinTransformer(
        [2, 2], 8, [1, 1], [2, 2], [2, 2], stochastic_depth_prob=0.0, num_classes=LABELS
    ),
    "torchvision_convnext": lambda: torchvision.models.ConvNeXt(
        [torchvision.models.convnext.CNBlockConfig(8, 12, 1), torchvision.models.convnext.CNBlockConfig(12, None, 1)],
        num_classes=LABELS,
    ),
    "squeezenet": lambda: nn.Sequential(nn.Upsample(32), torchvision.models.SqueezeNet("1_1", LABELS, 0.0)),
}


def build(name: str) -> nn.Module:
    """The model, in float64 and training."""
    model = (LANGUAGE.get(name) or IMAGE[name])().double().train()
    for parameter in model.parameters():  # weights that begin as zeros or ones would hide errors
        if parameter.requires_grad and (parameter.dim() < 2 or not parameter.any()):
            nn.init.normal_(parameter, parameter.mean().item(), 0.1)
    return model


def batch_for(name: str) -> Batch:
    """A batch in which one sample's loss is a thousand times the others', and another's a thousandth."""
    scale = torch.tensor([1.0, 1e3, 1e-3, 2.0], dtype=torch.float64)
    if name in LANGUAGE:
        return {"ids": torch.randint(3, VOCABULARY, (SAMPLES, TOKENS)), "scale": scale}
    return {"pixels": torch.randn(SAMPLES, 3, SIDE, SIDE, dtype=torch.float64), "scale": scale}


def losses(model: nn.Module, batch: Batch) -> torch.Tensor:
    """[B]: of the next token, or of some classes."""
    if "ids" in batch:
        ids, inner = batch["ids"], getattr(model, "_module", model)
        arguments = {"decoder_input_ids": ids} if inner.config.is_encoder_decoder else {}
        logits = model(input_ids=ids, **arguments).logits
        return functional.cross_entropy(logits.transpose(1, 2), ids, reduction="none").mean(1) * batch["scale"]
    output = model(batch["pixels"])
    if not isinstance(output, torch.Tensor):
        output = next(output[key] for key in ("logits", "image_embeds", "pooler_output") if key in output)
    weights = torch.linspace(-1, 1, output.shape[1], dtype=output.dtype)
    return ((output * weights).sum(1) + output.square().sum(1)) * batch["scale"]
