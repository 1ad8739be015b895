# SPDX-License-Identifier: Apache-2.0
"""The parts that hooks are made of: undoing, sharing, names, nested arguments."""

from __future__ import annotations

import gc
import types
import warnings
import weakref
from collections import OrderedDict

import pytest
import torch
from opacus import PrivacyEngine
from opacus.grad_sample import GradSampleModule
from torch import nn

from opacus_memprof import hooks
from opacus_memprof.hooks import diagnosis
from opacus_memprof.hooks.modules import assign_name_prefix, named_modules
from opacus_memprof.hooks.observers import on_add_noise
from opacus_memprof.profiles.layer_shapes import Program, TrainingShapes
from opacus_memprof.recording import faults, native, observations
from opacus_memprof.recording.attachment import Attachment, SharedPatch


class TestAttachment:
    def test_undoes_the_latest_first_and_once(self) -> None:
        undone: list[int] = []
        attachment = Attachment()
        for number in range(3):
            attachment.on_detach(lambda number=number: undone.append(number))
        attachment.detach()
        attachment.detach()
        assert undone == [2, 1, 0]

    def test_attribute(self) -> None:
        module = types.ModuleType("some")
        module.f = "before"
        attachment = Attachment()
        attachment.replace_attribute(module, "f", "ours")
        assert module.f == "ours"
        attachment.detach()
        assert module.f == "before"

    def test_attribute_that_somebody_patched_on_top_stays(self) -> None:
        module = types.ModuleType("some")
        module.f = "before"
        attachment = Attachment()
        attachment.replace_attribute(module, "f", "ours")
        module.f = "theirs"
        attachment.detach()
        assert module.f == "theirs"

    def test_item_keeps_its_place(self) -> None:
        registry = {"a": 1, "b": 2, "c": 3}
        attachment = Attachment()
        attachment.replace_item(registry, "b", 20)
        assert list(registry.items()) == [("a", 1), ("b", 20), ("c", 3)]
        attachment.detach()
        assert list(registry.items()) == [("a", 1), ("b", 2), ("c", 3)]

    def test_item_that_was_registered_anew_stays(self) -> None:
        registry = {"a": 1}
        attachment = Attachment()
        attachment.replace_item(registry, "a", 10)
        registry["a"] = 2
        attachment.detach()
        assert registry == {"a": 2}

    def test_hook_is_held_by_its_table_alone(self) -> None:
        class Hook:
            def __call__(self) -> None: ...

        table: OrderedDict[int, object] = OrderedDict({7: Hook()})
        reference = weakref.ref(table[7])
        attachment = Attachment()
        attachment.replace_hook(table, 7, native.CaptureActivations(table[7], 0, print))
        assert isinstance(table[7], native.CaptureActivations)
        table.clear()
        gc.collect()
        assert reference() is None
        attachment.detach()
        assert not table

    def test_hook_comes_back(self) -> None:
        table: OrderedDict[int, object] = OrderedDict({7: print, 8: repr})
        attachment = Attachment()
        attachment.replace_hook(table, 7, native.CaptureActivations(print, 0, print))
        attachment.detach()
        assert list(table.items()) == [(7, print), (8, repr)]


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_no_fault(interrupt: type[BaseException]) -> None:
    undone: list[str] = []

    def work(*arguments: object) -> None:
        raise interrupt

    def change(unit: Attachment) -> None:
        unit.on_detach(lambda: undone.append("change"))
        work()

    def after_call() -> faults.CallHook:
        yield
        work()

    def before_call() -> faults.CallHook:
        work()
        yield

    def in_block() -> None:
        with faults.contain("working"):
            work()

    faults.clear()
    for action in (
        in_block,
        faults.contain("working")(work),
        faults.observe(lambda: None, before_call),
        faults.observe(lambda: None, after_call),
        lambda: Attachment().apply("a change", change),
    ):
        with pytest.raises(interrupt):
            action()
    assert undone == ["change"]
    assert faults.recorded() == []


def test_a_hundred_faults_are_told_each_once() -> None:
    faults.clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in [*range(120), 5]:
            faults.record(f"fault {number}")
    assert faults.recorded() == [str(each.message) for each in told] == [f"fault {number}" for number in range(100)]
    faults.clear()


def test_shared_patches_last_until_the_last_user_leaves() -> None:
    module = types.ModuleType("some")
    module.f = 0

    def patch(attachment: Attachment) -> None:
        attachment.replace_attribute(module, "f", module.f + 1)

    shared = SharedPatch(patch)
    for _ in range(2):
        first, second = Attachment(), Attachment()
        shared.use(first)
        shared.use(second)
        first.detach()
        first.detach()
        assert module.f == 1
        second.detach()
        assert module.f == 0


def block() -> nn.Module:
    return nn.ModuleDict({"inner": nn.Sequential(nn.Linear(2, 2)), "_module": nn.ReLU()})


