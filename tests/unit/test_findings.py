# SPDX-License-Identifier: Apache-2.0
"""What is a finding and what is not, of runs that are made by hand, and its bytes."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from opacus_memprof.analysis.defects import (
    accumulated_per_sample_gradients,
    captures_without_backward,
    different_numbers_of_samples,
    find,
    make_private_failed,
    missing_per_sample_gradients,
    outputs_changed_in_place,
    stale_norm_samples,
    training_is_not_private,
)
from opacus_memprof.analysis.events import Names
from opacus_memprof.analysis.findings import (
    Run,
    common_module,
    copied_per_sample_gradients,
    discarded_gradients,
    frozen_per_sample_gradients,
    ghost_matrices,
    gradients_reduced_twice,
    largest,
    noise_allocated_twice,
    noise_of_whole_parameters,
    per_sample_gradients_by_hand,
    per_sample_gradients_in_forward,
    some,
    unused_per_sample_gradients,
)
from opacus_memprof.analysis.kept_memory import (
    activations_of_earlier_steps,
    batches_on_device,
    earlier_models,
    forwards_without_backward,
    gradients_of_other_models,
    graphs_without_backward,
    growing_memory,
)
from tests.unit.made_profiles import a_device, a_peak


@pytest.mark.parametrize(("size", "material"), [(0, False), (99, False), (100, True), (10_000, True)])
def test_wasted_memory_is_reported_from_a_hundredth_of_the_peak(size: int, material: bool) -> None:
    devices: Any = {"cpu": SimpleNamespace(peak=SimpleNamespace(requested_bytes=10_000))}
    nameless: Any = object.__new__(Names)
    assert Run(devices, {}, [], nameless).is_material("cpu", size) is material


def test_nothing_is_material_where_nothing_was_allocated() -> None:
    devices: Any = {"cpu": SimpleNamespace(peak=SimpleNamespace(requested_bytes=0))}
    nameless: Any = object.__new__(Names)
    assert not Run(devices, {}, [], nameless).is_material("cpu", 0)


def found_in(
    detector: Any,
    *facts: dict[str, Any],
    replayed: Any = None,
    failed: bool = False,
    phases: dict[str, Any] | None = None,
    **peak: Any,
) -> Any:
    """The findings of a detector on one device, where modules 1 and 2 are fc and head, and 3 is another model's fc."""
    names = SimpleNamespace(
        module=("", "fc", "head", "Net#2.fc").__getitem__,
        reported_category={7: "noise", 8: "per_sample_gradients"}.get,
        phase={3: "clip"}.get,
        op={5: "add_noise", 6: "mm"}.get,
    )
    devices = {"cuda:0": a_device(phases=phases or {}, peak=a_peak(**{"requested_bytes": 1000, **peak}))}
    return list(
        detector(Run(devices, {} if replayed is None else {"cuda:0": replayed}, facts, cast(Names, names), failed))
    )


def fact(kind: str, module: int = 0, bytes: int = 100, **details: Any) -> dict[str, Any]:
    return {"kind": kind, "module": module, "bytes": bytes, **details}


def block(size: int, category: str, op: str = "", module: str = "fc", step: int = 4) -> dict[str, Any]:
    return {"bytes": size, "category": category, "op": op, "module": module, "phase": "", "step": step}


def test_modules_are_named_by_what_they_share() -> None:
    assert common_module(["a.b.c", "a.b", "a.d.c"]) == "a"
    assert common_module(["a.x.c", "b.x.c"]) == ""
    assert largest({"a": 1, "b": 3, "c": 2}) == "b 3 B, c 2 B, a 1 B"
    assert some(["a", "", "c"]) == "a, the model itself, c"
    assert some(["a", "b", "c", "d"]) == "a, b, c and 1 more"
    assert largest({"": 4, "a": 1, "b": 3, "c": 2, "d": 0}) == "(no module) 4 B, b 3 B, c 2 B, 1 more"


def test_the_largest_matrices_count() -> None:
    layer = {"kind": "norm_matrices", "features": (5, 3), "samples": 4, "tokens": 9, "gradient_bytes": 6}
    (found,) = found_in(ghost_matrices, {**layer, "module": 1, "bytes": 10}, {**layer, "module": 2, "bytes": 20})
    assert (found.bytes, found.modules) == (20, {"fc": 10, "head": 20})
    assert "the same holds for 1 more layer (" in found.evidence


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
    [(400, 100, 4, True), (399, 100, 4, False), (400, 100, 3, False), (400, 400, 4, False), (400, 0, 4, False)],
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


