# SPDX-License-Identifier: Apache-2.0
"""Finds the component of each module of a model: by its class first, then by its position in the model and its widths.

Names decide only where classes do not, as for a Linear.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from opacus_memprof.analysis.components import (
    ATTENTION,
    BLOCK,
    CONV,
    EMBEDDING,
    HEAD,
    LORA,
    MLP,
    NORM,
    OTHER,
    RECURRENT,
    Components,
)

_CLASSES = (
    ((nn.Embedding, nn.EmbeddingBag), EMBEDDING),
    ((nn.RNNBase, nn.RNNCellBase), RECURRENT),
    (nn.MultiheadAttention, ATTENTION),
    (_ConvNd, CONV),
)
_CLASS_NAMES = {
    "Norm": NORM,
    "Attention|Attn": ATTENTION,
    "MLP|Mlp|FeedForward|FFN|Expert": MLP,
    "Embed": EMBEDDING,
    "LSTM|GRU|RNN": RECURRENT,
}
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

_by_name = Components()


def components_of(named: Sequence[tuple[str, nn.Module]]) -> dict[str, str]:
    """Returns the component of each module, by name; "" if neither its class nor its position decides.

    Args:
        named: the modules of a model by their fully qualified names, the model itself first.
    """
    model = _Model(named)
    for name in model.modules:  # parents and preceding siblings come first
        model.components[name] = model.component_of(name)
    return model.components


class _Model:
    def __init__(self, named: Sequence[tuple[str, nn.Module]]) -> None:
        self.root = named[0][0]
        self.modules = dict(named)  # DDP and the model inside have one name: take the latter
        self.components: dict[str, str] = {}
        self._children: dict[str, list[str]] = {name: [] for name in self.modules}
        for name in self.modules:
            if name != self.root:
                self._children[_parent(name)].append(name)
        self._classes: dict[str, str] = {}  # by module; "" if its class does not decide
        self._blocks: dict[str, list[str]] = {"": []}  # block, or "" outside of all blocks → its Linears
        for name in reversed(self.modules):
            self._classes[name] = self._by_class(name)
            if self._is_block(name):
                self._blocks[name] = []
        self._linears: dict[str, tuple[int, int]] = {}
        for name, module in self.modules.items():
            if (widths := _widths(module)) and not self._children[name] and _by_name(name) != LORA:
                self._linears[name] = widths
                self._blocks[self._block_of(name)].append(name)
        tables = [module.num_embeddings for module in self.modules.values() if isinstance(module, nn.Embedding)]
        self._vocabulary = max(tables, default=0)
        self._convolutions = [name for name, module in self.modules.items() if isinstance(module, _ConvNd)]

    def component_of(self, name: str) -> str:
        if name == self.root:
            return ""
        if _by_name(name) == LORA:
            return LORA
        if name in self._linears:
            return self._role(name)
        if found := self._classes[name]:
            return EMBEDDING if found == CONV and self._cuts_patches(name) else found
        if name in self._blocks:
            return BLOCK
        children = self._children[name]
        base = f"{name}.base_layer"  # of peft, with adapters beside it
        if base in self._linears:
            return self._role(base)
        if any(child in self._linears and self._role(child) == HEAD for child in children):
            return HEAD  # uses the output of the head
        above = self.components[_parent(name)]
        if not children and above in ("", BLOCK) and not list(self.modules[name].parameters()):
            siblings = self._children[_parent(name)]
            before = [self.components[sibling] for sibling in siblings[: siblings.index(name)]]
            return next((component for component in reversed(before) if component != NORM), above)
        return above if above != HEAD and _by_name(name) == OTHER else ""

    def _by_class(self, name: str) -> str:
        module = self.modules[name]
        for kinds, component in _CLASSES:
            if isinstance(module, kinds):
                return component
        if any(path in self._blocks or isinstance(inside, nn.Embedding) for path, inside in self._inside(name)):
            return EMBEDDING if "Embed" in type(module).__name__ else ""  # otherwise it is a model
        classes = type(module).__mro__[: type(module).__mro__.index(nn.Module)]
        for expression, component in _CLASS_NAMES.items():
            if any(re.search(expression, kind.__name__) for kind in classes):
                return component
        return ""

    def _is_block(self, name: str) -> bool:
        """Returns whether a module is one in a list of layers, and has several submodules with parameters."""
        if name == self.root or self._classes[name] or not isinstance(self.modules[_parent(name)], _LISTS):
            return False
        return sum(bool(module._parameters) for _, module in self._inside(name)) > 1

    def _role(self, name: str) -> str:
        """Returns the component that a Linear belongs to, by its place, its name or its sizes."""
        block = self._block_of(name)
        width, to = self._linears[name]
        if not block and to == self._vocabulary != width:
            return HEAD
        above = _parent(name)
        while above not in (block, self.root):
            if (found := self._classes[above]) in (ATTENTION, MLP, RECURRENT, EMBEDDING):
                return found
            above = _parent(above)
        named = _by_name(name.removeprefix(f"{block}."))
        if named in (ATTENTION, MLP, HEAD, EMBEDDING):
            return named
        if block:
            return _in_block((width, to), [self._linears[linear] for linear in self._blocks[block]])
        if name == self._blocks[""][-1] or self._is_behind_the_blocks(name):
            return HEAD
        return MLP if len(self._blocks) == 1 else ""

    def _is_behind_the_blocks(self, name: str) -> bool:
        order = list(self.modules)
        return len(self._blocks) > 1 and order.index(name) > max(order.index(block) for block in self._blocks if block)

    def _cuts_patches(self, name: str) -> bool:
        """Returns whether this is the model's first convolution and reads each pixel once."""
        module: Any = self.modules[name]
        return name == self._convolutions[0] and module.stride == module.kernel_size and max(module.stride) > 1

    def _block_of(self, name: str) -> str:
        """Returns the innermost block around a module, or ""."""
        while name != self.root:
            name = _parent(name)
            if name and name in self._blocks:
                return name
        return ""

    def _inside(self, name: str) -> Iterator[tuple[str, nn.Module]]:
        for child in self._children[name]:
            yield child, self.modules[child]
            yield from self._inside(child)


def _in_block(own: tuple[int, int], all_widths: Sequence[tuple[int, int]]) -> str:
    """Returns ATTENTION or MLP for a Linear in a block.

    Linears of attention read and return the block's width, either one for all queries, keys and values or several. The
    Linears of an MLP widen it, perhaps with a gate, and narrow the result again.
    """

    def is_mlp(widths: tuple[int, int]) -> bool:
        width, to = widths
        if to > width:
            return any(read in (to, to / 2) for read, _ in all_widths)
        return to < width != all_widths[0][0]

    narrow = [widths for widths in all_widths if not is_mlp(widths)]
    attends = len(narrow) > 2 or any(to > width for width, to in narrow)
    return ATTENTION if attends and not is_mlp(own) else MLP


def _widths(module: Any) -> tuple[int, int] | None:
    """Returns the input and output width of a Linear of any class; None for other modules."""
    if type(module).__name__ == "Conv1D":  # of transformers
        width, to = module.weight.shape
    else:
        width, to = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return (width, to) if isinstance(width, int) and isinstance(to, int) else None


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
