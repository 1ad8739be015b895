# SPDX-License-Identifier: Apache-2.0
"""grad_sample_mode="auto": picks the mode for a model and its batch, and says why in one line of the log.

flash_clip comes first. It keeps of each layer the per-sample gradients or less, so it needs no more memory than hooks;
and it runs backward once, so it takes less time than ghost. What flash_clip refuses is left to ghost with norm samplers
that form no T x T matrix where per-sample gradients are large, and else to hooks. Shapes of parameters and the size of
the batch decide; the model is not run.
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
"""Per-sample gradients beyond this cost more than ghost's second backward pass."""

_LOGGER = logging.getLogger("opacus_memprof.clipping")
_LOGGER.setLevel(logging.INFO)  # Opacus leaves the root logger at WARNING


def make_private_automatically(
    make_private: Callable[[dict[str, Any]], Any], options: Mapping[str, Any], workspace_mb: float
) -> tuple[Any, ...]:
    """Makes a model private in the mode that suits it.

    Args:
        make_private: of an engine that knows flash_clip; called with its arguments by name.
        options: these arguments. With a "criterion" among them ghost is a candidate.
        workspace_mb: ceiling, in MiB, on the temporaries of one layer.

    Returns:
        What make_private returns for flash_clip: module, optimizer, data loader; with a criterion among the options,
        always module, optimizer, criterion, data loader.

    Raises:
        MemprofError: flash_clip refuses the model on several ranks, or the workspace is not positive.
    """
    Workspace.from_mib(workspace_mb)
    kept = _sample_gradients(options["module"], options["data_loader"])
    try:
        prepared = make_private({**options, "grad_sample_mode": "flash_clip"})
    except MemprofError as refusal:
        if spans_ranks(options["module"]):  # not all ranks may have refused, and hooks takes shards for wholes
            raise
        mode, why = _second_choice(options, kept)
        _LOGGER.warning("grad_sample_mode='auto' is %s here: %s; flash_clip refuses it: %s", mode, why, refusal)
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
    """Returns the mode for a model that flash_clip refuses, and the reason."""
    if kept <= LARGE_BYTES:
        return "hooks", f"its per-sample gradients take only {_mib(kept)}"
    if "criterion" not in options:
        return "hooks", f"its per-sample gradients take {_mib(kept)}, and ghost, which keeps none, needs a criterion"
    if options.get("clipping", "flat") != "flat" or not options.get("batch_first", True):
        return "hooks", f"its per-sample gradients take {_mib(kept)}, but ghost clips flat, with the batch first"
    return "ghost", f"hooks would keep {_mib(kept)} of per-sample gradients"


def _sample_gradients(module: Any, loader: Any) -> int:
    """Returns the bytes of the per-sample gradients of a batch."""
    samples = loader.batch_size or -(-len(loader.dataset) // len(loader))
    return int(samples * sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad))


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
