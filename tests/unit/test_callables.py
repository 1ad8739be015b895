# SPDX-License-Identifier: Apache-2.0
"""The extension's callables that stand in Opacus' hot paths: errors pass, tags end, nothing is kept alive."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from opacus_memprof.recording import native

TEMPORARIES, SAMPLES = native.category_id("temp_matrices"), native.category_id("per_sample_gradients")
TAG = native.Tag(category=TEMPORARIES, op=native.op_id("of_a_callable"))


@pytest.fixture(autouse=True)
def cpu() -> Iterator[None]:
    native.cpu_install()
    yield
    native.cpu_uninstall()


MAKERS: dict[str, Callable[[Any], Any]] = {
    "CaptureActivations": lambda f: native.CaptureActivations(f, 0, print),
    "CaptureBackprops": lambda f: native.CaptureBackprops(f, 0, TAG, TAG),
    "Sampler": lambda f: native.Sampler(f, TAG, SAMPLES, None),
    "ParameterFunction": lambda f: native.ParameterFunction(f, TAG, "grad_sample", SAMPLES, None),
    "Tagged": lambda f: TAG(f),
}


def block_of(tensor: torch.Tensor) -> dict[str, Any]:
    return next(block for block in native.live_blocks() if block["address"] == tensor.untyped_storage().data_ptr())


def category_of_new_block() -> str:
    return str(block_of(torch.empty(1000))["category"])


class Layer(nn.Module):
    """With one capture outstanding, as Opacus keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.activations = [[torch.zeros(3)]]


@pytest.mark.parametrize("name", MAKERS)
def test_an_exception_passes_and_ends_the_tag(name: str) -> None:
    def broken(*args: Any) -> None:
        TAG.__enter__()  # which nobody leaves
        raise KeyError("as it was")

    before = category_of_new_block()
    with pytest.raises(KeyError, match="as it was"):
        MAKERS[name](broken)(Layer(), None, None)
    if name == "CaptureActivations":  # runs Opacus' hook under no tag of its own
        TAG.__exit__(None, None, None)
    assert category_of_new_block() == before != "temp_matrices"


@pytest.mark.parametrize("name", MAKERS)
def test_an_argument_that_is_no_callable_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match="callable"):
        MAKERS[name](7)


@pytest.mark.parametrize("wrong", [None, 7])
@pytest.mark.parametrize(
    "make",
    [
        lambda wrong: native.CaptureBackprops(print, 0, wrong, TAG),
        lambda wrong: native.CaptureBackprops(print, 0, TAG, wrong),
        lambda wrong: native.ParameterFunction(print, wrong, "grad_sample", SAMPLES, None),
        lambda wrong: native.Sampler(print, wrong, SAMPLES, None),
    ],
)
def test_an_argument_that_is_no_tag_is_refused(make: Callable[[Any], Any], wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"a Tag is expected, not '{type(wrong).__name__}'"):
        make(wrong)


TENSOR = torch.zeros(3)


CALLS_WITH_A_NAME: list[Callable[[int], Any]] = [  # of a module or an operation
    lambda number: native.CaptureActivations(print, number, print),
    lambda number: native.CaptureBackprops(print, number, TAG, TAG),
    lambda number: native.Tag(module=number),
    lambda number: native.Tag(op=number),
    lambda number: native.capture(number, [TENSOR]),
    lambda number: native.follow_gradient(nn.Parameter(TENSOR), number),
    lambda number: native.retag(TENSOR, SAMPLES, number),
    lambda number: native.set_owner(TENSOR, number),
]
CALLS_WITH_A_CATEGORY: list[Callable[[int], Any]] = [
    lambda number: native.ParameterFunction(print, TAG, "grad_sample", number, None),
    lambda number: native.Sampler(print, TAG, number, None),
    lambda number: native.Tag(category=number),
    lambda number: native.retag(TENSOR, number),
    lambda number: native.retag_attribute([TENSOR], "grad", number),
    lambda number: native.retag_gradients([TENSOR], number),
    lambda number: native.retag_if(TENSOR, [number], SAMPLES),
    lambda number: native.retag_if(TENSOR, [SAMPLES], number),
    lambda number: native.retag_if([], [SAMPLES], number),
]


