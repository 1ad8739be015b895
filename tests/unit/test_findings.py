# SPDX-License-Identifier: Apache-2.0
"""What is a finding and what is not, of runs that are made by hand, and its bytes."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from opacus_memprof.analysis.defects import different_numbers_of_samples, growing_memory, missing_per_sample_gradients
from opacus_memprof.analysis.findings import (
    Run,
    activations_of_earlier_steps,
    batches_on_device,
    copied_per_sample_gradients,
    discarded_gradients,
    earlier_models,
    forwards_without_backward,
    ghost_matrices,
    graphs_without_backward,
    per_sample_gradients_by_hand,
    unused_per_sample_gradients,
)
from opacus_memprof.analysis.names import Names
from tests.unit.made_profiles import a_device, a_peak


@pytest.mark.parametrize(("size", "material"), [(0, False), (99, False), (100, True), (10_000, True)])
def test_wasted_memory_is_reported_from_a_hundredth_of_the_peak_on(size: int, material: bool) -> None:
    devices: Any = {"cpu": SimpleNamespace(peak=SimpleNamespace(requested_bytes=10_000))}
    nameless: Any = object.__new__(Names)
    assert Run(devices, {}, [], nameless).is_material("cpu", size) is material


def test_nothing_is_material_where_nothing_was_allocated() -> None:
    devices: Any = {"cpu": SimpleNamespace(peak=SimpleNamespace(requested_bytes=0))}
    nameless: Any = object.__new__(Names)
    assert not Run(devices, {}, [], nameless).is_material("cpu", 0)


def found_in(detector: Any, *facts: dict[str, Any], replayed: Any = None, failed: bool = False, **peak: Any) -> Any:
    """The findings of a detector on one device, where modules 1 and 2 are fc and head."""
    names = SimpleNamespace(
        module=("", "fc", "head").__getitem__,
        reported_category={7: "noise"}.get,
        phase={3: "clip"}.get,
        op={5: "add_noise"}.get,
    )
    devices = {"cuda:0": a_device(peak=a_peak(**{"requested_bytes": 1000, **peak}))}
    return list(
        detector(Run(devices, {} if replayed is None else {"cuda:0": replayed}, facts, cast(Names, names), failed))
    )


def test_the_largest_matrices_count() -> None:
    layer = {"kind": "norm_matrices", "features": (5, 3), "samples": 4, "tokens": 9, "gradient_bytes": 6}
    (found,) = found_in(ghost_matrices, {**layer, "module": 1, "bytes": 10}, {**layer, "module": 2, "bytes": 20})
    assert (found.bytes, found.modules) == (20, {"fc": 10, "head": 20})


@pytest.mark.parametrize(
    ("step", "modules", "is_old"), [(2, "ab", True), (3, "ab", False), (2, "aa", False), (1, "ab", False)]
)
def test_activations_of_an_evaluation_two_steps_ago(step: int, modules: str, is_old: bool) -> None:
    """The variables of a program hold the last step's output, and one module's output may have no graph."""
    place = {"bytes": 100, "category": "activations", "op": "", "phase": "forward", "step": step}
    blocks = [{**place, "module": module} for module in modules]
    evaluated = {"kind": "evaluations_with_graphs", "module": 0, "steps": [2, 3]}
    found = found_in(activations_of_earlier_steps, evaluated, step=4, largest_blocks=blocks)
    assert [each.bytes for each in found] == [200] * is_old


@pytest.mark.parametrize(
    ("step", "phase", "is_found"), [(4, "forward", True), (3, "forward", False), (4, "clip", False)]
)
def test_an_evaluation_at_the_peak(step: int, phase: str, is_found: bool) -> None:
    evaluated = {"kind": "evaluation_graphs", "module": 0, "step": step}
    found = found_in(graphs_without_backward, evaluated, step=4, phase=phase, categories={"activations": 500})
    assert [each.bytes for each in found] == [500] * is_found


@pytest.mark.parametrize(
    ("temporaries", "activations", "modules", "has_graph", "is_found"),
    [
        (600, 0, "abc", True, True),
        (600, 0, "abc", False, False),  # an evaluation under no_grad
        (600, 0, "ab", True, False),  # one operation's input and output, as in a checkpoint
        (600, 61, "abc", True, False),  # a backward pass used what the forward had kept
        (400, 0, "abc", True, False),
    ],
)
def test_a_graph_in_training_mode_that_no_backward_used(
    temporaries: int, activations: int, modules: str, has_graph: bool, is_found: bool
) -> None:
    fact = {"kind": "largest_batch", "module": 0, "bytes": 9, "step": 4, "has_graph": has_graph}
    place = {"bytes": 100, "category": "forward_temporaries", "op": "", "phase": "forward", "step": 4}
    found = found_in(
        graphs_without_backward,
        fact,
        step=4,
        phase="forward",
        categories={"forward_temporaries": temporaries, "activations": activations},
        largest_blocks=[{**place, "module": module} for module in modules],
    )
    assert [each.bytes for each in found] == [temporaries] * is_found


@pytest.mark.parametrize(
    ("inputs", "batch", "count", "is_found"),
    [(400, 100, 4, True), (399, 100, 4, False), (400, 100, 3, False), (400, 400, 4, False)],
)
def test_batches_that_wait_on_the_device(inputs: int, batch: int, count: int, is_found: bool) -> None:
    """Targets can be larger than their batch, and a batch a list of tensors of the same size."""
    fact = {"kind": "largest_batch", "module": 0, "bytes": batch, "step": 0, "has_graph": True}
    block = {"bytes": 100, "category": "inputs", "module": "", "op": "", "phase": "idle", "step": 0}
    lines = {"train.py:3": {"inputs": inputs}}
    found = found_in(
        batches_on_device, fact, categories={"inputs": inputs}, largest_blocks=[block] * count, lines=lines
    )
    assert [(each.bytes, "train.py:3" in each.evidence) for each in found] == [(inputs - batch, True)] * is_found


@pytest.mark.parametrize(
    ("passes", "blocks", "step", "is_found"), [(5, 5, 4, True), (4, 5, 4, False), (9, 4, 4, False), (5, 5, 5, False)]
)
def test_graphs_of_many_forward_passes_at_once(passes: int, blocks: int, step: int, is_found: bool) -> None:
    fact = {"kind": "waiting_forwards", "module": 0, "bytes": passes, "step": 4}
    block = {"bytes": 100, "category": "activations", "module": "fc", "op": "", "phase": "forward", "step": 4}
    found = found_in(
        forwards_without_backward, fact, step=step, categories={"activations": 500}, largest_blocks=[block] * blocks
    )
    assert [each.bytes for each in found] == [500] * is_found


@pytest.mark.parametrize(("live", "is_found"), [(301, True), (300, False)])
def test_per_sample_gradients_of_torch_func(live: int, is_found: bool) -> None:
    fact = {"kind": "samples_by_hand", "module": 0, "bytes": 600, "samples": 32}
    found = found_in(per_sample_gradients_by_hand, fact, categories={"unattributed": live})
    assert [each.bytes for each in found] == [600] * is_found


@pytest.mark.parametrize(("step", "earlier"), [(7, {"the first": 30}), (0, {}), (None, {"the first": 30})])
def test_models_that_were_made_together_are_no_earlier_ones(step: int | None, earlier: dict[str, int]) -> None:
    modules = {name: {"model_parameters": 10, "gradients": 20} for name in ("fc", "Net#2.fc")}
    made_in = {"the first": 0} | ({} if step is None else {"Net#2": step})
    assert earlier_models(modules, made_in) == earlier


def test_only_copies_whose_original_is_live_are_copies() -> None:
    place = {"category": "per_sample_gradients", "module": "fc", "phase": "backward", "step": 0}
    copy = "create_or_accumulate_grad_sample"
    blocks = [{**place, "bytes": size, "op": op} for size, op in ((100, "mm"), (100, copy), (300, copy))]
    (found,) = found_in(copied_per_sample_gradients, phase="backward", newest_blocks=blocks)
    assert found.bytes == 100


@pytest.mark.parametrize(("live", "size"), [(60, 60), (90, 80)])
def test_discarded_gradients_are_those_that_are_live(live: int, size: int) -> None:
    built = {"kind": "replaced_gradients", "module": 1, "bytes": 80}
    (found,) = found_in(discarded_gradients, built, phase="backward", modules={"fc": {"gradients": live}})
    assert found.bytes == size


@pytest.mark.parametrize(("times", "failed", "is_found"), [(2, False, False), (3, False, True), (3, True, False)])
def test_unused_per_sample_gradients_of_three_passes(times: int, failed: bool, is_found: bool) -> None:
    facts = (
        {"kind": "unused_samples", "module": 1, "bytes": 100},
        {"kind": "unused_passes", "module": 0, "bytes": times},
    )
    assert bool(found_in(unused_per_sample_gradients, *facts, failed=failed)) is is_found


@pytest.mark.parametrize(
    ("steps", "size", "is_found"),
    [(5, 100, True), (4, 100, False), (5, 9, False), (18, 9, True), (17, 9, False)],  # of 20 that count
)
def test_memory_grows_by_a_quarter_of_the_steps_or_by_nearly_all(steps: int, size: int, is_found: bool) -> None:
    site = {"category": 7, "module": 1, "phase": 3, "op": 5, "first_step": 2, "last_step": 21, "blocks": steps}
    replayed = {"last_step_end": {"step": 24}, "residue": [{**site, "steps": steps, "bytes": size}]}
    found = found_in(growing_memory, replayed=replayed)
    assert [each.bytes for each in found] == [size] * is_found
    if is_found:
        assert (
            f"from {steps} of the steps 2 to 21 were still live at the end of step 23: about {size // steps} B more"
            in (found[0].evidence)
        )


@pytest.mark.parametrize(("samples", "remedy"), [(1, "a row for each sample"), (12, "the first dimension")])
def test_numbers_of_samples_that_are_too_few_or_too_many(samples: int, remedy: str) -> None:
    counts = [{"kind": "sample_counts", "module": n, "samples": size, "batch": 4} for n, size in ((1, 4), (2, samples))]
    (found,) = found_in(different_numbers_of_samples, *counts)
    assert found.module == "head"
    assert remedy in found.remedy


@pytest.mark.parametrize(("captures", "is_found"), [(0, True), (1, False)])
def test_modules_that_wait_for_a_backward_do_not_miss_samples(captures: int, is_found: bool) -> None:
    fact = {"kind": "samples_missing", "module": 2, "captures": captures, "training": False, "has_gradient": False}
    assert [each.module for each in found_in(missing_per_sample_gradients, fact)] == ["head"] * is_found
