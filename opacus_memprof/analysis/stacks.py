# SPDX-License-Identifier: Apache-2.0
"""Infers from the stack of an allocation what it was for: phase, category, module and line."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple


class Frame(NamedTuple):
    """One call of a stack."""

    name: str
    file: str
    line: int


@dataclass(frozen=True)
class Purpose:
    """The purpose of an allocation, inferred from its stack.

    Attributes:
        phase: the phase; "idle" if no frame tells it, "" if it is that of the allocations around it.
        category: the category of live memory; "unattributed" if no frame tells it.
        module: the calls of `forward` that lead to the allocation, as `file:line` of each, the outermost first; the
            innermost layer of torch.nn has no line. "" outside of forward.
        line: the innermost line outside of torch, as `file.py:line function`; "" if there is none.
        named: whether category and module are not inferred, but those of the allocation's metadata.
    """

    phase: str = "idle"
    category: str = "unattributed"
    module: str = ""
    line: str = ""
    named: bool = False


NOTHING = Purpose()


class _Rule(NamedTuple):
    """The purpose that a frame indicates, by its file and function. The frame with the highest weight decides."""

    file: re.Pattern[str]
    function: re.Pattern[str]
    phase: str
    category: str
    weight: int


def _rule(file: str, function: str, phase: str, category: str, weight: int) -> _Rule:
    return _Rule(re.compile(file), re.compile(function), phase, category, weight)


_RULES = (
    _rule(r"/opacus/optimizers/", r"add_noise|_generate_noise", "noise", "noise", 7),
    _rule(r"/opacus/optimizers/", r"clip_and_accumulate", "clip", "clipping_temporaries", 7),
    _rule(r"/opacus/grad_sample/", r"compute_\w*norm_sample", "backward", "norm_samples", 7),
    _rule(r"/opacus/grad_sample/", r"rearrange_grad_samples", "backward", "backprop_copies", 7),
    _rule(r"/opacus/grad_sample/", r"\w*grad_sample|create_or_\w+", "backward", "per_sample_gradients", 6),
    _rule(r"/torch/optim/|/torch/nn/modules/module\.py", r"zero_grad", "zero_grad", "gradients", 6),
    _rule(r"/torch/optim/(?!lr_scheduler|swa_utils)", r"_init_group", "optimizer_step", "optimizer_states", 6),
    _rule(r"/torch/optim/(?!lr_scheduler|swa_utils)", r".*", "optimizer_step", "optimizer_temporaries", 5),
    _rule(r"/torch/distributed/.*fsdp", r"\w*unshard\w*|\w*all_gather\w*", "", "unsharded_parameters", 4),
    _rule(r"/torch/distributed/.*fsdp", r"\w*reduce\w*|post_backward", "backward", "unsharded_gradients", 4),
    _rule(r"/torch/distributed/distributed_c10d\.py", r".*", "", "communication", 3),
    _rule(r"/torch/nn/parallel/distributed\.py", r"__init__|_ddp_init_helper", "setup", "communication", 4),
    _rule(r"/torch/utils/checkpoint\.py", r"unpack_hook|recompute_fn", "backward", "forward_undecided", 4),
    _rule(r"", r".*AccumulateGrad.*", "backward", "gradients", 4),
    _rule(r"", r".*c10d::.*", "", "communication", 4),
    _rule(r"", r".*(?:::\w*Workspace|getCurrentCUDABlasHandle).*", "", "library_workspace", 4),
    _rule(
        r"", r"backward|_engine_run_backward|.*autograd::(?:\w+::)*\w*Engine::.*", "backward", "backward_temporaries", 3
    ),
    _rule(r"/torch/utils/data/", r".*", "", "inputs", 2),
    _rule(r"/torch/nn/modules/module\.py", r"_apply|to|cuda|load_state_dict", "setup", "model_parameters", 2),
    _rule(r"/torch/nn/modules/", r"__init__|reset_parameters", "setup", "model_parameters", 2),
    _rule(r"/torch/nn/(?:init|parameter)\.py", r".*", "setup", "model_parameters", 2),
    _rule(r"/transformers/modeling_utils\.py", r"from_pretrained|_load\w*", "setup", "model_parameters", 2),
    _rule(r"/torch/nn/modules/module\.py", r"_call_impl|_wrapped_call_impl", "forward", "forward_undecided", 1),
    _rule(r"/torch/nn/functional\.py", r".*", "forward", "forward_undecided", 1),
)
# Autograd's own threads run no Python, except for hooks and functions of the program's own.
IN_AUTOGRAD_THREAD = Purpose(phase="backward", category="backward_temporaries")

_LAYER = re.compile(r"/torch/nn/(?:modules|\w+/modules)/(?!module\.py)(\w+)\.py$")
_OF_LIBRARIES = re.compile(
    r"/(?:torch|torchgen|opacus|opacus_memprof|typer|click|pluggy|_pytest)/|/(?:runpy|contextlib|threading)\.py$"
    r"|^<frozen |^\?\?|\.(?:cpp|cc|h|hpp|cu|cuh|so|c)$|^$"
)


class _Node(NamedTuple):
    """The purpose of a stack so far, and the weight of the rules that have decided it."""

    purpose: Purpose
    phase_weight: int = 0
    category_weight: int = 0


def purposes(frames: Sequence[Frame], callers: Sequence[int], calls: Sequence[int]) -> list[Purpose]:
    """Returns the purpose of an allocation with each of these stacks.

    Stacks form a tree, because many begin alike: a node is a stack, which has one frame more than its parent. Node 0 is
    the empty stack, and parents come before their children.

    Args:
        frames: all frames that occur.
        callers: the parent of each node.
        calls: the index of each node's innermost frame.
    """
    rule_of = lru_cache(maxsize=None)(_first_rule)
    nodes = [_Node(NOTHING)]
    for caller, call in zip(callers[1:], calls[1:], strict=True):
        nodes.append(_called(nodes[caller], frames[call], rule_of(frames[call].file, frames[call].name)))
    return [node.purpose for node in nodes]


def _first_rule(file: str, function: str) -> _Rule | None:
    path = f"/{file}"
    return next((rule for rule in _RULES if rule.function.fullmatch(function) and rule.file.search(path)), None)


def _called(node: _Node, frame: Frame, rule: _Rule | None) -> _Node:
    purpose, phase_weight, category_weight = node
    phase, category, module, line = purpose.phase, purpose.category, purpose.module, purpose.line
    if rule is not None:
        if rule.phase and rule.weight >= phase_weight:
            phase, phase_weight = rule.phase, rule.weight
        elif phase == "idle":
            phase = ""
        if rule.weight >= category_weight:
            category, category_weight = rule.category, rule.weight
    file = frame.file.rpartition("/")[2]
    if not _OF_LIBRARIES.search(frame.file):
        line = f"{file}:{frame.line} {frame.name}"
        if frame.name == "forward":
            module = f"{module}.{_stem(file)}:{frame.line}".lstrip(".")
    elif frame.name == "forward" and (layer := _LAYER.search(frame.file)):
        module = f"{module}.{layer[1]}".lstrip(".")
    return _Node(Purpose(phase, category, module, line), phase_weight, category_weight)


def _stem(file: str) -> str:
    return file.removesuffix(".py").replace(".", "_")
