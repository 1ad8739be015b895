# SPDX-License-Identifier: Apache-2.0
"""Imports the compiled extension `_C`. Every other module imports its names from here.

The extension derives from classes of torch that have no stable ABI. With another version of torch than it was built
for, it could crash at some later allocation. So the versions are compared before it is loaded.

Raises:
    ImportError: the extension is missing, was built for another torch, or cannot be loaded. The message contains the
        command that rebuilds it.
"""

import importlib.util
from pathlib import Path

from opacus_memprof.versions import how_to_build, why_there_is_no_extension, why_torch_does_not_fit

_REMEDY = how_to_build(Path(__file__).resolve().parents[1])

try:
    from opacus_memprof import _build_info
except ImportError:
    raise ImportError(f"{why_there_is_no_extension()}: {_REMEDY}") from None

if _build_info.TORCH_VERSION is None:
    raise ImportError(
        "this opacus-memprof reads profiles and cannot record any, for it was built without torch: install torch, then "
        f"opacus-memprof again with OPACUS_MEMPROF_READER unset ({_REMEDY})"
    )
if importlib.util.find_spec("torch") is None:
    raise ImportError("opacus-memprof records what torch allocates, and torch is not installed: `pip install torch`")

import torch  # noqa: E402  (before the extension, whose undefined symbols torch's libraries resolve)

if _reason := why_torch_does_not_fit(_build_info, torch.__version__, torch.version.cuda, Path(torch.__file__).parent):
    raise ImportError(f"opacus-memprof was {_reason}: {_REMEDY}")

try:
    from opacus_memprof._C import (
        HAS_CUDA,
        CaptureActivations,
        CaptureBackprops,
        ParameterFunction,
        Sampler,
        ScopedForward,
        Tag,
        Tagged,
        capture,
        captures,
        category_id,
        counters,
        cpu_install,
        cpu_installed,
        cpu_limit,
        cpu_reported_bytes,
        cpu_uninstall,
        cuda_allocator,
        cuda_current_name,
        cuda_install,
        cuda_installed,
        cuda_refresh,
        cuda_uninstall,
        end_step,
        events_status,
        failures,
        follow_gradient,
        forget_observed_shapes,
        gradient_hooks_lost,
        live_blocks,
        module_id,
        names,
        op_id,
        owner_of,
        peaks,
        phase_id,
        release,
        remove_owner,
        reset_peaks,
        retag,
        retag_attribute,
        retag_first_state,
        retag_gradients,
        retag_if,
        set_component,
        set_owner,
        set_phase,
        set_program,
        set_second_backward,
        settle,
        settle_all,
        snapshot,
        start_events,
        step,
        stop_events,
        tag_inputs,
        tag_target,
        tensors_in,
        unfollow_gradient,
        write_meta,
    )
except ImportError as error:
    raise ImportError(f"opacus-memprof's extension cannot be loaded ({error}): {_REMEDY}") from error

from opacus_memprof.profiles.categories import NOT_IN_CORE  # noqa: E402

for _name in NOT_IN_CORE:  # so that they exist whichever modules are imported
    category_id(_name)

__all__ = [
    "HAS_CUDA",
    "CaptureActivations",
    "CaptureBackprops",
    "ParameterFunction",
    "Sampler",
    "ScopedForward",
    "Tag",
    "Tagged",
    "capture",
    "captures",
    "category_id",
    "counters",
    "cpu_install",
    "cpu_installed",
    "cpu_limit",
    "cpu_reported_bytes",
    "cpu_uninstall",
    "cuda_allocator",
    "cuda_current_name",
    "cuda_install",
    "cuda_installed",
    "cuda_refresh",
    "cuda_uninstall",
    "end_step",
    "events_status",
    "failures",
    "follow_gradient",
    "forget_observed_shapes",
    "gradient_hooks_lost",
    "live_blocks",
    "module_id",
    "names",
    "op_id",
    "owner_of",
    "peaks",
    "phase_id",
    "release",
    "remove_owner",
    "reset_peaks",
    "retag",
    "retag_attribute",
    "retag_first_state",
    "retag_gradients",
    "retag_if",
    "set_component",
    "set_owner",
    "set_phase",
    "set_program",
    "set_second_backward",
    "settle",
    "settle_all",
    "snapshot",
    "start_events",
    "step",
    "stop_events",
    "tag_inputs",
    "tag_target",
    "tensors_in",
    "unfollow_gradient",
    "write_meta",
]
