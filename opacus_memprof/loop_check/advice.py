# SPDX-License-Identifier: Apache-2.0
"""Finds modes that clip a model exactly where the script's mode does not."""

import inspect
from typing import Any

from torch import nn

from opacus_memprof.loop_check.records import Call

_MODES = ("flash_clip", "functorch", "ghost", "hooks")


def exact_modes(call: Call, mode: str) -> list[str]:
    """The other modes that clip the inputs of a call exactly.

    Args:
        call: a recorded call.
        mode: the mode of the script.
    """
    from opacus_memprof.clipping import verify

    plain, exact = call.root.plain, []
    assert plain is not None  # it was run
    for other in _MODES:
        try:
            if other != mode and verify(plain, _arguments(plain, call), other).exact:
                exact.append(other)
        except Exception:  # a mode that cannot run this model is not advised
            continue
    return exact


def _arguments(model: nn.Module, call: Call) -> Any:
    """The inputs as `verify` takes them: by position, or all by name."""
    if not call.kwargs:
        return call.args
    signature = inspect.signature(model.forward)
    named: dict[str, Any] = {}
    for name, value in signature.bind(*call.args, **call.kwargs).arguments.items():
        named |= value if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return named