def test_names_are_the_users() -> None:
    plain = [name for name, _ in block().named_modules()]
    assert plain == ["", "inner", "inner.0", "_module"]
    assert [name for name, _ in named_modules(block())] == plain
    assert [name for name, _ in named_modules(GradSampleModule(block()))] == plain
    around = nn.Sequential(GradSampleModule(block()))
    assert [name for name, _ in named_modules(around)] == ["", "0", "0.inner", "0.inner.0", "0._module"]


def owner(parameter: torch.Tensor) -> str:
    return str(native.names()["modules"][native.owner_of(parameter)])


def test_models_whose_names_collide_are_kept_apart() -> None:
    gc.collect()
    first, second, third = (nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))) for _ in range(3))
    other = nn.Sequential(nn.ModuleDict({"inner": nn.Linear(2, 2)}))[0]
    models = (first, second, third, other)
    attachments = [hooks.attach_model(model) for model in models]
    plain = ["", "0", "1", "1.0"]
    assert [name for name, _ in named_modules(first)] == plain
    for model, kind in ((second, "Sequential#2"), (third, "Sequential#3")):
        assert [name for name, _ in named_modules(model)] == [kind, f"{kind}.0", f"{kind}.1", f"{kind}.1.0"]
        assert [owner(p) for p in model.parameters()] == [f"{kind}.0"] * 2 + [f"{kind}.1.0"] * 2
    assert [name for name, _ in named_modules(other)] == ["", "inner"]

    for model, kind in ((first, ""), (second, "Sequential#2.")):  # as make_private wraps them
        wrapper = GradSampleModule(model)
        attachments.append(hooks.attach_model(wrapper))
        assert [owner(p) for p in model.parameters()] == [f"{kind}0"] * 2 + [f"{kind}1.0"] * 2

    for attachment in attachments:
        attachment.detach()
    again = hooks.attach_model(third)
    assert [owner(p) for p in third.parameters()] == ["0", "0", "1.0", "1.0"]
    again.detach()


def test_a_prefix_is_assigned_again() -> None:
    """As by two searches for owners, and when a model that one has found is attached."""
    gc.collect()
    first, second = (nn.Sequential(nn.Linear(2, 2)) for _ in range(2))
    attachment = hooks.attach_model(first)
    for _ in range(2):
        assign_name_prefix(attachment, second)
        assert [name for name, _ in named_modules(second)] == ["Sequential#2", "Sequential#2.0"]
    attachment.detach()


def test_tied_parameter_belongs_to_its_first_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    attachment = hooks.attach_model(model)
    named = native.names()["modules"][native.owner_of(model[0].weight)]
    attachment.detach()
    assert named == "0"
    assert native.owner_of(model[0].weight) == 0


def test_compiled_module_keeps_its_inside() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    model[1] = torch.compile(model[1], backend="eager")
    attachment = hooks.attach_model(model)
    try:
        assert "forward" in vars(model[0])
        assert [isinstance(vars(module).get("forward"), native.ScopedForward) for module in model[1].modules()] == [
            False
        ] * 4
        native.cpu_install()
        model(torch.ones(1, 2)).sum().backward()
        gradients = {p.grad.data_ptr() for p in model.parameters() if p.grad is not None}
        followed = {block["address"] for block in native.live_blocks() if block["category"] == "gradients"}
        assert len(gradients) == 4
        assert gradients <= followed
    finally:
        attachment.detach()
        native.cpu_uninstall()


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_raising_forward_leaves_no_tag_behind(error: type[Exception]) -> None:
    class Raising(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise error

    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Raising()))
    attachment = hooks.attach_model(model)
    native.cpu_install()
    try:
        with pytest.raises(error):
            model(torch.ones(2, 2))
        address = (after := torch.ones(1000)).untyped_storage().data_ptr()
        (found,) = (block for block in native.live_blocks() if block["address"] == address)
        assert (found["module"], after.numel()) == ("", 1000)
    finally:
        native.cpu_uninstall()
        attachment.detach()


def test_batches_are_noted_where_their_samples_change() -> None:
    """Empty ones too, as Poisson sampling draws them."""
    observations.clear()  # as a session does: shapes of an earlier test's private model would stay
    model = nn.Linear(3, 2)
    attachment = hooks.attach_model(model)
    for samples in (4, 4, 0, 6, 6):
        model(torch.zeros(samples, 3))
    model(torch.zeros(3))  # a sample alone: its first dimension is all there is to go by
    attachment.detach()
    assert [samples for _, samples in observations.layer_shapes().batches] == [4, 0, 6, 3]


