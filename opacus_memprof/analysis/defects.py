# SPDX-License-Identifier: Apache-2.0
"""Finds defects of a run, which make it fail, break its privacy or let memory grow; and lists all findings.

A detector takes a Run and yields findings. `find` applies all detectors, in the order of DETECTORS.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from opacus_memprof.analysis import findings, kept_memory
from opacus_memprof.analysis.findings import FREEZE, ZERO_GRAD, Run, common_module, largest, some
from opacus_memprof.profiles.layer_shapes import Program
from opacus_memprof.profiles.profile import Finding
from opacus_memprof.profiles.units import format_bytes, format_count

_CALLED = re.compile(r"\boptimizer(?=\.(?:step|zero_grad)\(\))")
_EVALUATE = (
    "run forward passes without a backward pass under torch.no_grad() or in model.eval(); to continue after one, "
    "delete `module.activations` and set `parameter._forward_counter` to 0, because zero_grad does neither"
)
_CHECKPOINT = (
    "checkpoint with use_reentrant=True, which Opacus supports, or train without checkpointing: Opacus captures in the "
    "forward pass and again in the recomputation, and backward releases only one of the two"
)


def captures_without_backward(run: Run) -> Iterator[Finding]:
    """Finds captured activations that no backward pass released in several forward passes, or before a failed step."""
    observations = run.observed("captures")
    if not observations:
        return
    captured = {module: seen for module, seen in observations if seen["captures"]}
    sizes = {module: seen["bytes"] for module, seen in observations if seen["bytes"]}
    total = sum(sizes.values())
    count = sum(seen["captures"] for seen in captured.values())
    checkpointing = any(seen["recomputed"] for seen in captured.values())
    failed = any(seen["failed"] for seen in captured.values())
    if any(seen["refused"] for seen in captured.values()):
        consequence = "the next ghost-clipping forward fails, with an error about tied parameters"
    elif failed:
        consequence = "the step failed, because grad_sample stays None until every capture has had its backward pass"
    else:
        consequence = "the next optimizer step will fail, because grad_sample stays None"
    places = format_count(len(captured), "module")
    yield Finding(
        "checkpoint_captures" if checkpointing else "captures_without_backward",
        common_module(captured),
        total,
        f"{count} captures in {places} wait for a backward pass that never came, and keep {format_bytes(total)} of "
        f"activations alive ({largest(sizes)}); {consequence}",
        _CHECKPOINT if checkpointing else _EVALUATE,
        captures={module: seen["captures"] for module, seen in captured.items()},
        modules=sizes,
    )


def stale_norm_samples(run: Run) -> Iterator[Finding]:
    """Finds Linear layers whose norm sampler returns no norms, because the outputs have more than three dimensions."""
    for module, seen in run.observed("norms_missing"):
        what = "the layer keeps those of an earlier batch" if seen["bytes"] else "clipping fails"
        yield Finding(
            "stale_norm_samples",
            module,
            seen["bytes"],
            f"Opacus computes no norms for outputs of {seen['dimensions']} dimensions: {what}. The "
            "layer's part of a sample's gradient is not bounded by max_grad_norm, and the privacy guarantee does not "
            "hold",
            'flatten all dimensions between the first and the last before this layer, or use grad_sample_mode="hooks"',
        )


def make_private_failed(run: Run) -> Iterator[Finding]:
    """Finds the error with which the last make_private failed, if none has succeeded since."""
    for _, seen in run.observed("make_private_raised"):
        error = re.sub(r"""\[\w+\(["']""", "", seen["error"].partition(". ")[0])
        if "training mode" in error:
            remedy = "call model.train() before make_private"
        elif "UnsupportedModuleError" in error:
            remedy = (
                "replace the modules that Opacus cannot train, before the optimizer is made: model = "
                "opacus.validators.ModuleValidator.fix(model)"
            )
        elif "optimizer Parameters" in error:
            remedy = "make the optimizer from parameters of the model that make_private gets, after its last change"
        else:
            remedy = "a training is private only with the model, optimizer and loader that make_private returns"
        trained = any("backward" in entry.phases for entry in run.devices.values())
        ending = ". The program went on, and its training is not private" if trained else ""
        yield Finding(
            "make_private_failed",
            "",
            0,
            f"PrivacyEngine.make_private raised {error}{ending}",
            remedy,
        )


def training_is_not_private(run: Run) -> Iterator[Finding]:
    """Finds updates of a private model that neither clip nor add noise."""
    for _, seen in run.observed("public_steps"):
        steps, name = seen["bytes"], seen["optimizer"]
        which = f"the {name} that make_private was given" if seen["is_original"] else f"another {name}"
        yield Finding(
            "training_is_not_private",
            "",
            0,
            f"this training is not private: per-sample gradients are computed, but {steps} of "
            f"{format_count(steps + seen['private'], 'update')} did not clip them or add noise, because the program "
            f"steps {which}. What the privacy accountant says does not hold",
            "step and clear the optimizer that make_private returns: model, optimizer, loader = "
            "engine.make_private(module=model, optimizer=optimizer, ...), then optimizer.step() and "
            "optimizer.zero_grad() of this one; give it to learning rate schedulers, too",
        )
    for _, seen in run.observed("unclipped_steps"):
        yield Finding(
            "training_is_not_private",
            "",
            0,
            f"this training is not private: ghost clipping clips in the backward of the criterion that make_private "
            f"returns, and none of {format_count(seen['bytes'], 'step')} had one. Noise was added to gradients that "
            "were not clipped",
            "use the returned criterion: model, optimizer, criterion, loader = engine.make_private(..., "
            'criterion=criterion, grad_sample_mode="ghost"), then criterion(model(x), y).backward()',
        )


def different_numbers_of_samples(run: Run) -> Iterator[Finding]:
    """Finds the cause of a failed step in which modules have per-sample gradients of different numbers of samples."""
    observations = run.observed("sample_counts")
    if not observations:
        return
    counts = dict(sorted((module, seen["samples"]) for module, seen in observations))
    batch = observations[0][1]["batch"]
    if batch not in counts.values():
        batch = Counter(counts.values()).most_common(1)[0][0]
    odd = {module: count for module, count in counts.items() if count != batch}
    if not odd:
        return
    name, count = next(iter(odd.items()))
    others = [module for module in counts if module not in odd]
    if count < batch:
        remedy = (
            f"give {name or 'the model'} an input with a row for each sample: expand what all samples share, such as "
            "positions, to the batch (positions.expand(len(x), -1))"
        )
    else:
        remedy = (
            f"keep the batch as the first dimension of the input of {name or 'the model'}: Linear and norm layers "
            "accept [batch, tokens, features], without view(batch * tokens, features)"
        )
    yield Finding(
        "different_numbers_of_samples",
        common_module(odd),
        0,
        f"the optimizer's step needs gradients of the same samples from all modules, and "
        f"{', '.join(f'{module or chr(34) * 2} has {size}' for module, size in list(odd.items())[:3])}, but "
        f"{some(others)} {batch}",
        remedy + _flash_clip(observations),
    )


def missing_per_sample_gradients(run: Run) -> Iterator[Finding]:
    """Finds the reason why modules had no per-sample gradients in a step."""
    observations = [(module, seen) for module, seen in run.observed("samples_missing") if not seen["captures"]]
    trained = [(module, seen) for module, seen in observations if seen["training"]]
    hooked = [(module, seen) for module, seen in trained if seen.get("hooked", True)]
    causes = {
        "in eval mode, where Opacus records nothing": (
            [module for module, seen in observations if not seen["training"]],
            "call .train() of {}, or freeze it before make_private with requires_grad_(False)",
        ),
        "frozen when make_private was called, which gave hooks to trained modules alone": (
            [module for module, seen in trained if not seen.get("hooked", True)],
            "call requires_grad_(True) of {} before make_private; to train it later, freeze it after make_private, and "
            "have the optimizer of the first steps without it",
        ),
        "used outside of its own forward, so that Opacus' hooks did not run": (
            [module for module, seen in hooked if seen["has_gradient"]],
            "call {} as a module instead of computing with its weight, as F.linear(x, layer.weight) does",
        ),
        "not reached by any gradient: not used in the forward, or not part of the loss": (
            [module for module, seen in hooked if not seen["has_gradient"]],
            "freeze {} before make_private with requires_grad_(False), or use it",
        ),
    }
    for cause, (found, remedy) in causes.items():
        if found:
            trains = "outside" in cause
            yield Finding(
                "missing_per_sample_gradients",
                common_module(found),
                0,
                f"Opacus has no per-sample gradients for {some(found)}: {cause}",
                remedy.format(some(found)) + (_flash_clip(observations) if trains else ""),
            )


def accumulated_per_sample_gradients(run: Run) -> Iterator[Finding]:
    """Finds the reason why Opacus refused a backward pass before earlier per-sample gradients were used."""
    observations = run.observed("samples_accumulated")
    if not observations or run.observed("public_steps"):
        return
    modules = [module for module, _ in observations]
    unowned = [module for module, _ in run.observed("unowned_samples")]
    if set(modules) & set(unowned):
        evidence = f"{some(unowned)}, which no optimizer of make_private has: its steps and zero_grad leave them out"
        remedy = FREEZE.format(some(unowned))
    elif observations[0][1]["steps"] and not run.observed("zero_grads"):
        evidence, remedy = f"{some(modules)}, and the optimizer's zero_grad was never called", ZERO_GRAD
    elif observations[0][1]["used"]:
        evidence = f"{some(modules)}, which optimizer.step() had used and no zero_grad has cleared since"
        remedy = (
            "call optimizer.zero_grad() directly after each optimizer.step(), and not only before the next batch: a "
            "backward pass between the two, such as a generator's, finds what the step has used"
        )
    else:
        evidence = f"{some(modules)}: {observations[0][1]['bytes']} backward passes ran without a step between them"
        remedy = (
            "run one backward pass for each step: concatenate what the passes get, such as a discriminator's real and "
            "fake samples, into one batch; or call optimizer.step() and optimizer.zero_grad() after each. To "
            "accumulate a large batch, use BatchMemoryManager"
        )
    yield Finding(
        "accumulated_per_sample_gradients",
        common_module(modules),
        0,
        f"a backward pass found per-sample gradients of an earlier one in {evidence}; "
        + ("the mode ew" if observations[0][1].get("by_torch") else "with Poisson sampling Opacus")
        + " allows no accumulation",
        remedy,
    )


def discarded_backward_passes(run: Run) -> Iterator[Finding]:
    """Finds gradients that are accumulated by hand in ghost clipping, which clears them in each backward pass."""
    for _, seen in run.observed("ghost_accumulated"):
        yield Finding(
            "discarded_backward_passes",
            "",
            0,
            f"{seen['bytes']} backward passes ran for one step, and the step used the last one alone: in ghost "
            "clipping each backward pass of the criterion clears the gradients of earlier ones",
            "to accumulate gradients, use BatchMemoryManager, and call optimizer.step() and optimizer.zero_grad() "
            "after each batch",
        )


def outputs_changed_in_place(run: Run) -> Iterator[Finding]:
    """Finds the operation that changed an output in place, which Opacus' backward hooks do not allow."""
    for module, seen in run.observed("in_place"):
        if seen["is_option"]:
            what, remedy = f"{module} ({seen['layer']}) computes", f"set inplace=False in {module} ({seen['layer']})"
        else:
            what = f"{seen['line'] or 'the program'} computes"
            remedy = f"compute out of place (x = x + y instead of x += y, torch.relu, not torch.relu_): {seen['line']}"
        yield Finding(
            "outputs_changed_in_place",
            module,
            0,
            f"{what} in place on the output of a layer, which autograd forbids where the layer has a backward hook, as "
            "Opacus' hooks are",
            remedy + _flash_clip([(module, seen)]),
        )


def captures_used_up(run: Run) -> Iterator[Finding]:
    """Finds a second backward pass through one forward pass, for which Opacus' hooks have no captures any more."""
    for module, _ in run.observed("captures_used_up"):
        yield Finding(
            "captures_used_up",
            module,
            0,
            f"a second backward pass went through one forward pass of {module or 'the model'}: Opacus' hooks have used "
            "up in the first what they had captured, as a gradient penalty or retain_graph=True causes it",
            "run one backward pass for each forward pass: add up the losses before backward(), and leave out penalties "
            "that call torch.autograd.grad on the private model: Opacus clips no gradients of gradients",
        )


def forward_not_vectorized(run: Run) -> Iterator[Finding]:
    """Finds the line that functorch cannot run for all samples at once, in a module without a grad sampler."""
    for module, seen in run.observed("not_vectorized"):
        line, layer = seen["line"] or "its forward", seen["layer"]
        yield Finding(
            "forward_not_vectorized",
            module,
            0,
            f"{line} reads the value of a tensor, which functorch's vmap does not allow: Opacus knows no grad sampler "
            f"for {layer}, and repeats the forward of {module or 'the model'} for each sample by vmap",
            f"use torch.where instead of an if, and no .item() in {line}; or write a function for {layer} with "
            "opacus.grad_sample.register_grad_sampler" + _flash_clip([(module, seen)]),
        )


def copied_private_model(run: Run) -> Iterator[Finding]:
    """Finds a copy of a private model that runs: copies have Opacus' hooks without what these keep at parameters."""
    for _, seen in run.observed("private_copy"):
        yield Finding(
            "copied_private_model",
            "",
            0,
            f"{seen['line'] or 'the program'} runs a copy of a private model: copy.deepcopy copies Opacus' hooks, but "
            "not what they keep at each parameter, so that the first layer fails",
            "copy the model before make_private, and make each copy that is trained private by itself; weights go from "
            "one to the other by load_state_dict(private_model._module.state_dict())",
        )


def _flash_clip(observations: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Returns the end of a remedy, if flash_clip can clip the model."""
    possible = any(seen.get("flash_clip") for _, seen in observations)
    return (
        '; or use opacus_memprof.PrivacyEngine with grad_sample_mode="flash_clip", which trains it as it is' * possible
    )


# The kinds of findings that make a run fail, or break its privacy guarantee.
DEFECTS = (
    "make_private_failed",
    "training_is_not_private",
    "stale_norm_samples",
    "different_numbers_of_samples",
    "missing_per_sample_gradients",
    "accumulated_per_sample_gradients",
    "discarded_backward_passes",
    "outputs_changed_in_place",
    "captures_used_up",
    "forward_not_vectorized",
    "copied_private_model",
    "captures_without_backward",
    "checkpoint_captures",
    "growing_memory",
    "activations_of_earlier_steps",
    "forwards_without_backward",
)

# Defects come first.
DETECTORS: tuple[Callable[[Run], Iterator[Finding]], ...] = (
    make_private_failed,
    training_is_not_private,
    stale_norm_samples,
    different_numbers_of_samples,
    missing_per_sample_gradients,
    accumulated_per_sample_gradients,
    discarded_backward_passes,
    outputs_changed_in_place,
    captures_used_up,
    forward_not_vectorized,
    copied_private_model,
    captures_without_backward,
    kept_memory.growing_memory,
    kept_memory.activations_of_earlier_steps,
    kept_memory.forwards_without_backward,
    kept_memory.batches_on_device,
    findings.per_sample_gradients_by_hand,
    kept_memory.gradients_of_other_models,
    kept_memory.models_of_earlier_runs,
    findings.frozen_per_sample_gradients,
    findings.unused_per_sample_gradients,
    findings.per_sample_gradients_in_forward,
    kept_memory.graphs_without_backward,
    findings.discarded_gradients,
    findings.copied_per_sample_gradients,
    findings.noise_allocated_twice,
    findings.noise_of_whole_parameters,
    findings.gradients_reduced_twice,
    findings.ghost_matrices,
)


def find(run: Run) -> list[Finding]:
    """Returns all findings in the order of DETECTORS; of each detector, the largest first."""
    return [
        msgspec.structs.replace(finding, remedy=_in_names_of(run.program, finding.remedy))
        for detector in DETECTORS
        for finding in sorted(detector(run), key=lambda finding: (-finding.bytes, finding.module))
    ]


def _in_names_of(program: Program, remedy: str) -> str:
    """Returns a remedy with the program's names where it calls the optimizer, or deletes what refers to the model."""
    if "engine.make_private(" in remedy:  # which names what it returns
        return remedy
    called = _CALLED.sub(lambda _: program.optimizer, remedy)
    own = f"such as {program.model}, {program.optimizer} and {program.loader},"
    return called.replace("such as model, optimizer and loader,", own)
