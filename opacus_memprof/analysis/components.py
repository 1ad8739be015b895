# SPDX-License-Identifier: Apache-2.0
"""Modules rolled up: into their parents, and into the components that users speak of.

A component is told by the module's name. The names are those that torch, transformers, peft, timm and Opacus give
their layers; the user's own rules come before them.
"""

import re
from collections.abc import Mapping
from typing import Any

from opacus_memprof.errors import MemprofError

OTHER = "other"

# The first rule whose expression is found in the name decides.
RULES: dict[str, str] = {
    r"(^|\.)lora_": "lora",
    r"norm[^.]*$": "norm",  # layernorm, LayerNorm, input_layernorm, q_norm, norm1, normalization
    r"(^|\.)(ln|bn|gn)_?\w?$": "norm",  # ln_1, ln_f, bn2
    r"(^|[._])(lm_|mc_|cls_)?heads?(\.|$)": "head",
    r"(^|\.)(score|classifier|qa_outputs|pooler|logits)(\.|$)": "head",
    r"(^|\.)cls\.(predictions|seq_relationship)": "head",  # BERT's
    r"^((base_)?model\.)*fc$": "head",  # ResNet's
    r"(^|[._])embed(?!der\b)\w*": "embedding",  # embed_tokens, word_embeddings, patch_embed; not ResNet's embedder
    r"(^|\.)(wte|wpe|tokens|positions|rotary_emb|emb|shared)(\.|$)": "embedding",
    r"attn|attention|(^|\.)mha(\.|$)": "attention",
    r"(^|\.)([qkvo]_proj|qkv|[qkv]_lin|[qkv]linear|query|key|value|out_proj)(\.|$)": "attention",
    r"mlp|ffn|feed_?forward|(^|[._])experts?(\.|$)": "mlp",
    r"(^|\.)(c_fc|fc\d|fc_(in|out)|(gate|up|down)_proj|intermediate|linear[12]|output\.dense)(\.|$)": "mlp",
    r"(^|[._])(lstm|gru|rnn)": "recurrent",
    r"conv|(^|\.)(downsample|shortcut|embedder)(\.|$)": "conv",
}


# What hooks put before the names of a second model: its class may read like a component.
_MODEL = re.compile(r"^[^.]*#\d+(\.|$)")


class Components:
    """Which component a module belongs to.

    Args:
        rules: the user's, regular expression → component; they are searched before RULES, in their order.

    Raises:
        MemprofError: a rule is no regular expression.
    """

    def __init__(self, rules: Mapping[str, str] | None = None) -> None:
        self._rules = []
        for expression, component in [*(rules or {}).items(), *RULES.items()]:
            try:
                self._rules.append((re.compile(expression, re.IGNORECASE), component))
            except re.error as error:
                raise MemprofError(
                    f"the rule {expression!r} for the component {component!r} is no regular expression ({error})"
                ) from error

    def __call__(self, module: str) -> str:
        """The component of a module's fully qualified name; "other" where no rule knows it."""
        module = _MODEL.sub("", module)
        return next((component for expression, component in self._rules if expression.search(module)), OTHER)

    def roll_up(self, peak: Mapping[str, Any]) -> dict[str, Any]:
        """Of a peak of profile.json: `components` {component: {category: bytes}}, which sums up as `modules` does, and
        `module_tree` {module: bytes of its own and of all modules inside}; "" is the whole."""
        components: dict[str, dict[str, int]] = {}
        tree: dict[str, int] = {}
        for module, categories in peak["modules"].items():
            grouped = components.setdefault(self(module), {})
            for category, size in categories.items():
                grouped[category] = grouped.get(category, 0) + size
            total = sum(categories.values())
            for ancestor in _with_ancestors(module):
                tree[ancestor] = tree.get(ancestor, 0) + total
        return {"components": components, "module_tree": dict(sorted(tree.items()))}


def _with_ancestors(module: str) -> list[str]:
    """`a.b` → "", "a", "a.b"."""
    parts = module.split(".") if module else []
    return [".".join(parts[:length]) for length in range(len(parts) + 1)]
