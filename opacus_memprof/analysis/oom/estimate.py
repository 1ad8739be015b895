# SPDX-License-Identifier: Apache-2.0
"""The run's own step as step.Step: what hooks saw of it, completed where the run ended before the forward did."""

from collections.abc import Mapping
from dataclasses import replace

from opacus_memprof.analysis.oom.failure import ACTIVATIONS, Failure, totals
from opacus_memprof.analysis.oom.history import History
from opacus_memprof.analysis.oom.layers import Layer
from opacus_memprof.analysis.oom.places import homes_of, repeated_units, spread, unit_of, with_residuals
from opacus_memprof.analysis.oom.step import Step
from opacus_memprof.profiles.categories import PER_SAMPLE, RESIDENT
from opacus_memprof.workload import Forward, Module, Workload


def step_of(failure: Failure, workload: Workload, history: History, freed: int = 0) -> Step | None:
    """None where nothing is known of the model or its batch.

    Args:
        freed: bytes of `failure` that an earlier step, or a forward without a backward, has left.
    """
    samples = workload.batch_of(failure.step)
    if not workload.modules or not samples:
        return None
    kept = totals((one for one in failure.holdings if one.category in ACTIVATIONS), lambda one: one.module)
    excess = freed / max(sum(kept.values()), 1)
    live = {module: int(size * (1 - min(excess, 1.0))) for module, size in kept.items()}
    blocks: dict[str, int] = {}
    for one in failure.holdings:
        if one.category in ACTIVATIONS:
            blocks[one.module] = max(blocks.get(one.module, 0), one.largest)
    known = {name: _scaled(forward, samples) for name, forward in workload.forwards.items()}
    began = failure.phase == "forward" and not history.steps
    layers = _layers(workload, known, live, blocks, samples, complete=not began)
    seen = {layer.name for layer in layers}
    tail = live.get("", 0) if "" not in seen else 0
    missing = history.activations - freed - tail - sum(layer.activations for layer in layers)
    if missing > 0 and layers:
        layers = spread(layers, missing, failure.module if failure.phase == "backward" else "")
    if began and layers:
        tail = max(tail, layers[-1].forward.output_bytes)
    by_category = failure.totals(lambda one: one.category)
    resident = sum(size for category, size in by_category.items() if _is_resident(category))
    trained = workload.trained_bytes
    largest = max(module.bytes for module in workload.modules.values())
    # On a GPU torch updates all parameters at once, on the CPU one after the other.
    update = workload.temporaries * trained if failure.device != "cpu" else 2 * largest * bool(workload.temporaries)
    return Step(
        mode=workload.mode,
        mean=workload.mean,
        samples=samples,
        layers=tuple(layers),
        resident=resident,
        trained=trained,
        largest=largest,
        states=max(workload.states * trained, by_category.get("optimizer_states", 0)),
        update=update,
        tail=tail,
        inputs=by_category.get("inputs", 0),
        keeps_gradients=keeps_gradients(workload),
        processors=workload.processors if failure.device != "cpu" else 0,
    )


def keeps_gradients(workload: Workload) -> bool:
    """Whether p.grad outlives zero_grad. Where no zero_grad was seen: Opacus' optimizers keep it, torch's do not."""
    if workload.keeps_gradients is not None:
        return workload.keeps_gradients
    return workload.mode not in ("", "flash_clip")


def _is_resident(category: str) -> bool:
    """Also the program's own categories."""
    made = {"gradients", "optimizer_states", "summed_gradients", "noise", "optimizer_temporaries", "pending_free"}
    return category in RESIDENT or category not in PER_SAMPLE | made


def _scaled(forward: Forward, samples: int) -> Forward:
    """The same forward with another number of samples."""
    if forward.samples == samples or not forward.samples:
        return forward

    def of(size: int) -> int:
        return size * samples // forward.samples

    return replace(forward, samples=samples, input_bytes=of(forward.input_bytes), output_bytes=of(forward.output_bytes))


def _layers(
    workload: Workload,
    known: Mapping[str, Forward],
    live: Mapping[str, int],
    blocks: Mapping[str, int],
    samples: int,
    *,
    complete: bool,
) -> list[Layer]:
    """The layers in forward order, with the activations that are live now; where the forward had not ended, those
    that were still to come are taken from their twins, or from their shapes."""
    order = list(known)
    units = repeated_units(workload.modules)
    if not complete:
        order += [name for name in workload.modules if name not in known]
    homes = homes_of(live, [name for name in order if name in workload.modules])
    taken: dict[str, int] = {}
    largest: dict[str, int] = {}
    for name, home in homes.items():
        taken[home] = taken.get(home, 0) + live[name]
        largest[home] = max(largest.get(home, 0), blocks.get(name, 0))
    ended = [prefix for prefix in units if any(name.startswith(f"{prefix}.") for name in known)]
    models = {units[prefix].signature: prefix for prefix in reversed(ended[:-1] or ended)}  # the last may be half done
    layers: list[Layer] = []
    for name in order:
        module = workload.modules.get(name)
        if module is None:
            continue
        forward, size, block = known.get(name), taken.get(name, 0), largest.get(name, 0)
        prefix = unit_of(name)
        if not complete and prefix in units and (forward is None or prefix == (ended or [""])[-1]):
            model = models.get(units[prefix].signature)
            twin = model + name[len(prefix) :] if model else name
            forward = forward or known.get(twin)
            size, block = max(size, taken.get(twin, 0)), max(block, largest.get(twin, 0))
        if forward is None:
            forward = _guess(module, layers[-1] if layers else None, samples)
            size = max(size, forward.output_bytes)
        layers.append(Layer(name, module, forward, size, block))
    return with_residuals(layers, blocks, units)


def _guess(module: Module, before: Layer | None, samples: int) -> Forward:
    """A layer that the forward had not come to: as many tokens as the one before it, but for a Linear behind
    convolutions, which sees a sample as a whole."""
    tokens, width = (before.forward.tokens, before.forward.width) if before else (1, 4)
    rows, columns = (module.rows, module.columns) if module.rows else (module.weight, module.weight)
    columns = columns * module.groups // module.taps
    if module.kind == "Embedding":
        rows, columns = columns, 1
    if module.kind == "Linear" and before is not None and (before.convolves or before.module.kind == "GroupNorm"):
        tokens = 1
    size = samples * tokens * width
    relaid = before is not None and before.forward.relaid and module.taps > 1
    return Forward(samples, tokens, size * columns, size * rows, width, before is None, relaid)