def test_the_model_with_activations_is_the_last_one_whatever_its_name() -> None:
    kept = {"model_parameters": 10, "gradients": 20}
    modules = {"fc": kept, "Net#2.fc": kept | {"activations": 5}, "Net#3.fc": kept}
    made_in = {"the first": 0, "Net#2": 4, "Net#3": 2}
    assert earlier_models(modules, made_in) == {"the first": 30, "Net#3": 30}


@pytest.mark.parametrize(("step", "earlier"), [(7, {"the first": 30}), (0, {}), (None, {"the first": 30})])
def test_models_that_were_made_together_are_no_earlier_ones(step: int | None, earlier: dict[str, int]) -> None:
    modules = {name: {"model_parameters": 10, "gradients": 20} for name in ("fc", "Net#2.fc")}
    made_in = {"the first": 0} | ({} if step is None else {"Net#2": step})
    assert earlier_models(modules, made_in) == earlier


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"model_parameters": 10, "activations": 1}, {"model_parameters": 10, "gradients": 20}),  # still trained
        ({"model_parameters": 10}, {"model_parameters": 11, "gradients": 20}),  # not equal
        ({"model_parameters": 10, "gradients": 20}, {"model_parameters": 10, "buffers": 5}),  # a copy
    ],
)
def test_models_that_are_no_earlier_ones(first: dict[str, int], second: dict[str, int]) -> None:
    assert earlier_models({"fc": first, "Net#2.fc": second}, {}) == {}


@pytest.mark.parametrize(("step", "made_in", "is_found"), [(3, 0, True), (4, 0, False), (3, 7, False)])
def test_gradients_of_models_that_wait_for_their_turn(step: int, made_in: int, is_found: bool) -> None:
    blocks = [block(100, "per_sample_gradients"), block(200, "per_sample_gradients", module="Net#2.fc", step=step)]
    modules = {each["module"]: {"per_sample_gradients": each["bytes"]} for each in blocks}
    facts = fact("model_named", 0, step=0), fact("model_named", 3, step=made_in)
    found = found_in(gradients_of_other_models, *facts, step=4, largest_blocks=blocks, modules=modules)
    assert [each.bytes for each in found] == [200] * is_found


@pytest.mark.parametrize(
    ("phase", "kinds", "is_found"),
    [
        ("forward", ["zero_grads"], True),
        ("idle", ["zero_grads"], True),
        ("backward", ["zero_grads"], False),
        ("forward", [], False),  # other findings say why
        ("forward", ["zero_grads", "public_steps"], False),
        ("forward", ["zero_grads", "unowned_samples"], False),
    ],
)
def test_per_sample_gradients_at_a_peak_in_a_forward(phase: str, kinds: list[str], is_found: bool) -> None:
    sizes = {"per_sample_gradients": 100}
    found = found_in(
        per_sample_gradients_in_forward, *map(fact, kinds), phase=phase, categories=sizes, modules={"fc": sizes}
    )
    assert [(each.module, each.bytes) for each in found] == [("fc", 100)] * is_found


@pytest.mark.parametrize(
    ("phase", "zeros", "op", "is_found"),
    [
        ("noise", 100, "_generate_noise", True),
        ("clip", 100, "_generate_noise", False),
        ("noise", 90, "_generate_noise", False),
        ("noise", 100, "add_noise", False),
    ],
)
def test_zeros_and_noise_of_the_same_size(phase: str, zeros: int, op: str, is_found: bool) -> None:
    facts = fact("largest_parameter", 1, 90), fact("largest_parameter", 2, 100)
    newest = [block(100, "noise", "_generate_noise"), block(zeros, "noise", op), block(100, "noise", "_generate_noise")]
    found = found_in(noise_allocated_twice, *facts, phase=phase, newest_blocks=newest)
    assert [(each.module, each.bytes) for each in found] == [("head", 100)] * is_found


@pytest.mark.parametrize(("shard", "size"), [(200, 1200), (796, None)])
def test_noise_of_a_parameter_that_is_sharded_between_ranks(shard: int, size: int | None) -> None:
    facts = fact("sharded_parameter", 1, 400, shard_bytes=100), fact("sharded_parameter", 2, 800, shard_bytes=shard)
    found = found_in(noise_of_whole_parameters, *facts)
    assert [(each.module, each.bytes) for each in found] == ([] if size is None else [("head", size)])


