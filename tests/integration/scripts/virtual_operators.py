# SPDX-License-Identifier: Apache-2.0
"""All of torch's operators on small inputs, in place as well: what a virtual GPU gives, compared with the CPU.

`python virtual_operators.py SAMPLES SHARD SHARDS [NAME...]` prints as JSON, for each operator of the shard, one of

* equal: the same values as on the CPU, or the same shapes where they are random or undefined
* said: other values, and reading them was counted
* silent: other values, without a word
* refused: an error that the CPU does not have
* left out: there is no type that both have, or the samples are views whose memory a copy to a GPU does not have
"""

import json
import sys
import types
import unittest
import warnings
from typing import Any

from opacus_memprof import virtual_gpu

virtual_gpu.start("h200")

# torch's own test cases need it, and none of them is run here.
sys.modules.setdefault("expecttest", types.ModuleType("expecttest")).TestCase = unittest.TestCase  # type: ignore[attr-defined]

import torch  # noqa: E402
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

from opacus_memprof.virtual_gpu import values  # noqa: E402

warnings.simplefilter("ignore")

# Their results are memory that nothing has written.
_UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
_UNDEFINED |= {"resize_", "resize_as_"}

# Out of training, the CPU leaves out what a GPU saves: the running mean and the reciprocal running deviation.
_SAVE_STATISTICS = {"native_batch_norm", "_native_batch_norm_legit"}


def on_cuda(value: Any) -> Any:
    def move(tensor: Any) -> Any:
        return (
            tensor.detach().cuda().requires_grad_(tensor.requires_grad) if isinstance(tensor, torch.Tensor) else tensor
        )

    moved = pytree.tree_map(move, value)
    return pytree.tree_map(lambda leaf: torch.device("cuda") if isinstance(leaf, torch.device) else leaf, moved)


def uses() -> int:
    return sum(use.count for use in [*values.unknown_reads(), *values.assumed_shapes()])


def tensors_of(result: Any) -> list[torch.Tensor]:
    return [leaf.detach() for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def dense(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.cpu().resolve_conj().resolve_neg()
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def compare(operator: Any, sample: Any, on_host: Any, on_device: Any) -> str:
    expected, found = tensors_of(on_host), tensors_of(on_device)
    if operator.name in _SAVE_STATISTICS and not (sample.args[-3] or expected[1].numel()):
        mean, variance = sample.args[2:4]
        expected[1:] = [mean, 1 / (variance + sample.args[-1]).sqrt()]
    before = uses()
    arrived = [dense(tensor) for tensor in found]
    counted = uses() > before
    name = operator.name.rpartition(".")[2]
    if name in _UNDEFINED or torch.Tag.nondeterministic_seeded in tags(operator) or random(operator, sample):
        same = [tensor.shape for tensor in expected] == [tensor.shape for tensor in arrived]
        return "equal" if same else "silent"
    try:
        for one, other in zip(arrived, map(dense, expected), strict=True):
            tolerance = 1e-3 if one.dtype in (torch.half, torch.bfloat16) else 2e-4
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True, check_stride=False)
    except (AssertionError, ValueError):
        return "said" if counted else "silent"
    return "equal"


def tags(operator: Any) -> set[Any]:
    found: set[Any] = set()
    packet = getattr(torch.ops.aten, operator.aten_name or operator.name, None)
    for overload in packet.overloads() if packet is not None else ():
        found |= set(getattr(packet, overload).tags)
    return found


def random(operator: Any, sample: Any) -> bool:
    """Draws numbers, or makes a choice of its own, as the signs of eigenvectors."""
    if sample.kwargs.get("dropout_p"):
        return True
    words = ("dropout", "rand", "normal", "bernoulli", "multinomial", "cauchy", "exponential", "geometric", "uniform")
    free = (
        "svd",
        "eig",
        "qr",
        "pca",
        "lobpcg",
        "geqrf",
        "householder",
        "ormqr",
        "pinv",
        "rrelu",
        "fractional",
        "multi_head",
    )
    return any(word in operator.name for word in (*words, *free))


def run(operator: Any, most: int) -> tuple[str, str]:
    """Compares at most so many samples of the operator."""
    types = operator.supported_dtypes("cpu") & operator.supported_dtypes("cuda")
    dtype = next((each for each in (torch.float32, torch.int64, torch.complex64, torch.bool) if each in types), None)
    if dtype is None or operator.variant_test_name == "partial_views":
        return "left out", ""
    worst, reason = "equal", ""
    order = ["equal", "said", "refused", "silent"]
    samples = operator.sample_inputs("cpu", dtype, requires_grad=False)
    in_place = [operator.inplace_variant] if operator.inplace_variant else []
    for _, sample in zip(range(most), samples, strict=False):
        for variant in [operator, *([] if sample.broadcasts_input else in_place)]:
            on_device = [on_cuda(sample.input), on_cuda(sample.args), on_cuda(sample.kwargs)]
            before = uses()
            try:
                given = sample.input if variant is operator else pytree.tree_map(torch.clone, sample.input)
                expected = variant(given, *sample.args, **sample.kwargs)
            except Exception:  # what the CPU cannot do
                continue
            try:
                outcome = compare(operator, sample, expected, variant(on_device[0], *on_device[1], **on_device[2]))
                if outcome == "silent" and uses() > before:
                    outcome = "said"
            except Exception as error:
                outcome = "refused"
                reason = f"{type(error).__name__}: {error}"[:200]
            worst = max(worst, outcome, key=order.index)
    return worst, reason


def main() -> None:
    most, shard, shards, *names = sys.argv[1:]
    torch.manual_seed(0)
    chosen = [each for index, each in enumerate(op_db) if index % int(shards) == int(shard)]
    found: dict[str, Any] = {}
    for operator in chosen:
        if names and operator.name not in names:
            continue
        title = operator.name + (f".{operator.variant_test_name}" if operator.variant_test_name else "")
        outcome, reason = run(operator, int(most))
        found[title] = [outcome, reason]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