@pytest.mark.parametrize("number", [-1, 60000])  # more names than a process of tests gives
@pytest.mark.parametrize("call", CALLS_WITH_A_NAME + CALLS_WITH_A_CATEGORY)
def test_an_id_of_no_name_is_refused(call: Callable[[int], Any], number: int) -> None:
    with pytest.raises(ValueError, match=r"\bid\b"):
        call(number)


@pytest.mark.parametrize("call", CALLS_WITH_A_CATEGORY)
def test_a_byte_that_no_category_has_is_refused(call: Callable[[int], Any]) -> None:
    with pytest.raises(ValueError, match=r"\bid\b"):
        call(200)


@pytest.mark.parametrize("name", MAKERS)
def test_a_cycle_through_it_is_collected(name: str) -> None:
    class Function:
        def __call__(self) -> None: ...

    function = Function()
    function.wrapper = MAKERS[name](function)  # type: ignore[attr-defined]
    reference = weakref.ref(function)
    del function
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("name", ["CaptureActivations", "CaptureBackprops"])
@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda hook: pickle.loads(pickle.dumps(hook))])
def test_a_copy_of_a_hook_is_the_hook_alone(name: str, make_copy: Any) -> None:
    copied = make_copy(MAKERS[name](functools.partial(max, 3)))
    assert type(copied) is functools.partial
    assert copied(5) == 5


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda sampler: pickle.loads(pickle.dumps(sampler))])
def test_a_copy_of_a_sampler_samples(make_copy: Any) -> None:
    copied = make_copy(native.Sampler(dict, TAG, SAMPLES, None))
    assert type(copied) is native.Sampler
    assert copied.__wrapped__ is dict
    assert copied(a=1) == {"a": 1}


def test_sampler_names_what_was_born_inside_and_shows_it() -> None:
    shown = []
    outside = torch.empty(1000)

    def sample(layer: str, activations: None, backprops: str) -> dict[str, torch.Tensor]:
        kept = torch.empty(1000)
        assert block_of(kept)["category"] == "temp_matrices"
        return {"made": kept[1:], "view": outside[:2]}

    before = block_of(outside)["category"]
    samples = native.Sampler(sample, TAG, SAMPLES, lambda *seen: shown.append(seen))("layer", None, "backprops")
    assert block_of(samples["made"])["category"] == "per_sample_gradients"
    assert block_of(outside)["category"] == before
    assert shown == [("layer", "backprops", samples)]


def test_an_observer_that_fails_is_heard() -> None:
    def fail(*seen: Any) -> None:
        raise LookupError("observer")

    with pytest.raises(LookupError, match="observer"):
        native.Sampler(lambda *args: {}, TAG, SAMPLES, fail)(None, None, None)


@pytest.mark.parametrize("via", [None, "orig_weight"])
def test_parameter_function_names_what_it_sets_for_the_owner(via: str | None) -> None:
    parameter = nn.Parameter(torch.zeros(4))
    native.set_owner(parameter, native.module_id("some.owner"))

    def set_samples(argument: Any, shape: int) -> None:
        parameter.grad_sample = torch.empty(shape)

    function = native.ParameterFunction(set_samples, TAG, "grad_sample", SAMPLES, via)
    function(parameter if via is None else SimpleNamespace(orig_weight=parameter), 1000)
    native.remove_owner(id(parameter))
    block = block_of(parameter.grad_sample)
    assert (block["category"], block["module"]) == ("per_sample_gradients", "some.owner")
    function(SimpleNamespace(), 10)  # an argument without a parameter, or a parameter without samples


def test_retag_attribute_skips_parameters_without() -> None:
    with_grad, without = nn.Parameter(torch.zeros(100)), nn.Parameter(torch.zeros(100))
    with_grad.grad = torch.zeros(100)
    native.set_owner(with_grad, native.module_id("some.owner"))
    gradients = native.category_id("gradients")
    assert native.retag_gradients([without, with_grad], gradients) == 400
    with_grad.summed_grad = torch.zeros(50)  # type: ignore[attr-defined]
    assert native.retag_attribute([without, with_grad], "summed_grad", gradients) == 200
    assert native.retag_attribute([without, with_grad], "no_such", gradients) == 0
    native.remove_owner(id(with_grad))
    assert native.owner_of(with_grad) == 0
    assert block_of(with_grad.grad)["module"] == "some.owner"
