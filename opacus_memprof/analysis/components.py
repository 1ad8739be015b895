# SPDX-License-Identifier: Apache-2.0
"""Sums up modules by parent module, and by component such as attention, mlp or embedding.

Hooks recognise a module's component (opacus_memprof.hooks.components). Without hooks, rules for the names of layers in
torch, transformers, peft, timm and Opacus decide. The user's own rules come first.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.profile import Groups

LORA, NORM, HEAD, EMBEDDING = "lora", "norm", "head", "embedding"
ATTENTION, MLP, RECURRENT, CONV = "attention", "mlp", "recurrent", "conv"
BLOCK = "block"  # values that a layer with several parts computes between them, such as residual sums
OTHER = "other"

# Regular expression → component. The first rule that matches somewhere in the name applies.
RULES: dict[str, str] = {
    r"(^|\.)lora_": LORA,
    r"norm[^.]*$": NORM,  # layernorm, LayerNorm, input_layernorm, q_norm, norm1, normalization
    r"(^|\.)(ln|bn|gn)_?\w?$": NORM,  # ln_1, ln_f, bn2
    r"(^|[._])(lm_|mc_|cls_)?heads?(\.|$)": HEAD,
    r"(^|\.)(score|classifier|qa_outputs|pooler|logits)(\.|$)": HEAD,
    r"(^|\.)cls\.(predictions|seq_relationship)": HEAD,  # BERT's
    r"^((base_)?model\.)*fc$": HEAD,  # ResNet's
    r"(^|[._])embed(?!der\b)\w*": EMBEDDING,  # embed_tokens, word_embeddings, patch_embed; not ResNet's embedder
    r"(^|\.)(wte|wpe|tokens|positions|rotary_emb|emb|shared)(\.|$)": EMBEDDING,
    r"attn|attention|(^|\.)mha(\.|$)": ATTENTION,
    r"(^|\.)([qkvo]_proj|qkv|[qkv]_lin|[qkv]linear|query|key|value|out_proj)(\.|$)": ATTENTION,
    r"mlp|ffn|feed_?forward|(^|[._])experts?(\.|$)": MLP,
    r"(^|\.)(c_fc|fc\d|fc_(in|out)|(gate|up|down)_proj|intermediate|linear[12]|output\.dense)(\.|$)": MLP,
    r"(^|[._])(lstm|gru|rnn)": RECURRENT,
    r"conv|(^|\.)(downsample|shortcut|embedder)(\.|$)": CONV,
}


_RULES = [(re.compile(expression, re.IGNORECASE), component) for expression, component in RULES.items()]

# The prefix of a second model's names (`Class#2.`), whose class name may match a rule.
_MODEL = re.compile(r"^[^.]*#\d+(\.|$)")


class Components:
    """Maps modules to components.

    Args:
        rules: the user's rules, regular expression → component. They come first, in their order.
        known: module → component, as recognised by hooks; RULES apply to modules without one.

    Raises:
        MemprofError: a rule is not a regular expression.
    """

    def __init__(self, rules: Mapping[str, str] | None = None, known: Mapping[str, str] | None = None) -> None:
        self._rules, self._known = [], known or {}
        for expression, component in (rules or {}).items():
            try:
                self._rules.append((re.compile(expression, re.IGNORECASE), component))
            except re.error as error:
                raise MemprofError(
                    f"the rule {expression!r} for the component {component!r} is not a regular expression ({error})"
                ) from error

    def __call__(self, module: str) -> str:
        """Returns the component of a module's fully qualified name; "other" if neither rules nor hooks know it."""
        name = _MODEL.sub("", module)
        return _first_match(self._rules, name) or self._known.get(module) or _first_match(_RULES, name) or OTHER

    def roll_up(self, modules: Groups) -> dict[str, Any]:
        """Sums up the `modules` of a peak.

        Returns:
            {"components": {component: {category: bytes}}, "module_tree": {module: bytes, including those of all modules
            inside of it; "" is the total}}.
        """
        components: dict[str, dict[str, int]] = {}
        tree: dict[str, int] = {}
        for module, categories in modules.items():
            grouped = components.setdefault(self(module), {})
            for category, size in categories.items():
                grouped[category] = grouped.get(category, 0) + size
            total = sum(categories.values())
            for ancestor in _with_ancestors(module):
                tree[ancestor] = tree.get(ancestor, 0) + total
        return {"components": components, "module_tree": dict(sorted(tree.items()))}


def _first_match(rules: Sequence[tuple[re.Pattern[str], str]], name: str) -> str | None:
    return next((component for expression, component in rules if expression.search(name)), None)


def _with_ancestors(module: str) -> list[str]:
    """Returns the module and all modules that contain it: "", "a" and "a.b" for "a.b"."""
    parts = module.split(".") if module else []
    return [".".join(parts[:length]) for length in range(len(parts) + 1)]
