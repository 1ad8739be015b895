# SPDX-License-Identifier: Apache-2.0
"""A gradient is `gradients` as soon as autograd has accumulated it, whatever hooks a program has there too."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from opacus_memprof import hooks
from opacus_memprof.recording import native


def category_of(tensor: torch.Tensor) -> tuple[str, str]:
    """Category and module of its block, looked up by its address."""
    (block,) = (block for block in native.live_blocks() if block["address"] == tensor.data_ptr())
    return block["category"], block["module"]


class Seen:
    """A program's hook: what the profiler calls the gradient at that moment."""

    def __init__(self) -> None:
        self.gradients: list[tuple[str, str]] = []

    def __call__(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self.gradients.append(category_of(parameter.grad))


@pytest.fixture
def model(clean_process: None) -> Iterator[nn.Sequential]:
    native.cpu_install()
    yield nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))
    native.cpu_uninstall()


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()


@pytest.mark.parametrize("when", ["before", "after", "both"])
def test_programs_hooks_run_and_see_gradients(model: nn.Sequential, when: str) -> None:
    seen, expected = Seen(), []
    if when != "after":
        model[0].weight.register_post_accumulate_grad_hook(seen)
        expected.append(("gradients", "0"))
    attachment = hooks.attach_model(model)
    if when != "before":
        model[0].weight.register_post_accumulate_grad_hook(seen)
        expected.append(("gradients", "0"))
    backward(model)
    attachment.detach()
    assert seen.gradients == expected
    assert model[0].weight.grad is not None
    assert model[2].bias.grad is not None
    assert category_of(model[2].bias.grad) == ("gradients", "2")


def test_hook_registered_between_steps(model: nn.Sequential) -> None:
    attachment = hooks.attach_model(model)
    backward(model)
    model.zero_grad()
    seen = Seen()
    handle = model[2].weight.register_post_accumulate_grad_hook(seen)
    backward(model)
    handle.remove()
    model.zero_grad()
    backward(model)
    attachment.detach()
    assert seen.gradients == [("gradients", "2")]
    assert model[2].weight.grad is not None
    assert category_of(model[2].weight.grad) == ("gradients", "2")


@pytest.mark.parametrize("when", ["before", "after"])
def test_detach_leaves_the_programs_hooks(model: nn.Sequential, when: str) -> None:
    seen = Seen()
    register: Callable[[], object] = lambda: model[0].weight.register_post_accumulate_grad_hook(seen)  # noqa: E731
    if when == "before":
        register()
    attachment = hooks.attach_model(model)
    if when == "after":
        register()
    backward(model)
    model.zero_grad()
    attachment.detach()
    backward(model)
    assert [category for category, _ in seen.gradients] == ["gradients", "backward_temporaries"]
    assert model[2].weight.grad is not None
    assert category_of(model[2].weight.grad)[0] == "backward_temporaries"


def test_gradient_dropped_by_a_hook(model: nn.Sequential) -> None:
    """The remedy for discarded gradients."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    attachment = hooks.attach_model(model)
    backward(model)
    attachment.detach()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not [block for block in native.live_blocks() if block["category"] == "gradients"]


def test_frozen_parameter_that_is_trained_later(model: nn.Sequential) -> None:
    model[0].requires_grad_(False)
    attachment = hooks.attach_model(model)
    backward(model)
    assert model[0].weight.grad is None
    model[0].requires_grad_(True)
    backward(model)
    attachment.detach()
    assert model[0].weight.grad is not None
    assert category_of(model[0].weight.grad) == ("gradients", "0")


def test_model_that_ends_before_detach() -> None:
    model = nn.Linear(3, 1)
    attachment = hooks.attach_model(model)
    lost = native.gradient_hooks_lost()
    del model
    assert native.gradient_hooks_lost() == lost + 2  # weight and bias went at once: nothing holds them
    attachment.detach()


@pytest.mark.parametrize("own_hook", [False, True])
def test_compiled_autograd(model: nn.Sequential, own_hook: bool) -> None:
    """Its graphs have no place for the profiler's hook, and must still run the program's."""
    calls: list[int] = []
    if own_hook:
        model[0].weight.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    attachment = hooks.attach_model(model)
    loss = model(torch.ones(2, 3)).sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    attachment.detach()
    torch._dynamo.reset()  # its caches hold the graph, and that the model
    assert model[0].weight.grad is not None
    assert len(calls) == own_hook