@pytest.mark.parametrize("is_reduced", [True, False])
def test_buckets_of_ddp_are_wasted_where_opacus_reduces(is_reduced: bool) -> None:
    facts = [fact("gradients_reduced")] * is_reduced
    found = found_in(gradients_reduced_twice, *facts, ops={"DistributedDataParallel": {"communication": 100}})
    assert [each.bytes for each in found] == [100] * is_reduced


@pytest.mark.parametrize("is_no_op", [True, False])
def test_a_graph_beside_torch_func(is_no_op: bool) -> None:
    facts = [fact("no_op_graphs")] * is_no_op
    found = found_in(graphs_without_backward, *facts, phases={"clip": {"categories": {"activations": 100}}})
    assert [each.bytes for each in found] == [100] * is_no_op


def test_only_copies_whose_original_is_live_are_copies() -> None:
    place = {"category": "per_sample_gradients", "module": "fc", "phase": "backward", "step": 0}
    copy = "create_or_accumulate_grad_sample"
    blocks = [{**place, "bytes": size, "op": op} for size, op in ((100, "mm"), (100, copy), (300, copy))]
    (found,) = found_in(copied_per_sample_gradients, phase="backward", newest_blocks=blocks)
    assert found.bytes == 100


@pytest.mark.parametrize("phase", ["forward", "backward", "idle"])
def test_copies_are_told_at_a_peak_in_backward_alone(phase: str) -> None:
    blocks = [block(100, "per_sample_gradients", op) for op in ("mm", "create_or_accumulate_grad_sample")]
    assert bool(found_in(copied_per_sample_gradients, phase=phase, newest_blocks=blocks)) == (phase == "backward")


@pytest.mark.parametrize(
    ("phase", "live", "born", "size"),
    [
        ("backward", 60, 0, 60),
        ("backward", 90, 0, 80),
        ("noise", 0, 60, 60),
        ("noise", 0, 90, 80),
        ("optimizer_step", 90, 90, None),
    ],
)
def test_discarded_gradients_are_those_that_are_live(phase: str, live: int, born: int, size: int | None) -> None:
    built, born_in = fact("replaced_gradients", 1, 80), {"backward": {"gradients": born}}
    found = found_in(discarded_gradients, built, phase=phase, modules={"fc": {"gradients": live}}, born_in=born_in)
    assert [each.bytes for each in found] == ([] if size is None else [size])


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
def test_memory_that_grows_in_a_quarter_or_nearly_all_steps(steps: int, size: int, is_found: bool) -> None:
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


@pytest.mark.parametrize(
    ("training", "has_gradient", "cause"),
    [(False, True, "in eval mode"), (True, True, "outside of its own forward"), (True, False, "not reached")],
)
def test_samples_are_missing_for_one_reason(training: bool, has_gradient: bool, cause: str) -> None:
    missing = fact("samples_missing", 2, captures=0, training=training, has_gradient=has_gradient, flash_clip=True)
    (found,) = found_in(missing_per_sample_gradients, missing)
    assert cause in found.evidence
    assert ("flash_clip" in found.remedy) == ("outside" in cause)


def test_most_modules_are_right_where_the_batch_is_unknown() -> None:
    counts = [fact("sample_counts", module, samples=size, batch=9) for module, size in enumerate((4, 4, 1))]
    (found,) = found_in(different_numbers_of_samples, *counts)
    assert "head has 1, but the model itself, fc 4" in found.evidence


@pytest.mark.parametrize(
    ("failed", "refused", "recomputed", "kind", "consequence"),
    [
        (False, False, False, "captures_without_backward", "the next optimizer step will fail"),
        (True, False, False, "captures_without_backward", "the step failed"),
        (True, True, True, "checkpoint_captures", "the next ghost-clipping forward fails"),
    ],
)
def test_captures_that_wait(failed: bool, refused: bool, recomputed: bool, kind: str, consequence: str) -> None:
    """A module without captures, whose forward ran again, has released them."""
    waiting = fact("captures", 1, 0, captures=2, failed=failed, refused=refused, recomputed=recomputed)
    released = fact("captures", 2, 300, captures=0, failed=False, refused=False, recomputed=True)
    (found,) = found_in(captures_without_backward, waiting, released)
    assert (found.kind, found.module, found.bytes) == (kind, "fc", 300)
    assert (found.captures, found.modules) == ({"fc": 2}, {"head": 300})
    assert "2 captures in 1 module wait" in found.evidence
    assert consequence in found.evidence


