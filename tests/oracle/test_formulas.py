# SPDX-License-Identifier: Apache-2.0
"""The formulas against measurements that the profiler has no part in, so that a disagreement names the culprit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleHooksFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import record_function

from tests.oracle import instants
from tests.oracle.cases import Case, Training, all_cases, prepare
from tests.oracle.meter import WINDOW, storage_bytes, window_peaks

CASES = all_cases()
# bfloat16 on the CPU: matrix products, RMSNorm and scatters compute in scratch space of their own, which the formulas
# (of what Opacus asks for) leave out. What stays is exact all the same.
SCRATCH = "bfloat16"


@pytest.fixture(autouse=True, scope="module")
def windows() -> Iterator[None]:
    """Marks Opacus' backward hook (by the module's place among the hooked ones), clipping and noise as windows."""
    patch = pytest.MonkeyPatch()
    for cls in (GradSampleHooks, GradSampleHooksFastGradientClipping):
        hook = cls.__dict__["capture_backprops_hook"]

        def marked(self, module, *args, _hook=hook, **kwargs):  # type: ignore[no-untyped-def]
            with record_function(f"{WINDOW}hook {module.oracle_index}"):
                return _hook(self, module, *args, **kwargs)

        patch.setattr(cls, "capture_backprops_hook", marked)
    for cls, name in (
        (DPOptimizer, "clip_and_accumulate"),
        (DPOptimizer, "add_noise"),
        (DPOptimizerFastGradientClipping, "add_noise"),
    ):
        method = cls.__dict__[name]

        def marked_method(self, _method=method, _name=name):  # type: ignore[no-untyped-def]
            with record_function(WINDOW + _name):
                return _method(self)

        patch.setattr(cls, name, marked_method)
    yield
    patch.undo()


def bytes_by_category(training: Training) -> dict[str, int]:
    """Bytes by category, from the tensors that Opacus hangs on parameters and modules."""
    trained = training.trained
    captured = [t for m in training.hooked for call in getattr(m, "activations", ()) for t in call]
    return {
        "per_sample_gradients": storage_bytes(p.grad_sample for p in trained),
        "norm_samples": storage_bytes(getattr(p, "_norm_sample", None) for p in trained),
        "gradients": storage_bytes(p.grad for p in trained),
        "summed_gradients": storage_bytes(p.summed_grad for p in trained),
        "clipping_temporaries": storage_bytes([getattr(training.module, "_per_sample_gradient_norms", None)]),
        "captured": storage_bytes(captured),
    }


def expected(categories: dict[str, int]) -> dict[str, int]:
    """The formulas' categories under the names of `bytes_by_category`."""
    names = ("per_sample_gradients", "norm_samples", "gradients", "summed_gradients", "clipping_temporaries")
    captured = categories["activation_hooks_shared"] + categories["activation_hooks_opacus_only"]
    return {name: categories[name] for name in names} | {"captured": captured}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_formulas_agree_with_torch(case: Case) -> None:
    training = prepare(case)
    for index, module in enumerate(training.hooked):
        module.oracle_index = index
    seen = {}

    def step() -> None:
        loss = training.forward()
        seen["after forward"] = bytes_by_category(training)
        loss.backward()
        seen["after backward"] = bytes_by_category(training)
        training.optimizer.step()
        seen["after step"] = bytes_by_category(training)

    peaks = window_peaks(step)

    assert seen["after forward"]["captured"] == case.captured_bytes(True) + case.captured_bytes(False)
    assert seen["after backward"] == expected(instants.after_backward(case.layers, case.mode, case.reduction))
    assert seen["after step"] == expected(instants.after_step(case.layers, case.mode, case.reduction))
    if case.adam:
        states = [t for state in training.optimizer.state.values() for t in state.values()]
        assert storage_bytes(states) == instants.adam_states(case.layers)

    assert peaks["add_noise"] == instants.noise_peak(case.layers, gradients=case.mode != "ew")
    if case.mode != "ghost":
        assert peaks["clip_and_accumulate"] == instants.clip_peak(case.layers, case.mode)
    hook_peaks = {} if case.mode == "ew" else {f"hook {i}": layer for i, layer in enumerate(case.hooked)}
    assert hook_peaks.keys() == {name for name in peaks if name.startswith("hook")}
    for name, layer in hook_peaks.items():
        formula = instants.hook_peak(layer, case.mode, case.reduction)
        if case.dtype == SCRATCH and formula is not None:
            assert peaks[name] >= formula
        elif formula is not None:
            assert peaks[name] == formula


@pytest.mark.parametrize("case", [c for c in CASES if c.mode == "hooks" and c.dtype == "float64"], ids=str)
def test_who_else_holds_what_opacus_captured(case: Case) -> None:
    """Once Opacus' references are dropped, exactly the storages that autograd saved are still there."""
    training = prepare(case)
    loss = training.forward()
    storages = {}
    for module in training.hooked:
        for call in module.activations:
            for t in call:
                storage = t.untyped_storage()
                storages[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        module.activations.clear()
    del call, t, storage, module
    alive = sum(size for reference, size in storages.values() if not reference.expired())

    assert alive == case.captured_bytes(saved_by_autograd=True)
    assert sum(size for _, size in storages.values()) - alive == case.captured_bytes(saved_by_autograd=False)
    assert loss.grad_fn is not None  # the graph was alive all along


@pytest.mark.parametrize("layer", {layer: None for case in CASES for layer in case.layers}, ids=repr)
def test_a_sampler_keeps_its_results_and_nothing_else(layer) -> None:  # type: ignore[no-untyped-def]
    frozen = sum(layer.b * p.numel for p in layer.parameters if not p.trainable)
    for sampler, extra in ((layer.grad_sampler(), 0), (layer.norm_sampler(), 0), (layer.functorch_sampler(), frozen)):
        if sampler is not None:
            assert sum(sampler.timeline) == sum(sampler.results) + extra


def test_there_are_enough_cases() -> None:
    assert len({str(case) for case in CASES}) == len(CASES) >= 150
    assert {case.mode for case in CASES} == {"hooks", "functorch", "ew", "ghost"}
    assert {case.dtype for case in CASES} == {"float32", "float64", "bfloat16"}
