# SPDX-License-Identifier: Apache-2.0
"""Findings of memory that is kept for longer than it is needed: batches, graphs, models, and what each step adds."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from opacus_memprof.analysis.findings import FREEZE, ZERO_GRAD, Run, common_module, largest, some
from opacus_memprof.profiles.profile import Finding, GrowthSite
from opacus_memprof.profiles.units import format_bytes, format_count

SEVERAL_FORWARDS = 4  # before one backward pass, as of pairs and their views
_FEW_MODULES = 3  # make what is live in a forward pass without a graph
MANY_BATCHES = 3  # batches beside the one in use: fewer hide the time that copying one takes


def batches_on_device(run: Run) -> Iterator[Finding]:
    """Finds batches on the device that wait for their turn, or have had it."""
    for seen, device, entry in run.observed_by_device("largest_batch"):
        peak = entry.peak
        blocks = Counter(block.bytes for block in peak.largest_blocks if block.category == "inputs")
        size = peak.categories.get("inputs", 0) - seen["bytes"]
        # A batch can be a list of tensors of the same size, or have targets larger than it.
        if (
            size >= MANY_BATCHES * seen["bytes"] > 0
            and max(blocks.values(), default=0) > MANY_BATCHES
            and run.is_material(device, size)
        ):
            lines = {line: sizes["inputs"] for line, sizes in peak.lines.items() if "inputs" in sizes}
            line = max(lines, key=lambda each: lines[each], default="")
            yield Finding(
                "batches_on_device",
                "",
                size,
                f"at the peak of {device}, {format_bytes(size)} of batches were live beside the one in use of "
                f"{format_bytes(seen['bytes'])}: see {line or 'what moves them there'}",
                BATCH_BY_BATCH,
                device=device,
            )


BATCH_BY_BATCH = (
    "move each batch to the device when it is its turn, and keep no list or queue of batches there; a DataLoader with "
    "pin_memory=True and batch.to(device, non_blocking=True) hide the copy"
)


def forwards_without_backward(run: Run) -> Iterator[Finding]:
    """Finds the graphs of many forward passes that were live at once, as of an evaluation that adds up losses."""
    for seen, device, entry in run.observed_by_device("waiting_forwards"):
        peak = entry.peak
        size = peak.categories.get("activations", 0)
        equal = Counter(
            (b.module, b.bytes) for b in peak.largest_blocks if b.category == "activations" and b.step == seen["step"]
        )
        if peak.step == seen["step"] and min(seen["bytes"], max(equal.values(), default=0)) > SEVERAL_FORWARDS:
            yield Finding(
                "forwards_without_backward",
                "",
                size,
                f"{seen['bytes']} forward passes in a row recorded graphs, without a backward pass, and "
                f"{format_bytes(size)} of activations were live at the peak of {device}: something keeps their "
                "graphs, such as a list or a sum of losses or outputs",
                NO_GRAPHS,
                device=device,
            )


NO_GRAPHS = (
    "run forward passes that no backward pass follows under torch.no_grad(), and add up loss.item(), not loss; where "
    "one follows, call loss.backward() for each part instead of adding up the losses"
)


def graphs_without_backward(run: Run) -> Iterator[Finding]:
    """Finds activations of forward passes that no backward pass follows.

    These are evaluations of a batch larger than all before in training. In the mode no_op, torch.func computes the
    gradients in a forward pass of its own, and detaches its results.
    """
    for seen, device, entry in run.observed_by_device("evaluation_graphs"):
        peak = entry.peak
        # Without a backward pass that uses it, what a graph saves counts as a temporary.
        size = sum(peak.categories.get(category, 0) for category in ("activations", "forward_temporaries"))
        if (peak.phase, peak.step) == ("forward", seen["step"]) and run.is_material(device, size):
            yield Finding(
                "graphs_without_backward",
                "",
                size,
                f"the peak of {device} is in an evaluation, a forward pass in eval mode: it recorded a graph for a "
                f"backward pass that does not follow, and {format_bytes(size)} of activations and temporaries were "
                "live",
                "evaluate under torch.no_grad() or torch.inference_mode(): model.eval() alone keeps all "
                "activations for a backward pass",
                device=device,
            )
    for seen, device, entry in run.observed_by_device("largest_batch"):
        peak = entry.peak
        size = peak.categories.get("forward_temporaries", 0)
        modules = {block.module for block in peak.largest_blocks if block.category == "forward_temporaries"}
        is_in_it = (peak.phase, peak.step, True) == ("forward", seen["step"], seen["has_graph"])
        # Without a graph, a forward pass holds what few modules have made.
        few = 10 * peak.categories.get("activations", 0) > size or len(modules) < _FEW_MODULES
        if is_in_it and not few and 2 * size > peak.requested_bytes and not run.observed("evaluation_graphs"):
            yield Finding(
                "graphs_without_backward",
                "",
                size,
                f"the peak of {device} is in a forward pass that recorded a graph, and no backward pass used what "
                f"it kept: {format_bytes(size)}",
                NO_GRAPHS,
                device=device,
            )
    for seen, device, _ in run.observed_by_device("untrained_graphs"):
        if run.is_material(device, seen["bytes"]):
            yield Finding(
                "graphs_without_backward",
                "",
                seen["bytes"],
                f"each call of {seen['name']}, whose parameters no optimizer updates, recorded a graph for a backward "
                f"pass, and kept {format_bytes(seen['bytes'])} of activations as long as its output was referred to",
                f"call {seen['name']} under torch.no_grad(), or {seen['name']}.requires_grad_(False) once before: "
                "eval() alone keeps all activations",
                device=device,
            )
    for device, entry in run.devices.items() if run.observed("no_op_graphs") else ():
        clip = entry.phases.get("clip")
        size = 0 if clip is None else clip.categories.get("activations", 0)
        if run.is_material(device, size):
            yield Finding(
                "graphs_without_backward",
                "",
                size,
                f"{format_bytes(size)} of activations on {device} were still live when the optimizer stepped: a "
                "forward pass outside of torch.func recorded a graph, and no backward pass follows it",
                "call the model under torch.no_grad() where only its outputs are needed, as for the accuracy; or "
                "return them from the function that is differentiated, with torch.func.grad_and_value(..., "
                "has_aux=True)",
                device=device,
            )


def activations_of_earlier_steps(run: Run) -> Iterator[Finding]:
    """Finds activations of an evaluation that recorded graphs, which were live at a peak in a later step."""
    evaluated_in = {step for _, seen in run.observed("evaluations_with_graphs") for step in seen["steps"]}
    for device, entry in run.devices.items():
        peak = entry.peak
        # The program's variables hold the output of one step until the next one replaces it.
        old = [
            block
            for block in peak.largest_blocks
            if block.category == "activations" and block.step in evaluated_in and block.step < peak.step - 1
        ]
        size = sum(block.bytes for block in old)
        # A collected output alone, which one module has made, may have been detached from its graph.
        if run.is_material(device, size) and len({block.module for block in old}) > 1:
            steps = sorted({block.step for block in old})
            span = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
            sizes: dict[str, int] = {}
            for block in old:
                sizes[block.module] = sizes.get(block.module, 0) + block.bytes
            yield Finding(
                "activations_of_earlier_steps",
                common_module(sizes),
                size,
                f"at the peak of {device}, in step {peak.step}, at least {format_bytes(size)} of activations from "
                f"forward passes of {span} were still live ({largest(sizes)}): something keeps their graph, such as "
                "the outputs or the sum of the losses of an evaluation",
                "evaluate under torch.no_grad(), and keep numbers and tensors without a graph: loss.item(), "
                "output.detach()",
                device=device,
                modules=sizes,
            )


_LATER_MODEL = re.compile(r"^(\w+#(\d+))(?:\.|$)")


def model_of(module: str) -> tuple[int, str, str]:
    """Returns a module's model, as its number and name such as `Sequential#2`, and the module's name inside of it."""
    found = _LATER_MODEL.match(module)
    return (int(found[2]), found[1], module[found.end() :]) if found else (1, "the first", module)


def _models_made_in(run: Run) -> dict[str, int]:
    """Returns the step in which each model was made, by its name."""
    return {model_of(name)[1]: seen["step"] for name, seen in run.observed("model_named")}


def earlier_models(modules: Mapping[str, Mapping[str, int]], made_in: Mapping[str, int]) -> dict[str, int]:
    """Returns the models that the program has replaced by an equal one and still keeps: their names and bytes.

    Models are equal if modules of the same names have parameters of the same size. Left out are models that are still
    trained: models with activations, as the second of a pair, and models that were made in the same step as the last
    one, as for several clients. The last one has activations; names tell only if none has, or if steps are unknown.

    Args:
        modules: bytes by category of each module.
        made_in: the step in which each model was made, by its name, as far as known.

    Returns:
        Bytes by the name of the model, such as `Sequential#2`.
    """
    parts: dict[tuple[int, str], dict[str, int]] = {}
    running: set[tuple[int, str]] = set()
    sizes: dict[tuple[int, str], int] = {}
    trained: set[tuple[int, str]] = set()  # a copy, as of averaged parameters, has only parameters
    for module, categories in modules.items():
        number, model, inside = model_of(module)
        if module:
            sizes[number, model] = sizes.get((number, model), 0) + sum(categories.values())
        if size := categories.get("model_parameters"):
            parts.setdefault((number, model), {})[inside] = size
        if module and categories.get("activations"):
            running.add((number, model))
        if categories.keys() - {"model_parameters", "buffers"}:
            trained.add((number, model))
    last = max(trained & parts.keys() & running or trained & parts.keys(), default=(1, ""))
    if last not in parts:
        return {}
    now = made_in.get(last[1])

    def is_earlier(model: tuple[int, str]) -> bool:
        step = made_in.get(model[1])
        return model < last if step is None or now is None else step < now

    # An average of the others, as a server has, has only parameters, and is none of a training.
    equal = (model for model in sorted(parts) if model in trained - running and parts[model] == parts[last])
    return {model[1]: sizes[model] for model in equal if is_earlier(model)}


def gradients_of_other_models(run: Run) -> Iterator[Finding]:
    """Finds per-sample gradients of models that wait for their turn, such as those of clients in federated learning."""
    made_in = _models_made_in(run)
    for device, entry in run.devices.items():
        peak = entry.peak
        blocks = [block for block in peak.largest_blocks if block.category == "per_sample_gradients"]
        now = {model_of(block.module)[1] for block in blocks if block.step == peak.step}
        sizes: dict[str, int] = {}
        for module, categories in peak.modules.items():
            _, model, _ = model_of(module)
            if model not in now and (size := categories.get("per_sample_gradients", 0)):
                sizes[model] = sizes.get(model, 0) + size
        total = sum(sizes.values())
        in_turn = len({made_in.get(model) for model in (*sizes, *now)}) == 1
        if now and in_turn and run.is_material(device, total):
            yield Finding(
                "gradients_of_other_models",
                "",
                total,
                f"at the peak of {device}, {format_bytes(total)} of per-sample gradients of "
                f"{format_count(len(sizes), 'other model')} were live ({largest(sizes)}), which were not being trained "
                "then: they stay until their optimizer's next zero_grad",
                "call optimizer.zero_grad() after the last step of each model's turn",
                device=device,
            )


def models_of_earlier_runs(run: Run) -> Iterator[Finding]:
    """Finds models that are alive at the peak although an equal one has been trained since."""
    made_in = _models_made_in(run)
    for device, entry in run.devices.items():
        sizes = earlier_models(entry.peak.modules, made_in)
        total = sum(sizes.values())
        if run.is_material(device, total):
            yield Finding(
                "models_of_earlier_runs",
                "",
                total,
                f"at the peak of {device}, {format_count(len(sizes), 'equal model')} of earlier trainings were alive, "
                f"with {format_bytes(total)} of parameters, gradients and optimizer states ({largest(sizes)})",
                FREE_MODELS,
                device=device,
            )


FREE_MODELS = (
    "at the end of each training, delete what refers to its model, such as model, optimizer and loader, and call "
    "gc.collect(), because a private model is in a reference cycle"
)


# Memory grows if many different steps allocated blocks at one site (module, category, phase and op) that are live at
# the end of the last step. Differences between steps would vary with the batch. In steady training, a step's blocks are
# freed by the end of the next step, and parameters, optimizer states, workspaces and caches are allocated in few steps.
# A tensor that each step replaces by a longer one is allocated in one step too, and is not found.

# A site counts if this many steps, and this share of the steps that the replay considers (all but the first two and the
# last two), allocated blocks there.
MIN_STEPS = 3
MIN_SHARE = 0.25
# A site that grows in nearly every one of at least this many steps is reported even if it is small, because it never
# stops.
REGULAR_STEPS = 6
REGULAR_SHARE = 0.9
_MARGIN = 4  # kWarmUpSteps + kRecentSteps of csrc/core/replay.h

_REMEDY = {
    "activations": "something keeps the autograd graph of each step: keep loss.item() or loss.detach(), not loss",
    "activation_hooks": "something keeps the activations that Opacus captured: run forward passes without a backward "
    "pass under torch.no_grad() or in model.eval()",
    "inputs": "something keeps each batch: delete its references at the end of the step",
}
_DEFAULT_REMEDY = (
    "something keeps a tensor of each step: look for lists, dictionaries and attributes that grow, for averages of "
    "parameters or losses that are not computed under torch.no_grad(), whose graph grows, and for reference cycles "
    "(gc.collect() at the end of a step frees those)"
)


def growing_memory(run: Run) -> Iterator[Finding]:
    """Finds categories with blocks that many steps left behind."""
    for device, replayed in run.replayed.items():
        considered = replayed["last_step_end"]["step"] - _MARGIN
        sites: dict[str, list[dict[str, Any]]] = {}
        for residue in replayed["residue"]:
            if residue["steps"] >= max(MIN_STEPS, MIN_SHARE * considered):
                sites.setdefault(run.names.reported_category(residue["category"]), []).append(residue)
        for category, found in sites.items():
            steps = max(site["steps"] for site in found)
            regular = steps >= max(REGULAR_STEPS, REGULAR_SHARE * considered)
            if regular or run.is_material(device, sum(site["bytes"] for site in found)):
                yield _growth(run, device, category, found, replayed["last_step_end"]["step"] - 1)


def _growth(run: Run, device: str, category: str, found: Sequence[dict[str, Any]], end: int) -> Finding:
    modules: dict[str, int] = {}
    for site in found:
        module = run.names.module(site["module"])
        modules[module] = modules.get(module, 0) + site["bytes"]
    total = sum(modules.values())
    first, last = min(site["first_step"] for site in found), max(site["last_step"] for site in found)
    steps = max(site["steps"] for site in found)
    sites = sorted((_site(run, site) for site in found), key=lambda site: -site.bytes)
    return Finding(
        "growing_memory",
        common_module(modules),
        total,
        f"{format_bytes(total)} of {category} from {steps} of the steps {first} to {last} were still live at the end "
        f"of step {end}: about {format_bytes(total // steps)} more each time ({largest(modules)}); "
        f"allocated in {_where(sites[0])}",
        _remedy(run, category, modules),
        device=device,
        category=category,
        modules=modules,
        sites=sites,
    )


def _remedy(run: Run, category: str, modules: Mapping[str, int]) -> str:
    """Returns the remedy for growing memory. For per-sample gradients, it depends on who should clear them."""
    if category != "per_sample_gradients":
        return _REMEDY.get(category, _DEFAULT_REMEDY)
    unowned = [module for module, _ in run.observed("unowned_samples") if module in modules]
    if run.observed("public_steps"):
        return (
            "step the optimizer that make_private has returned, and call its zero_grad: the zero_grad of another "
            "optimizer does not free per-sample gradients"
        )
    if unowned:
        return (
            f"the optimizer does not have them, so that its zero_grad leaves them out: {FREEZE.format(some(unowned))}"
        )
    if not run.observations:  # of a killed process
        return (
            "call zero_grad of the optimizer that make_private returns after each of its steps, and give it all "
            "parameters that are trained: it leaves the others out (freeze them before make_private)"
        )
    if not run.observed("zero_grads"):
        return f"per-sample gradients are never freed: {ZERO_GRAD}"
    return "something keeps per-sample gradients of each step: look for lists and attributes that hold p.grad_sample"


def _site(run: Run, residue: dict[str, Any]) -> GrowthSite:
    return GrowthSite(
        module=run.names.module(residue["module"]),
        phase=run.names.phase(residue["phase"]),
        op=run.names.op(residue["op"]),
        bytes=residue["bytes"],
        blocks=residue["blocks"],
        steps=residue["steps"],
    )


def _where(site: GrowthSite) -> str:
    """Formats a site: `backward by aten::mm of fc1`."""
    op = f" by {site.op}" if site.op else ""
    module = f" of {site.module}" if site.module else ", outside every module"
    return f"{site.phase}{op}{module}"
