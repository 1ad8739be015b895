# SPDX-License-Identifier: Apache-2.0
"""torch.compile of an attached model: the same results and the same graphs as without the profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from opacus_memprof import hooks
from opacus_memprof.hooks import observers
from opacus_memprof.recording import native
from tests.integration.opacus_training import Model, attached, cpu, prepare  # noqa: F401
from tests.integration.test_opacus_detach import state_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore::DeprecationWarning"),
    pytest.mark.usefixtures("fresh_dynamo"),
]

SIZES = (6, 7, 9, 11, 8)
TORCH_COMPILE = torch.compile  # what `from torch import compile` gives a script at its top
Compile = Callable[..., Any]


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def layers() -> nn.Sequential:
    """Of torch's own classes alone: their hooks are traced, where those of a class of one's own run outside."""
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 24), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 24, 3))


def as_wrapper(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, **options)


def in_place(model: nn.Module, **options: Any) -> Any:
    model.compile(**options)
    return model


def by_a_function(model: nn.Module, **options: Any) -> Any:
    return torch.compile(lambda tokens: model(tokens), **options)


def by_a_method(model: nn.Module, **options: Any) -> Any:
    class Trainer:
        def __init__(self) -> None:
            self.model = model

        def predict(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.model(tokens)

    return torch.compile(Trainer().predict, **options)


def compile_forward(model: nn.Module, **options: Any) -> Any:
    model.forward = torch.compile(model.forward, **options)
    return model


def imported_before(model: nn.Module, **options: Any) -> Any:
    return TORCH_COMPILE(model, **options)


WAYS = (as_wrapper, in_place, by_a_function, by_a_method, compile_forward)


def train(mode: str, network: Callable[[], nn.Module], compile: Compile, backend: str, profiled: bool) -> list[Any]:
    """Losses and parameters, then the numbers of graphs, operations in them, and breaks."""
    torch._dynamo.reset()
    counters.clear()
    training = prepare(mode, network)
    attachment = hooks.attach_private(training.prepared) if profiled else None
    training.model = compile(training.model, backend=backend)
    generator = torch.Generator().manual_seed(2)
    results: list[Any] = [
        training.step(torch.randint(11, (n, 5), generator=generator), torch.randint(3, (n,), generator=generator))
        for n in SIZES
    ]
    if attachment is not None:
        attachment.detach()
    stats = counters["stats"]
    results += [p.detach().clone() for group in training.optimizer.param_groups for p in group["params"]]
    return [*results, stats["unique_graphs"], stats["calls_captured"], sum(counters["graph_break"].values())]


def assert_same(left: list[Any], right: list[Any]) -> None:
    assert len(left) == len(right) > len(SIZES)
    for a, b in zip(left, right, strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "network", "compile", "backend"),
    [
        pytest.param("vanilla", Model, in_place, "eager", marks=pytest.mark.nightly),
        ("vanilla", layers, as_wrapper, "aot_eager"),
        pytest.param("hooks", Model, as_wrapper, "aot_eager", marks=pytest.mark.nightly),
        ("hooks", layers, in_place, "eager"),
        pytest.param("functorch", layers, as_wrapper, "aot_eager", marks=pytest.mark.nightly),
    ],
)
def test_results_and_graphs_are_those_without(
    compile: Compile,
    backend: str,
    mode: str,
    network: Callable[[], nn.Module],
    cpu: None,  # noqa: F811
) -> None:
    plain = train(mode, network, compile, backend, profiled=False)
    assert plain[-3] > 0
    assert_same(plain, train(mode, network, compile, backend, profiled=True))


@pytest.mark.parametrize("mode", [pytest.param("vanilla", marks=pytest.mark.nightly), "hooks"])
def test_imported_compile_gives_the_same_results(mode: str, cpu: None) -> None:  # noqa: F811
    plain = train(mode, Model, imported_before, "aot_eager", profiled=False)
    assert_same(plain[:-3], train(mode, Model, imported_before, "aot_eager", profiled=True)[:-3])


@pytest.mark.parametrize("network", [Model, layers])
@pytest.mark.parametrize("compile", WAYS)
def test_one_graph_whose_forward_is_seen(
    compile: Compile,
    network: Callable[[], nn.Module],
    cpu: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs, begun = [], []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    options: dict[str, Any] = {"backend": backend, "fullgraph": True, "dynamic": True}
    compile(prepare("vanilla", network).model, **options)(tokens())
    expected = len(graphs)  # torch 2.11 compiles none of its own classes in place
    assert expected == 1 or (compile, network) == (in_place, layers)
    graphs.clear()
    torch._dynamo.reset()
    monkeypatch.setattr(observers, "on_forward_begin", lambda: begun.append(True))
    training = prepare("vanilla", network)
    with attached(training):
        compiled = compile(training.model, **options)
        for calls in range(1, 4):
            assert tag_of(compiled(tokens())) == ("forward_undecided", "forward")
            assert (len(graphs), len(begun)) == (expected, calls)


@pytest.mark.parametrize("network", [Model, layers])
@pytest.mark.parametrize("compile", [as_wrapper, in_place])
def test_forward_is_seen_where_compiling_runs_a_backward(
    compile: Compile,
    network: Callable[[], nn.Module],
    cpu: None,  # noqa: F811
) -> None:
    training = prepare("vanilla", network)
    with attached(training):
        compiled = compile(training.model, backend="aot_eager")
        assert tag_of(compiled(tokens())) == ("forward_undecided", "forward")
    torch._dynamo.reset()
    training.returned = compiled
    with attached(training):
        assert tag_of(compiled(tokens())) == ("forward_undecided", "forward")


def test_the_model_itself_is_followed_as_well(cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    begun = []
    training = prepare("vanilla")
    with attached(training):
        compiled = torch.compile(training.model, backend="eager")
        monkeypatch.setattr(observers, "on_forward_begin", lambda: begun.append(True))
        for expected, model in enumerate((compiled, training.model, compiled), 1):
            assert tag_of(model(tokens())) == ("forward_undecided", "forward")
            assert len(begun) == expected


def test_an_error_in_the_compiled_forward_ends_it(cpu: None) -> None:  # noqa: F811
    training = prepare("vanilla", layers)
    with attached(training):
        compiled = torch.compile(training.model, backend="eager")
        with pytest.raises(IndexError):
            training.model(tokens() + 11)
        with pytest.raises((IndexError, RuntimeError)):
            compiled(tokens() + 11)
        assert tag_of(training.model(tokens())) == ("forward_undecided", "forward")


@pytest.mark.parametrize("compile", [as_wrapper, in_place])
def test_attached_again_it_keeps_its_graphs(compile: Compile, cpu: None) -> None:  # noqa: F811
    training = prepare("vanilla", layers)
    with attached(training):
        compiled = compile(training.model, backend="eager", fullgraph=True)
        compiled(tokens())
    with attached(training), torch.compiler.set_stance("fail_on_recompile"):
        assert tag_of(compiled(tokens())) == ("forward_undecided", "forward")


def test_detaching_leaves_what_was_there(cpu: None) -> None:  # noqa: F811
    functions = torch.compile, nn.Module.compile
    training = prepare("hooks")
    training.run()
    before = state_of(training)
    with attached(training):
        assert (torch.compile, nn.Module.compile) != functions
        while_attached = torch.compile
        compiled = torch.compile(training.model, backend="eager")
        around = vars(compiled)["forward"]
        training.model.head.compile(backend="eager")
        replace(training, model=compiled).run()
    assert (torch.compile, nn.Module.compile) == functions
    assert vars(compiled)["forward"] is around.__wrapped__
    del training.model.head._compiled_call_impl
    for parameter in training.model.parameters():  # torch's own marks
        vars(parameter).pop("_dynamo_static_input_type", None)
    for mark in ("_is_torch_compile", "_compile_kwargs"):  # the latter is Lightning's, once it is imported
        vars(training.model).pop(mark, None)
    assert state_of(training) == before
    assert while_attached(nn.Linear(2, 2), backend="eager")(torch.ones(1, 2)).shape == (1, 2)


def test_a_part_that_is_compiled_leaves_the_rest_its_names(cpu: None) -> None:  # noqa: F811
    training = prepare("vanilla")
    with attached(training):
        training.model.block = torch.compile(training.model.block, backend="eager", fullgraph=True)
        made = training.model.head(training.model.block(training.model.embed(tokens())))
        assert module_of(made) == "head"
        training.model(tokens())
    assert counters["stats"]["unique_graphs"] == 1


def tokens() -> torch.Tensor:
    return torch.arange(40).reshape(8, 5) % 11


def block_of(tensor: torch.Tensor) -> dict[str, Any]:
    address = tensor.untyped_storage().data_ptr()
    (found,) = (block for block in native.live_blocks() if block["address"] == address)
    return found


def tag_of(tensor: torch.Tensor) -> tuple[str, str]:
    found = block_of(tensor)
    return found["category"], found["phase"]


def module_of(tensor: torch.Tensor) -> str:
    return str(block_of(tensor)["module"])