@pytest.mark.parametrize(
    ("others", "steps", "used", "remedy"),
    [
        ([fact("unowned_samples", 1)], 0, False, "freeze fc before make_private"),
        ([fact("unowned_samples", 2)], 0, False, "run one backward pass for each step"),
        ([], 3, False, "call optimizer.zero_grad() after each optimizer.step()"),
        ([fact("zero_grads")], 3, True, "directly after each optimizer.step()"),
        ([fact("zero_grads")], 3, False, "run one backward pass for each step"),
        ([], 0, False, "run one backward pass for each step"),
        ([fact("public_steps")], 3, False, None),
    ],
)
def test_why_gradients_of_two_passes_met(others: list[Any], steps: int, used: bool, remedy: str | None) -> None:
    accumulated = fact("samples_accumulated", 1, 2, steps=steps, used=used)
    found = found_in(accumulated_per_sample_gradients, accumulated, *others)
    assert [remedy in each.remedy for each in found if remedy] == [True] * (remedy is not None)
    assert len(found) == (remedy is not None)


def test_updates_that_are_not_private_are_counted() -> None:
    steps = fact("public_steps", 0, 3, private=2, optimizer="SGD", is_original=True)
    (found,) = found_in(training_is_not_private, steps)
    assert "3 of 5 updates did not clip" in found.evidence
    assert "steps the SGD that make_private was given" in found.evidence
    (other,) = found_in(training_is_not_private, {**steps, "is_original": False})
    assert "steps another SGD" in other.evidence


@pytest.mark.parametrize("trained", [True, False])
def test_a_make_private_that_failed_and_what_followed(trained: bool) -> None:
    raised = fact("make_private_raised", error='ValueError: "model" is not in training mode. See there')
    (found,) = found_in(make_private_failed, raised, phases={"backward" if trained else "clip": {"categories": {}}})
    assert found.remedy == "call model.train() before make_private"
    assert found.evidence.endswith("its training is not private") == trained


def test_what_a_layer_without_norms_clips_by() -> None:
    earlier, nothing = (fact("norms_missing", 1, size, dimensions=4) for size in (100, 0))
    assert "keeps those of an earlier batch" in found_in(stale_norm_samples, earlier)[0].evidence
    assert "clipping fails" in found_in(stale_norm_samples, nothing)[0].evidence


@pytest.mark.parametrize(
    ("is_option", "line", "place"), [(True, "train.py:3", "fc (ReLU)"), (False, "train.py:3", "train.py:3")]
)
def test_where_an_output_was_changed_in_place(is_option: bool, line: str, place: str) -> None:
    changed = fact("in_place", 1, line=line, layer="ReLU", is_option=is_option, flash_clip=False)
    (found,) = found_in(outputs_changed_in_place, changed)
    assert found.evidence.startswith(f"{place} computes in place")
    assert place in found.remedy


@pytest.mark.parametrize(("mode", "remedy"), [("functorch", 'grad_sample_mode="hooks"'), ("hooks", "sampler(Odd)")])
def test_frozen_parameters_that_functorch_differentiates(mode: str, remedy: str) -> None:
    (found,) = found_in(frozen_per_sample_gradients, fact("frozen_samples", 1, mode=mode, layer="Odd", samples=4))
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("facts", "remedy"),
    [
        ([], "give it all parameters that are trained"),  # a killed process
        ([fact("public_steps")], "step the optimizer that make_private has returned"),
        ([fact("unowned_samples", 1), fact("zero_grads")], "freeze fc before make_private"),
        ([fact("unowned_samples", 2), fact("zero_grads")], "look for lists and attributes that hold p.grad_sample"),
        ([fact("largest_parameter", 1)], "per-sample gradients are never freed"),
    ],
)
def test_what_frees_per_sample_gradients_that_grow(facts: list[dict[str, Any]], remedy: str) -> None:
    site = {"category": 8, "module": 1, "phase": 3, "blocks": 9, "steps": 9}
    residue = [
        {**site, "op": 5, "bytes": 90, "first_step": 4, "last_step": 12},
        {**site, "op": 6, "bytes": 180, "first_step": 2, "last_step": 20},
    ]
    found, *_ = found_in(growing_memory, *facts, replayed={"last_step_end": {"step": 24}, "residue": residue})
    assert remedy in found.remedy
    assert "from 9 of the steps 2 to 20 were still live" in found.evidence
    assert [site.op for site in found.sites] == ["mm", "add_noise"]


def test_of_one_kind_the_largest_comes_first() -> None:
    found = found_in(find, *(fact("norms_missing", module, size, dimensions=4) for module, size in ((1, 5), (2, 9))))
    assert [each.module for each in found] == ["head", "fc"]
