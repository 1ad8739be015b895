# SPDX-License-Identifier: Apache-2.0
"""The structure of privacy_check.json: what was proved about private models while they were trained.

docs/flash_clip.md explains it.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from opacus_memprof.profiles.files import write_text
from opacus_memprof.profiles.json_object import FORMAT, JsonObject, read_json_object, to_json


class CheckedSpan(JsonObject):
    """Consecutive forwards, or steps, that were checked.

    Attributes:
        first, last: their numbers. The first forward of a situation is 1, and so is the first step.
        share: the fraction of the batch that was checked: 1 for the whole batch.
    """

    first: int
    last: int
    share: float


class RepeatedModule(JsonObject):
    """A module whose forward is repeated for the per-sample gradients of some parameters in it.

    Attributes:
        way: by torch.func.vmap, in a loop over samples, or the whole batch with a backward for each sample.
        parameters: names of the parameters in the module.
    """

    module: str
    way: Literal["vmap", "loop", "whole"]
    parameters: list[str]


class ProvedSituation(JsonObject):
    """A situation that was proved: forwards of one kind.

    Attributes:
        module: the name of the module that was called; "" for the model.
        arguments: the kinds of its arguments; B is the number of samples, n any other size.
        autocast: the dtype of autocast; null without it.
        evaluating: names of the modules that were in evaluation mode.
        trained_parameters, trained_elements: the number of trained tensors, and of their elements.
        tapped_layers: the number of layers whose inputs and output gradients are used.
        batch_sizes: the smallest and the largest; above 16 rounded down and up to powers of two.
        orders: the number of orders of layer calls that were proved.
        forwards: the number of forwards, except those of empty batches.
        checks: the checked forwards by kind of check ("mixing", "sums", "explained").
    """

    module: str
    arguments: str
    autocast: str | None
    evaluating: list[str]
    trained_parameters: int
    trained_elements: int
    tapped_layers: int
    repeated: list[RepeatedModule]
    batch_sizes: list[int]
    orders: int
    forwards: int
    checks: dict[str, list[CheckedSpan]]


class Refusal(JsonObject):
    """A reason for which forwards or steps were refused.

    Attributes:
        step: the number of the step that was refused first; the first step is 1.
        reason: the sentence of the error.
        times: how often.
    """

    step: int
    reason: str
    times: int


class NotPrivate(JsonObject):
    """Values that depend on the data and are not differentially private.

    Attributes:
        note: a sentence that says so.
        largest_sum: the largest norm of a clipped sum, relative to the sum of its samples' bounds: at most 1 except for
            rounding. null if it was not measured.
        dropped_samples: the number of samples that flash_clip_nonfinite="drop" has dropped.
        refused: the number of forwards and steps that were refused.
        refusals: the reasons; at most 100 different ones.
    """

    note: str
    largest_sum: float | None
    dropped_samples: int
    refused: int
    refusals: list[Refusal]


class ModelCheck(JsonObject):
    """The properties that were proved for one model.

    Attributes:
        model: the name of its class.
        device: the GPU's name, or "cpu". With "virtual " before it, nothing was proved, as if `check` were "off".
        max_grad_norm, noise_multiplier: the smallest and the largest of the run.
        bounds: the bounds of the parameters, at first, with clipping="per_layer".
        check: which forwards, or steps, are checked.
        nonfinite: flash_clip_nonfinite; null for other modes.
        in_every_step: further checks that ran in every step.
        situations: the situations of flash_clip.
        checked_steps: for other modes: the checked steps by kind of check ("mixing", "clipped_sum").
        steps: number of completed steps; null if they were not counted.
    """

    model: str
    device: str
    mode: str
    clipping: str
    max_grad_norm: list[float]
    bounds: list[float]
    noise_multiplier: list[float]
    loss_reduction: str
    check: Literal["first", "sometimes", "always", "off"]
    nonfinite: Literal["refuse", "drop"] | None
    in_every_step: list[str]
    situations: list[ProvedSituation]
    checked_steps: dict[str, list[CheckedSpan]]
    steps: int | None
    not_private: NotPrivate


class PrivacyCheck(JsonObject, kw_only=True):
    """The content of privacy_check.json.

    Attributes:
        versions: by package; null if a package is not installed.
        rank, world_size: of the process that wrote the file: the first of all ranks.
        models: the models that one engine has made private, or that were trained while a profile was recorded.
        earlier: for a training that was continued from a checkpoint, the earlier content of this file.
    """

    format: Literal[1] = FORMAT
    versions: dict[str, str | None]
    rank: int
    world_size: int
    models: list[ModelCheck]
    earlier: "list[PrivacyCheck]" = []


def read_privacy_check(path: Path) -> PrivacyCheck | None:
    """Reads privacy_check.json; None without the file. Raises MemprofError if it cannot be read."""
    return read_json_object(path, PrivacyCheck, "remove it") if path.is_file() else None


def write_privacy_checks(checks: Sequence[dict[str, Any]], path: str | os.PathLike[str]) -> Path | None:
    """Writes privacy_check.json for the models of several engines, atomically.

    Args:
        checks: the results of each engine's `privacy_check`.
        path: the path of the file.

    Returns:
        The path; None without a check, and on all ranks except the first.

    Raises:
        MemprofError: the file cannot be written.
    """
    if not checks or any(check["rank"] > 0 for check in checks):
        return None
    models = [model for check in checks for model in check["models"]]
    earlier = [each for check in checks for each in check["earlier"]]
    return write_text(path, to_json({**checks[0], "models": models, "earlier": earlier}, indent=1))
