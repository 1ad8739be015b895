# SPDX-License-Identifier: Apache-2.0
"""grad_sample_mode="auto": picks the mode for a model and its batch, and logs the reason in one line.

flash_clip is preferred. For each layer it keeps at most the per-sample gradients, so it needs no more memory than
hooks. It runs backward once, so it is faster than ghost. If flash_clip refuses the model, large per-sample gradients
select ghost, with norm samplers that form no T x T matrix; otherwise hooks is used. The choice depends on parameter
shapes and the batch size alone; the model is not run.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from opacus_memprof.clipping.agreement import spans_ranks
from opacus_memprof.clipping.norm_samplers import register_norm_samplers
from opacus_memprof.clipping.workspace import Workspace
from opacus_memprof.errors import MemprofError

AUTO = "auto"
LARGE_BYTES = 256 * 2**20
"""Per-sample gradients with more bytes than this cost more than ghost's second backward pass."""

_LOGGER = logging.getLogger("opacus_memprof.clipping")
_LOGGER.setLevel(logging.INFO)  # Opacus leaves the root logger at WARNING


def make_private_automatically(
    make_private: Callable[[dict[str, Any]], Any], options: Mapping[str, Any], workspace_mb: float
) -> tuple[Any, ...]:
    """Makes a model private in the mode that fits it best.

    Args:
        make_private: the method of an engine that supports flash_clip; called with keyword arguments.
        options: the arguments of `make_private`. Ghost is considered only if they contain a "criterion".
        workspace_mb: upper limit on the temporaries of one layer, in MiB.

    Returns:
        (module, optimizer, data loader); with a criterion among the options, always (module, optimizer, criterion, data
        loader).

    Raises:
        MemprofError: flash_clip refuses the model on several ranks, or the workspace is not positive.
    """
    Workspace.from_mib(workspace_mb)
    kept = _sample_gradients(options["module"], options["data_loader"])
    try:
        prepared = make_private({**options, "grad_sample_mode": "flash_clip"})
    except MemprofError as refusal:
        if spans_ranks(options["module"]):  # maybe only some ranks refused; hooks would misread shards
            raise
        mode, why = _second_choice(options, kept)
        _LOGGER.warning(
            "grad_sample_mode='auto' is %s here: %s; flash_clip does not support the model: %s", mode, why, refusal
        )
        if mode == "ghost":
            register_norm_samplers(workspace_mb, options["module"])
        prepared = make_private({**options, "grad_sample_mode": mode})
    else:
        _LOGGER.info(
            "grad_sample_mode='auto' is flash_clip here: hooks would keep %s of per-sample gradients, of which "
            "flash_clip keeps each layer's or less; ghost would run backward twice",
            _mib(kept),
        )
    if "criterion" in options and len(prepared) == 3:
        prepared = (*prepared[:2], options["criterion"], prepared[2])
    return tuple(prepared)


def _second_choice(options: Mapping[str, Any], kept: int) -> tuple[str, str]:
    """Returns the mode for a model that flash_clip refuses, and the reason for the choice."""
    if kept <= LARGE_BYTES:
        return "hooks", f"its per-sample gradients take only {_mib(kept)}"
    if "criterion" not in options:
        return "hooks", f"its per-sample gradients take {_mib(kept)}, and ghost, which keeps none, needs a criterion"
    if options.get("clipping", "flat") != "flat" or not options.get("batch_first", True):
        return "hooks", f"its per-sample gradients take {_mib(kept)}, but ghost clips flat, with the batch first"
    return "ghost", f"hooks would keep {_mib(kept)} of per-sample gradients"


def _sample_gradients(module: Any, loader: Any) -> int:
    """Returns the size of a batch's per-sample gradients, in bytes."""
    samples = loader.batch_size or -(-len(loader.dataset) // len(loader))
    return int(samples * sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad))


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
