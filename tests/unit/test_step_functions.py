# SPDX-License-Identifier: Apache-2.0
"""What hooks call in every step: which tensors they find, what they leave alone, and what they refuse."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import vmap

import opacus_memprof
from opacus_memprof.recording import native

GRADIENTS, STATES = native.category_id("gradients"), native.category_id("optimizer_states")


@pytest.fixture(autouse=True)
def cpu() -> Iterator[None]:
    native.cpu_install()
    yield
    native.cpu_uninstall()


def category_of(tensor: torch.Tensor) -> str:
    address = tensor.untyped_storage().data_ptr()
    return next(str(block["category"]) for block in native.live_blocks() if block["address"] == address)


A, B, C, D = (torch.zeros(1) for _ in range(4))


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (A, [A]),
        (nn.Parameter(A), [A]),
        (None, []),
        ([], []),
        (((A, [B, None, 3, 2.5, "text", b"bytes"]), {"k": UserDict({"t": C}), "s": object()}, D), [A, B, C, D]),
        (OrderedDict(first=[A], second=B), [A, B]),
        ({"k": A}.values(), [A]),
        ((tensor for tensor in (A, B)), [A, B]),
        ([iter([A])], []),  # what is inside is the program's to read
    ],
)
def test_tensors_in_what_programs_pass_around(value: Any, found: list[torch.Tensor]) -> None:
    assert [t.data_ptr() for t in native.tensors_in(value)] == [t.data_ptr() for t in found]


@pytest.mark.parametrize("value", [7, object(), 2.5])
def test_what_nests_nothing_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="not iterable"):
        native.retag(value, GRADIENTS)


SEARCHES: list[Callable[[Any], object]] = [
    native.tensors_in,
    native.tag_inputs,
    native.settle_all,
    lambda value: native.capture(0, value),
    lambda value: native.retag(value, GRADIENTS),
    lambda value: native.retag_if(value, [GRADIENTS], GRADIENTS),
    lambda value: native.retag_gradients(value, GRADIENTS),
    lambda value: opacus_memprof.retag(value, "gradients"),
]


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("make", [lambda item: [A, item], lambda item: {"k": item}, lambda item: UserDict(k=item)])
def test_what_contains_itself_is_refused(search: Callable[[Any], object], make: Callable[[Any], Any]) -> None:
    endless = make(None)
    endless[1 if isinstance(endless, list) else "k"] = endless
    with pytest.raises(RecursionError, match=r"at most 100 levels deep: does a sequence or mapping contain itself\?"):
        search(endless)
    assert [t.data_ptr() for t in native.tensors_in([A])] == [A.data_ptr()]  # the next search starts anew


def test_tensors_are_found_a_hundred_levels_deep() -> None:
    value: list[Any] = [A]
    for _ in range(99):
        value = [value]
    assert [t.data_ptr() for t in native.tensors_in(value)] == [A.data_ptr()]
    with pytest.raises(RecursionError):
        native.tensors_in([value])


class Unaskable:
    """Raises where torch looks whether it is a tensor."""

    @property
    def __class__(self) -> Any:
        raise LookupError("no class")


def test_an_error_set_by_torch_is_raised_unchanged() -> None:
    parameter = torch.zeros(3)
    parameter.odd = Unaskable()  # type: ignore[attr-defined]
    with pytest.raises(LookupError, match="no class"):
        native.retag([Unaskable()], GRADIENTS)
    with pytest.raises(LookupError, match="no class"):
        native.retag_attribute([parameter], "odd", GRADIENTS)


def test_a_mapping_that_fails_is_heard() -> None:
    class Broken(UserDict[str, torch.Tensor]):
        def values(self) -> Any:
            raise LookupError("values")

    with pytest.raises(LookupError, match="values"):
        native.tensors_in([Broken()])


@pytest.mark.parametrize(
    ("make", "expected"),  # made in the test: what is profiled must not outlive it
    [
        (lambda: (torch.zeros(3, 4), {"mask": torch.zeros(3)}), (3, 15)),
        (lambda: [torch.tensor(1.0), torch.zeros(5, 2)], (5, 11)),
        (lambda: [torch.zeros(0, 4), torch.zeros(3)], (0, 3)),  # as Poisson sampling may draw it
        (lambda: [torch.tensor(1.0)], (-1, 1)),
        (lambda: [torch.zeros(3, 4).requires_grad_(), torch.zeros(2)], (2, 2)),
        (lambda: ["text", None], (-1, 0)),
    ],
)
def test_a_batch_is_its_samples_and_elements(make: Callable[[], Any], expected: tuple[int, int]) -> None:
    assert native.tag_inputs(make()) == expected


def test_inputs_are_what_nobody_has_computed_or_claimed() -> None:
    given, weight, claimed = torch.zeros(100), torch.zeros(100).requires_grad_(), torch.zeros(100)
    computed = 2 * weight
    native.retag(claimed, GRADIENTS)
    native.tag_inputs([given, weight, computed, claimed])
    categories = [category_of(tensor) for tensor in (given, weight, computed, claimed)]
    assert categories == ["inputs", "unattributed", "unattributed", "gradients"]


def test_nested_tensors_are_inputs_without_a_size() -> None:
    values = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)])
    assert native.tag_inputs((values,)) == (-1, 0)
    assert category_of(values.values()) == "inputs"


@pytest.mark.parametrize(
    ("made", "category"),
    [
        (lambda: torch.zeros(100), "inputs"),
        (lambda: torch.zeros(100)[10:], "inputs"),
        (lambda: nn.Parameter(torch.zeros(100)), "forward_undecided"),
    ],
)
def test_a_target_that_only_forward_holds_is_inputs(made: Callable[[], torch.Tensor], category: str) -> None:
    with native.Tag(category=native.category_id("forward_undecided")):
        target = made()
    native.tag_target(target)
    assert category_of(target) == category


def test_a_target_that_something_else_holds_is_left_alone() -> None:
    with native.Tag(category=native.category_id("forward_undecided")):
        activation = torch.zeros(100)
    target = activation.detach()
    native.tag_target(target)
    assert category_of(target) == "forward_undecided"
    del activation
    native.tag_target(target)
    assert category_of(target) == "inputs"


def test_targets_without_memory_of_their_own_are_passed_over() -> None:
    def loss(target: torch.Tensor) -> torch.Tensor:
        native.tag_target(target)
        return target.sum()

    assert vmap(loss)(torch.ones(3, 2)).tolist() == [2, 2, 2]
    for target in (None, 7, "text", torch.zeros(3, device="meta"), torch.sparse_coo_tensor(size=(2, 2))):
        native.tag_target(target)


def test_the_first_state_speaks_for_all() -> None:
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    states = {first: {"step": 3, "moments": [torch.zeros(100)]}, second: {"moments": [torch.zeros(100)]}}
    assert native.retag_first_state({}, STATES) == 0
    assert native.retag_first_state({"step": 7}, STATES) == 0
    assert native.retag_first_state(states, STATES) == 400
    assert native.retag_first_state(states, STATES) == 0
    states[first]["moments"] = [torch.zeros(50)]
    assert native.retag_first_state(states, STATES) == 200


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: native.set_phase(-1), ValueError),
        (lambda: native.set_phase(200), ValueError),
        (lambda: native.set_phase("forward"), TypeError),  # type: ignore[arg-type]
        (lambda: native.retag(A), TypeError),  # type: ignore[call-arg]
        (lambda: native.retag_attribute([A], 3, GRADIENTS), TypeError),  # type: ignore[arg-type]
        (lambda: native.retag_first_state([A], GRADIENTS), TypeError),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_another_kind_are_refused(call: Callable[[], object], error: type[Exception]) -> None:
    with pytest.raises(error):
        call()


def test_set_phase_returns_the_one_before() -> None:
    idle, clip = native.phase_id("idle"), native.phase_id("clip")
    before = native.set_phase(clip)
    assert native.set_phase(idle) == clip
    native.set_phase(before)
