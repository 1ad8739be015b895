# SPDX-License-Identifier: Apache-2.0
"""The profiler's categories and peaks against the byte formulas of tests/oracle, for every case, to the byte."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleHooksFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping

from opacus_memprof import hooks
from opacus_memprof.recording import native
from tests.oracle import instants
from tests.oracle.cases import Case, all_cases, prepare
from tests.oracle.meter import no_collection

# cuDNN's and cub's scratch space counts as library_workspace, whoever calls them.
HOOK_CATEGORIES = ("backprop_copies", "temp_matrices", "per_sample_gradients", "norm_samples", "library_workspace")


def scratch(case: Case, device: str) -> str | None:
    """Why a hook's peak is more than Opacus asked for, if it is: operators that take space of their own."""
    if case.mode == "functorch" and case.name.startswith("conv"):
        return "convolution under vmap: cuDNN's or oneDNN's workspace and layout copies"
    if device == "cpu" and case.dtype == "bfloat16":
        return "oneDNN's packed matrices; RMSNorm and scatter compute in float32"
    if device == "cuda" and case.name == "embedding" and case.mode != "hooks":
        return "sorting: torch.unique and embedding's backward"
    if (
        device == "cuda"
        and case.mode == "functorch"
        and case.name.startswith("layer_norm")
        and case.dtype == "bfloat16"
    ):
        return "the norm's backward under vmap computes in float32"
    if device == "cuda" and case.name == "rms_norm":
        return "one fused kernel, where the CPU multiplies step by step"
    return None


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)], scope="module")
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device, with the recording allocator in place."""
    install, uninstall = {
        "cpu": (native.cpu_install, native.cpu_uninstall),
        "cuda": (native.cuda_install, native.cuda_uninstall),
    }[request.param]
    install()
    if request.param == "cuda":
        request.getfixturevalue("no_workspaces")
    yield request.param
    uninstall()


class Counts:
    """Live bytes of one device by category, as differences from when this was made."""

    def __init__(self, device: str) -> None:
        self._device = "cuda:0" if device == "cuda" else device
        self._before = self._now()

    def _now(self) -> dict[str, int]:
        counts = native.snapshot("oracle")["devices"].get(self._device)  # absent until its first block
        return {**counts["categories"], "total": counts["requested_bytes"]} if counts else {}

    def change(self) -> dict[str, int]:
        return self._from_before(self._now())

    def peak_change(self) -> dict[str, int]:
        """At the instant of the highest total since `native.reset_peaks()`."""
        peak = native.peaks()[self._device]
        return self._from_before({**peak["categories"], "total": peak["requested_bytes"]})

    def _from_before(self, counts: dict[str, int]) -> dict[str, int]:
        names = counts.keys() | self._before.keys()
        return defaultdict(int, {name: counts.get(name, 0) - self._before.get(name, 0) for name in names})


@pytest.fixture
def windows(device: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict[str, int]]]:
    """The counters' changes at the peak of each call of Opacus' backward hook, of clipping and of noise."""
    seen: dict[str, list[dict[str, int]]] = defaultdict(list)

    @contextmanager
    def window(name: str) -> Iterator[None]:
        counts = Counts(device)
        native.reset_peaks()
        yield
        seen[name].append(counts.peak_change())

    for cls in (GradSampleHooks, GradSampleHooksFastGradientClipping):
        hook = cls.__dict__["capture_backprops_hook"]

        def marked(self, module, *args, _hook=hook, **kwargs):  # type: ignore[no-untyped-def]
            if not self.hooks_enabled:  # ghost clipping's second pass
                return _hook(self, module, *args, **kwargs)
            with window(f"hook {module.oracle_index}"):
                return _hook(self, module, *args, **kwargs)

        monkeypatch.setattr(cls, "capture_backprops_hook", marked)
    for cls, name in (
        (DPOptimizer, "clip_and_accumulate"),
        (DPOptimizer, "add_noise"),
        (DPOptimizerFastGradientClipping, "add_noise"),
    ):
        method = cls.__dict__[name]

        def marked_method(self, _method=method, _name=name):  # type: ignore[no-untyped-def]
            with window(_name):
                return _method(self)

        monkeypatch.setattr(cls, name, marked_method)
    return seen


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_profiler_agrees_with_formulas(case: Case, device: str, windows: dict[str, list[dict[str, int]]]) -> None:
    with no_collection():
        fresh = Counts(device)
        training = prepare(case, device)
        for index, module in enumerate(training.hooked):
            module.oracle_index = index
        attachment = hooks.attach_private([training.module, training.optimizer])
        sizes = [layer.s * p.numel for layer in case.layers for p in layer.parameters]
        assert fresh.change()["model_parameters"] == sum(sizes)

        counts = Counts(device)
        loss = training.forward()
        after_forward = counts.change()
        loss.backward()
        after_backward = counts.change()
        training.optimizer.step()
        after_step = counts.change()
        attachment.detach()

    shared, opacus_only = case.captured_bytes(True), case.captured_bytes(False)
    captured = after_forward["activation_hooks_shared"] + after_forward["activation_hooks_opacus_only"]
    assert captured == shared + opacus_only
    targets = training.targets.nbytes if case.mode == "ghost" else 0  # Opacus wraps the criterion
    assert after_forward["inputs"] == training.inputs.nbytes + targets
    if scratch(case, device) is None:
        assert after_forward["activation_hooks_shared"] == shared
    assert_contains(after_backward, instants.after_backward(case.layers, case.mode, case.reduction))
    states = instants.adam_states(case.layers, device) if case.adam else 0
    assert_contains(
        after_step, instants.after_step(case.layers, case.mode, case.reduction) | {"optimizer_states": states}
    )

    (noise,) = windows["add_noise"]
    assert noise["total"] == instants.noise_peak(case.layers, gradients=case.mode != "ew")
    assert noise["noise"] + noise["gradients"] == noise["total"]
    if case.mode != "ghost":
        (clip,) = windows["clip_and_accumulate"]
        assert clip["total"] == instants.clip_peak(case.layers, case.mode)
        assert clip["clipping_temporaries"] + clip["summed_gradients"] == clip["total"]
    for index, layer in enumerate(case.hooked if case.mode != "ew" else ()):
        calls = windows[f"hook {index}"]
        assert len(calls) == layer.calls
        for call in calls:
            assert sum(call[name] for name in HOOK_CATEGORIES) == call["total"]
        highest = max(calls, key=lambda call: call["total"])
        assert highest["backprop_copies"] == instants.output_gradient_copy(layer, case.reduction)
        formula = instants.hook_peak(layer, case.mode, case.reduction)
        if scratch(case, device) is None:
            assert highest["total"] == formula
        elif formula is not None:
            assert highest["total"] >= formula


def assert_contains(counts: dict[str, int], expected: dict[str, int]) -> None:
    assert {name: counts[name] for name in expected} == expected
