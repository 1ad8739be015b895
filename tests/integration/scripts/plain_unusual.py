# SPDX-License-Identifier: Apache-2.0
"""Trains without Opacus in ways that are not the usual one, and prints what comes of each."""

import gc
from collections.abc import Callable

import torch
from torch import Tensor, nn


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))


def train(model: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        loss = model(torch.randn(8, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {loss.item()!r}")


def an_optimizer_for_each_epoch() -> None:
    model = net()
    for _ in range(3):
        train(model, torch.optim.Adam(model.parameters()))


def scripted_and_traced() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.ones(2, 64)
    print(torch.jit.script(model).code)
    print(torch.jit.trace(model, inputs).code)
    train(model, optimizer)
    print(torch.jit.script(model)(inputs), torch.jit.trace(model, inputs)(inputs))
    train(model, optimizer)


def parameters_computed_from_others() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        fast = {name: parameter * 1.0 for name, parameter in model.named_parameters()}
        loss = torch.func.functional_call(model, fast, (torch.randn(8, 64),)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {loss.item()!r}")
    train(model, optimizer)


def shapes_from_the_first_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(32), nn.Linear(32, 8))
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def probed_before_its_first_pass() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shapes: list[torch.Size] = []

    def probe(module: nn.Module, args: tuple[Tensor]) -> None:
        if not shapes:
            shapes.append(args[0].shape)
            print(module(args[0]).sum().item())

    model.register_forward_pre_hook(probe, prepend=True)
    train(model, optimizer)


def in_parts() -> object:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    train(lambda inputs: model[2](model[1](model[0](inputs))), optimizer)
    return model, optimizer


def compiled_after_the_optimizer_is_made() -> object:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    train(compiled, optimizer)
    print(model(torch.ones(2, 64)))
    train(compiled, optimizer)
    return compiled, optimizer


def called_by_a_compiled_function() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(lambda inputs: model(inputs) * 2, fullgraph=True, backend="eager")
    print(model(torch.ones(2, 64)))
    train(compiled, optimizer)


an_optimizer_for_each_epoch()
scripted_and_traced()
parameters_computed_from_others()
shapes_from_the_first_batch()
probed_before_its_first_pass()
kept = in_parts(), compiled_after_the_optimizer_is_made()
called_by_a_compiled_function()
gc.collect()  # the compiled function's model is in a cycle
