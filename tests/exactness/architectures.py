# SPDX-License-Identifier: Apache-2.0
"""Architectures that no other test names, at toy sizes with random weights.

Dropout, drop path and gradient checkpoints are on where an architecture has them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf
from torch import nn
from torch.nn import functional

from tests.exactness import convolutional
from tests.exactness.convolutional import LABELS, SIDE
from tests.exactness.judge import Batch, Step, step
from tests.exactness.program import Allowed, Program, inner, scales

VOCABULARY, SAMPLES, TOKENS = 31, 4, 6
_IDS: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_TEXT: dict[str, Any] = {
    **_IDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
_GQA: dict[str, Any] = {**_TEXT, "num_key_value_heads": 1}
_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
_BERT: dict[str, Any] = {**_TEXT, **_DROPOUT}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 4,
    "mamba_d_conv": 3,
    "mamba_expand": 2,
    "mamba_chunk_size": 4,
}
_VIT: dict[str, Any] = {
    "image_size": SIDE,
    "patch_size": 4,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "num_labels": LABELS,
    **_DROPOUT,
}
_MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 12, "experts_implementation": "eager"}
_SEQ2SEQ: dict[str, Any] = {
    **_IDS,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "dropout": 0.1,
    "decoder_start_token_id": 1,
}
_SPEECH: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "conv_dim": (8, 8),
    "conv_kernel": (5, 3),
    "conv_stride": (4, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "num_labels": LABELS,
    "classifier_proj_size": 8,
    "hidden_dropout": 0.1,
    "layerdrop": 0.0,
}
_T5: dict[str, Any] = {**_IDS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}


@dataclass(frozen=True)
class Architecture:
    """An architecture.

    Attributes:
        model, config: names in transformers; a function that builds a model without ``config``.
        options: of the config.
        inputs: "ids", "pixels" or "sound".
        allowed: outcomes.
        tolerance: None for that of float64; larger where the model computes in float32.
        checkpoints: whether gradient checkpointing is switched on.
        frozen: parts of the names of parameters that the loss does not use.
    """

    model: Any
    config: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    inputs: str = "ids"
    allowed: Allowed = "either"
    tolerance: float | None = None
    checkpoints: bool = True
    frozen: tuple[str, ...] = ()

    def build(self) -> nn.Module:
        """Builds the model in training mode."""
        make = self._from_config if self.config else self.model
        model: Any = make()
        for parameter in model.parameters():  # weights that begin as zeros or ones would hide errors
            if parameter.requires_grad and (parameter.dim() < 2 or not parameter.any()):
                nn.init.normal_(parameter, parameter.float().mean().item(), 0.1)
        if self.checkpoints and getattr(model, "supports_gradient_checkpointing", False):
            model.gradient_checkpointing_enable()
        for name, parameter in model.named_parameters():
            if any(part in name for part in self.frozen):
                parameter.requires_grad_(False)
        return model.train()

    def _from_config(self) -> nn.Module:
        return getattr(hf, self.model)(getattr(hf, self.config)(**self.options))

    def batch(self) -> Batch:
        """Makes a batch."""
        if self.inputs == "ids":
            return {"ids": torch.randint(3, VOCABULARY, (SAMPLES, TOKENS)), "scale": scales(SAMPLES)}
        shape = (3, SIDE, SIDE) if self.inputs == "pixels" else (200,)
        return {"x": torch.randn(SAMPLES, *shape, dtype=torch.float64), "scale": scales(SAMPLES)}

    def losses(self, model: Any, batch: Batch) -> torch.Tensor:
        """Losses of the next token, or of some classes."""
        if self.inputs == "ids":
            ids = batch["ids"]
            encodes = getattr(getattr(inner(model), "config", None), "is_encoder_decoder", False)
            output = model(input_ids=ids, **({"decoder_input_ids": ids} if encodes else {}))
            logits = output.logits if "logits" in output else output[0]
            labels = ids[:, : logits.shape[1]] if logits.dim() == 3 else ids[:, 0] % logits.shape[-1]
            if logits.dim() == 3:
                return (
                    functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1) * batch["scale"]
                )
            return functional.cross_entropy(logits, labels, reduction="none") * batch["scale"]
        output = model(batch["x"])
        if not isinstance(output, torch.Tensor):
            output = output.logits if "logits" in output else output[0]
        flat = output.flatten(1)
        weights = torch.linspace(-1, 1, flat.shape[1], dtype=flat.dtype)
        return ((flat * weights).sum(1) + flat.square().sum(1)) * batch["scale"]

    def program(self, name: str) -> Program:
        """The architecture as a program of two steps."""
        settings = {"is_random": True, "tolerance": self.tolerance}
        return Program(f"architecture_{name}", self.build, self._steps, self.allowed, self.losses, settings)

    def _steps(self) -> list[Step]:
        return [step(self.batch()) for _ in range(2)]


class Boxes(Architecture):
    """An architecture whose tokens have boxes: left, top, right, bottom."""

    def batch(self) -> Batch:
        corners = torch.randint(0, 15, (SAMPLES, TOKENS, 2))
        sizes = torch.randint(0, 15, (SAMPLES, TOKENS, 2))
        return {**super().batch(), "bbox": torch.cat([corners, corners + sizes], 2)}

    def losses(self, model: Any, batch: Batch) -> torch.Tensor:
        logits = model(input_ids=batch["ids"], bbox=batch["bbox"], output_hidden_states=True).logits
        losses = functional.cross_entropy(logits.transpose(1, 2), batch["ids"], reduction="none").mean(1)
        return losses * batch["scale"]


def _causal(name: str, options: dict[str, Any], config: str = "", **others: Any) -> Architecture:
    return Architecture(f"{name}ForCausalLM", config or f"{name}Config", options, **others)


def _masked(name: str, options: dict[str, Any], **others: Any) -> Architecture:
    return Architecture(f"{name}ForMaskedLM", f"{name}Config", options, **others)


def _image(name: str, options: dict[str, Any], **others: Any) -> Architecture:
    return Architecture(f"{name}ForImageClassification", f"{name}Config", options, "pixels", **others)


def _torchvision(build: Callable[[], nn.Module], allowed: Allowed = "exact") -> Architecture:
    return Architecture(build, inputs="pixels", allowed=allowed)


STATE_SPACE: dict[str, Architecture] = {
    "mamba2": _causal(
        "Mamba2",
        {**_IDS, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "num_heads": 4, "head_dim": 8}
        | {"n_groups": 1, "chunk_size": 4, "conv_kernel": 3},
        allowed="exact",
        tolerance=1e-4,
    ),
    "bamba": _causal("Bamba", {**_GQA, **_MAMBA2, "attn_layer_indices": [1]}, allowed="exact", tolerance=1e-4),
    "zamba2": _causal(
        "Zamba2",
        {**_TEXT, **_MAMBA2, "layers_block_type": ["mamba", "hybrid"], "mamba_ngroups": 1, "n_mamba_heads": 4}
        | {"mamba_headdim": 8, "chunk_size": 4, "num_mem_blocks": 1, "attention_dropout": 0.1},
        allowed="exact",
        tolerance=1e-4,
    ),
    "granite_moe_hybrid": _causal(
        "GraniteMoeHybrid",
        {**_GQA, **_MAMBA2, "layer_types": ["mamba", "attention"], "num_local_experts": 3, "num_experts_per_tok": 2}
        | {"shared_intermediate_size": 12, "experts_implementation": "eager"},
        allowed="exact",
        tolerance=1e-4,
    ),
    "falcon_mamba": _causal(
        "FalconMamba", {**_IDS, "hidden_size": 8, "num_hidden_layers": 2, "state_size": 4}, tolerance=1e-4
    ),
    "jamba": _causal(
        "Jamba",
        {**_GQA, "num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1}
        | {"expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 4, "mamba_d_conv": 3}
        | {"use_mamba_kernels": False, "experts_implementation": "eager"},
        tolerance=1e-4,
    ),
    "recurrent_gemma": _causal(
        "RecurrentGemma",
        {**_GQA, "lru_width": 16, "attention_window_size": 4, "block_types": ["recurrent", "attention"], "head_dim": 8},
        tolerance=1e-4,
    ),
    "rwkv": _causal(
        "Rwkv",
        {**_IDS, "hidden_size": 16, "num_hidden_layers": 2, "attention_hidden_size": 16, "intermediate_size": 24},
        tolerance=1e-4,
    ),
    "xlstm": _causal(
        "xLSTM", {**_IDS, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 2, "chunk_size": 4}, tolerance=1e-3
    ),
    "falcon_h1": _causal("FalconH1", {**_GQA, **_MAMBA2, "mamba_d_ssm": 32, "head_dim": 8}, tolerance=1e-4),
    "lfm2": _causal("Lfm2", {**_GQA, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3}, tolerance=1e-4),
    "qwen3_next": _causal(
        "Qwen3Next",
        {**_GQA, **_MOE, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "num_experts": 2}
        | {"linear_num_value_heads": 2, "linear_num_key_heads": 1, "linear_key_head_dim": 4, "linear_value_head_dim": 4}
        | {"shared_expert_intermediate_size": 12},
        tolerance=1e-3,
    ),
}

DECODERS: dict[str, Architecture] = {
    "qwen3_moe": _causal("Qwen3Moe", {**_GQA, **_MOE, "num_experts": 3, "head_dim": 8}, tolerance=1e-4),
    "olmoe": _causal("Olmoe", {**_GQA, **_MOE, "num_experts": 3}, tolerance=1e-4),
    "granite_moe": _causal("GraniteMoe", {**_GQA, **_MOE, "num_local_experts": 3}, tolerance=1e-4),
    "deepseek_v3": _causal(
        "DeepseekV3",
        {**_TEXT, **_MOE, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8}
        | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1}
        | {"num_key_value_heads": 2},
        tolerance=1e-4,
    ),
    "gpt_oss": _causal(
        "GptOss",
        {**_GQA, "num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 8} | {"experts_implementation": "eager"},
        tolerance=1e-4,
    ),
    "olmo2": _causal("Olmo2", {**_GQA, "attention_dropout": 0.1}, allowed="exact", tolerance=1e-4),
    "glm4": _causal("Glm4", {**_GQA, "head_dim": 8, "attention_dropout": 0.1}, tolerance=1e-4),
    "nemotron": _causal("Nemotron", {**_GQA, "head_dim": 8, "attention_dropout": 0.1}, tolerance=1e-4),
    "persimmon": _causal("Persimmon", {**_TEXT, "hidden_dropout": 0.1}),
    "codegen": _causal(
        "CodeGen",
        {**_IDS, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "rotary_dim": 4, "resid_pdrop": 0.1},
    ),
    "biogpt": _causal("BioGpt", _BERT),
    "ctrl": Architecture("CTRLLMHeadModel", "CTRLConfig", {**_IDS, "n_embd": 16, "dff": 24, "n_layer": 2, "n_head": 2}),
    "openai_gpt": Architecture(
        "OpenAIGPTLMHeadModel", "OpenAIGPTConfig", {**_IDS, "n_embd": 16, "n_layer": 2, "n_head": 2}
    ),
    "smollm3": _causal("SmolLM3", {**_GQA, "attention_dropout": 0.1}, tolerance=1e-4),
    "helium": _causal("Helium", {**_GQA, "head_dim": 8, "attention_dropout": 0.1}, tolerance=1e-4),
    "diff_llama": _causal("DiffLlama", {**_GQA, "num_attention_heads": 4, "num_key_value_heads": 2}, tolerance=1e-4),
    "exaone4": _causal("Exaone4", {**_GQA, "attention_dropout": 0.1}, tolerance=1e-4),
}

ENCODERS: dict[str, Architecture] = {
    "convbert": _masked("ConvBert", {**_BERT, "embedding_size": 16, "conv_kernel_size": 3, "num_groups": 1}),
    "fnet": _masked("FNet", {**_TEXT, "hidden_dropout_prob": 0.1}, frozen=("pooler",)),
    "squeezebert": _masked("SqueezeBert", {**_BERT, "embedding_size": 16}, frozen=("pooler",)),
    "roformer": _masked("RoFormer", {**_BERT, "embedding_size": 16}),
    "camembert": _masked("Camembert", _BERT),
    "modernbert": _masked(
        "ModernBert", {**_TEXT, "attention_dropout": 0.1, "mlp_dropout": 0.1, "cls_token_id": 1, "sep_token_id": 2}
    ),
    # Its pseudo-inverse starts from the largest sum of the whole batch.
    "nystromformer": _masked(
        "Nystromformer", {**_BERT, "num_landmarks": 3, "segment_means_seq_len": 6}, allowed="refused"
    ),
    "mobilebert": _masked(
        "MobileBert", {**_BERT, "embedding_size": 8, "intra_bottleneck_size": 8, "true_hidden_size": 8}
    ),
    "ibert": _masked("IBert", _BERT),
    "deberta_v2_checkpointed": _masked(
        "DebertaV2",
        {**_BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4},
        allowed="exact",
    ),
    "deberta_v1": _masked("Deberta", {**_BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "layoutlm": Boxes(
        "LayoutLMForMaskedLM",
        "LayoutLMConfig",
        {**_BERT, "max_2d_position_embeddings": 32},
        allowed="exact",
        frozen=("pooler",),
    ),
    "funnel": _masked(
        "Funnel",
        {
            **_IDS,
            "d_model": 16,
            "n_head": 2,
            "d_head": 8,
            "d_inner": 24,
            "block_sizes": [1, 1],
            "num_decoder_layers": 1,
        },
    ),
}

SEQ2SEQ: dict[str, Architecture] = {
    "t5_checkpointed": Architecture(
        "T5ForConditionalGeneration", "T5Config", {**_T5, "decoder_start_token_id": 0}, allowed="exact"
    ),
    "mt5": Architecture("MT5ForConditionalGeneration", "MT5Config", {**_T5, "decoder_start_token_id": 0}),
    "umt5": Architecture("UMT5ForConditionalGeneration", "UMT5Config", {**_T5, "decoder_start_token_id": 0}),
    "switch": Architecture(
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        {**_T5, "decoder_start_token_id": 0, "num_experts": 2, "expert_capacity": 64, "num_decoder_layers": 2}
        | {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    ),
    "pegasus": Architecture("PegasusForConditionalGeneration", "PegasusConfig", _SEQ2SEQ),
    "blenderbot": Architecture("BlenderbotForConditionalGeneration", "BlenderbotConfig", _SEQ2SEQ),
    "mbart": Architecture("MBartForConditionalGeneration", "MBartConfig", _SEQ2SEQ),
    "m2m100": Architecture("M2M100ForConditionalGeneration", "M2M100Config", _SEQ2SEQ),
    "prophetnet": Architecture(
        "ProphetNetForConditionalGeneration",
        "ProphetNetConfig",
        {**_IDS, "hidden_size": 16, "num_encoder_layers": 1, "num_decoder_layers": 1, "num_encoder_attention_heads": 2}
        | {"num_decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "ngram": 2}
        | {"max_position_embeddings": 32, "decoder_start_token_id": 1},
    ),
}

VISION: dict[str, Architecture] = {
    "convnext_drop_path": _image(
        "ConvNext",
        {"hidden_sizes": [8, 12], "depths": [1, 2], "num_stages": 2, "num_labels": LABELS, "patch_size": 2}
        | {"layer_scale_init_value": 0.1, "drop_path_rate": 0.1},
        allowed="exact",
    ),
    "swin": _image(
        "Swin",
        {"image_size": SIDE, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2}
        | {"num_labels": LABELS},
    ),
    "swinv2": _image(
        "Swinv2",
        {"image_size": SIDE, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 2}
        | {"num_labels": LABELS, "drop_path_rate": 0.1},
    ),
    "pvt_v2": _image(
        "PvtV2",
        {
            "image_size": 32,
            "hidden_sizes": [8, 8],
            "depths": [1, 1],
            "num_attention_heads": [1, 2],
            "num_labels": LABELS,
        }
        | {"num_encoder_blocks": 2, "patch_sizes": [7, 3], "strides": [4, 2], "sr_ratios": [2, 1], "mlp_ratios": [2, 2]}
        | {"drop_path_rate": 0.1},
    ),
    "focalnet": _image(
        "FocalNet",
        {"image_size": SIDE, "patch_size": 2, "embed_dim": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
        | {"focal_levels": [1, 1], "focal_windows": [3, 3], "num_labels": LABELS, "drop_path_rate": 0.1},
    ),
    "ijepa": _image("IJepa", _VIT),
    "vit_msn": _image("ViTMSN", _VIT),
    "dinov2_registers": _image(
        "Dinov2WithRegisters",
        {**{k: v for k, v in _VIT.items() if k != "intermediate_size"}, "mlp_ratio": 2, "drop_path_rate": 0.1},
    ),
    "data2vec_vision": _image("Data2VecVision", {**_VIT, "drop_path_rate": 0.1}),
    "torchvision_densenet": _torchvision(convolutional.densenet),
    "torchvision_efficientnet": _torchvision(convolutional.efficientnet),
    "torchvision_mobilenet_v3": _torchvision(convolutional.mobilenet),
    "torchvision_regnet": _torchvision(convolutional.regnet),
    "torchvision_resnext": _torchvision(convolutional.resnext),
    "torchvision_shufflenet": _torchvision(convolutional.shufflenet),
    "torchvision_maxvit": _torchvision(convolutional.maxvit, "either"),
    "torchvision_vgg": _torchvision(convolutional.vgg),
    "torchvision_convnext_drop_path": _torchvision(convolutional.convnext),
    "torchvision_swin_v2": _torchvision(convolutional.swin_v2, "either"),
}

SOUND: dict[str, Architecture] = {
    name.lower(): Architecture(f"{name}ForSequenceClassification", f"{name}Config", _SPEECH, "sound")
    for name in ("Wav2Vec2", "Hubert", "WavLM", "UniSpeech", "Data2VecAudio")
}

ARCHITECTURES: dict[str, Architecture] = {**STATE_SPACE, **DECODERS, **ENCODERS, **SEQ2SEQ, **VISION, **SOUND}

COVERED: dict[str, tuple[str, ...]] = {
    "mamba2": ("bamba", "falcon_mamba", "falcon_h1", "jamba", "zamba2"),
    "rwkv": ("recurrent_gemma", "diff_llama"),
    "qwen3_next": ("lfm2", "xlstm"),
    "deepseek_v3": (
        "olmoe",
        "qwen3_moe",
        "granite_moe",
        "granite_moe_hybrid",
        "glm4",
        "olmo2",
        "nemotron",
        "smollm3",
        "helium",
        "exaone4",
    ),
    "codegen": ("biogpt", "ctrl", "openai_gpt", "persimmon"),
    "convbert": ("roformer", "camembert", "ibert", "layoutlm", "squeezebert", "mobilebert", "modernbert"),
    "deberta_v2_checkpointed": ("deberta_v1", "funnel"),
    "t5_checkpointed": ("mt5", "umt5", "prophetnet", "mbart", "pegasus", "blenderbot", "m2m100"),
    "swinv2": ("swin", "torchvision_swin_v2"),
    "data2vec_vision": ("ijepa", "vit_msn", "dinov2_registers", "convnext_drop_path", "torchvision_convnext_drop_path"),
    "torchvision_efficientnet": (
        "torchvision_mobilenet_v3",
        "torchvision_regnet",
        "torchvision_resnext",
        "focalnet",
        "torchvision_densenet",
        "torchvision_vgg",
        "torchvision_shufflenet",
    ),
    "torchvision_maxvit": ("pvt_v2",),
    "wavlm": ("wav2vec2", "hubert", "unispeech", "data2vecaudio"),
}
"""Architectures whose kinds of layers, and of calls of them, another one has: these are nightly."""