def test_states_that_an_optimizer_computes_anew_are_its_states() -> None:
    class Averaging(torch.optim.Optimizer):
        def __init__(self, parameters: list[nn.Parameter]) -> None:
            super().__init__(parameters, {})

        def step(self, closure: None = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                state["average"] = 0.9 * state.get("average", 0) + parameter.detach()

    parameters = [nn.Parameter(torch.zeros(100)) for _ in range(2)]
    native.cpu_install()
    optimizer = Averaging(parameters)
    attachment = hooks.attach_optimizer(optimizer)
    try:
        for _ in range(3):
            optimizer.step()
            categories = {block["address"]: block["category"] for block in native.live_blocks()}
            averages = [optimizer.state[parameter]["average"] for parameter in parameters]
            assert [categories[average.data_ptr()] for average in averages] == ["optimizer_states"] * 2
    finally:
        attachment.detach()
        native.cpu_uninstall()


def test_states_that_a_program_loads_are_the_optimizer_s() -> None:
    parameter = nn.Parameter(torch.zeros(1000))
    native.cpu_install()
    optimizer = torch.optim.SGD([parameter], momentum=0.9)
    attachment = hooks.attach_optimizer(optimizer)
    try:
        loaded = {**optimizer.state_dict(), "state": {0: {"momentum_buffer": torch.zeros(1000).clone()}}}
        optimizer.load_state_dict(loaded)
        address = optimizer.state[parameter]["momentum_buffer"].data_ptr()
        (found,) = (block["category"] for block in native.live_blocks() if block["address"] == address)
        assert found == "optimizer_states"
    finally:
        attachment.detach()
        native.cpu_uninstall()


def test_the_names_of_the_program_are_those_where_it_trains() -> None:
    data = torch.utils.data.TensorDataset(torch.zeros(12, 3), torch.zeros(12, 2))
    engine, model = PrivacyEngine(), nn.Sequential(nn.Linear(3, 2))
    prepared = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1),
        data_loader=torch.utils.data.DataLoader(data, batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    shapes = TrainingShapes()
    attachment = hooks.attach_private(prepared)

    def evaluate(model: nn.Module) -> None:
        diagnosis.observe_program(shapes)

    def train() -> None:
        net, dp_sgd, batches = prepared
        teacher, loss, plain = nn.Linear(3, 2), nn.MSELoss(), torch.optim.SGD(nn.Linear(3, 2).parameters())
        evaluate(teacher)
        del net, dp_sgd, batches, teacher, loss, plain

    def train_in_parts_and_print_epsilon() -> None:
        _, sgd, _ = prepared
        sgd.signal_skip_step()
        diagnosis.observe_program(shapes)
        sgd._step_skip_queue.clear()
        print(engine.get_epsilon)

    train()
    assert shapes.program == Program(
        "net", "dp_sgd", "batches", criterion="loss", loss="torch.nn.MSELoss()", expected_samples=4
    )
    train_in_parts_and_print_epsilon()
    attachment.detach()
    parts = Program(optimizer="sgd", computes_epsilon=True, expected_samples=4, splits_batches=True)
    assert shapes.program == parts


def test_the_names_are_known_after_the_first_step_and_keep_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of attributes; a frame's variables are a copy of them in Python 3.12 and earlier."""
    monkeypatch.setattr(native, "step", lambda: (1, 1))  # other tests have made steps, too

    class Trainer:
        def __init__(self) -> None:
            self.teacher, self.student = nn.Linear(3, 2), nn.Linear(3, 2)
            self.sgd = torch.optim.SGD(self.student.parameters(), lr=1)
            self.batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(4, 3)))

        def train(self) -> None:
            output = self.student(torch.zeros(4, 3))
            output.sum().backward()
            self.step()
            kept = weakref.ref(output)
            del output
            assert kept() is None

        def step(self) -> None:
            self.sgd.step()

    observations.clear()
    trainer = Trainer()
    attachment = [hooks.attach_model(trainer.student), hooks.attach_optimizer(trainer.sgd)]
    native.cpu_install()
    try:
        trainer.train()
    finally:
        native.cpu_uninstall()
        for each in attachment:
            each.detach()
    names = observations.layer_shapes().program
    assert (names.model, names.optimizer, names.loader) == ("self.student", "self.sgd", "self.batches")


def test_gradients_that_noise_replaces_are_noted_once() -> None:
    observations.clear()
    replaced, shared = parameters = [nn.Parameter(torch.zeros(size)) for size in (100, 200)]
    for parameter in parameters:
        parameter.summed_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
    replaced.grad, shared.grad = torch.zeros(100), shared.summed_grad.view_as(shared)  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(parameters)
    on_add_noise(optimizer)
    noted = {each["kind"]: each["bytes"] for each in observations.recorded()}
    assert noted == {"largest_parameter": 4 * 200, "replaced_gradients": 4 * 100}
    shared.grad = torch.zeros(200)
    on_add_noise(optimizer)
    assert {each["kind"]: each["bytes"] for each in observations.recorded()} == noted
    observations.clear()
