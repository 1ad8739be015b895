# SPDX-License-Identifier: Apache-2.0
"""One test's session: it begins clean, knows what is the test's own, and leaves nothing that reaches the next test."""

import contextlib
import gc
import importlib
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from opacus.grad_sample import AbstractGradSampleHooks, GradSampleModule

from opacus_memprof import _native
from opacus_memprof.directory import DEFAULT_MAX_EVENTS
from opacus_memprof.errors import MemprofError
from opacus_memprof.hooks import Attachment
from opacus_memprof.hooks.privacy_engine import wrap_make_private
from opacus_memprof.hooks.vocabulary import UNATTRIBUTED
from opacus_memprof.profiles.categories import reported_name
from opacus_memprof.pytest_plugin.own_events import Block, OwnEvents
from opacus_memprof.session import Session

_MODES = {
    "GradSampleModule": "hooks",
    "GradSampleHooks": "hooks",
    "GradSampleModuleExpandedWeights": "ew",
    "GradSampleModuleFastGradientClipping": "ghost",
    "GradSampleHooksFastGradientClipping": "ghost",
    "GradSampleModuleFastGradientClippingFSDP": "ghost_fsdp",
    "GradSampleHooksFastGradientClippingFSDP": "ghost_fsdp",
    "GradSampleModuleNoOp": "no_op",
    "GradSampleHooksNoOp": "no_op",
    "GradSampleModuleFlashClip": "flash_clip",
    "FlashClipHooks": "flash_clip",
}
_frozen_tensors: list["weakref.ref[torch.Tensor]"] = []


def freeze_imported() -> None:
    """Takes what importing has made out of the garbage collector's way: collecting before each test then costs
    milliseconds, and not the tenth of a second that torch's own objects need."""
    importlib.import_module("torch._dynamo")  # a third of them: optimizers load it when they are first used
    gc.collect()
    _frozen_tensors.extend(weakref.ref(thing) for thing in _tensors(gc.get_objects()))
    gc.freeze()


def unfreeze() -> None:
    """Undoes `freeze_imported`."""
    _frozen_tensors.clear()
    gc.unfreeze()


class Recording(Session):
    """The session of one test. It follows every PrivacyEngine, and knows the grad-sample modes that it has seen.

    Args:
        directory: the profile's.
        keep: whether somebody will read profile.json.
    """

    def __init__(self, directory: Path, *, keep: bool) -> None:
        super().__init__(directory, device="auto", max_events=DEFAULT_MAX_EVENTS)
        self._keep = keep
        self.modes: set[str] = set()
        self._engines = Attachment()

    def start(self) -> None:
        """Frees what earlier tests have left to be freed, and begins."""
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):  # the frames of a test that failed
            if hasattr(sys, name):
                delattr(sys, name)
        empty_caches()
        super().start()
        wrap_make_private(self._engines, self._follow)

    def attach(self, *objects: Any) -> None:
        """As Session.attach; a PrivacyEngine is followed already."""
        self.modes.update(_mode(thing) for thing in objects if isinstance(thing, AbstractGradSampleHooks))
        super().attach(*objects)

    def figures(self) -> dict[str, Any]:
        """The devices of profile.json so far, for the test's own memory.

        Raises:
            MemprofError: the event file was full, so that the figures would miss what came after.
        """
        if _native.events_status()["dropped"]:
            raise MemprofError(
                f"a profile holds {DEFAULT_MAX_EVENTS} events and the test made more: let it train fewer steps"
            )
        _native.write_meta()
        devices: dict[str, Any] = self._own_events().profile()["devices"]
        return devices

    def breakdown(self) -> dict[str, dict[str, int]]:
        """As Session.breakdown, for the test's own memory; the two categories of captured activations are one."""
        result: dict[str, dict[str, int]] = {}
        for block in _without(self._own_events().foreign):
            category = reported_name(block["category"])
            sizes = result.setdefault(block["device"], {})
            sizes[category] = sizes.get(category, 0) + block["bytes"]
        return result

    def left(self) -> list[dict[str, Any]]:
        """The live blocks that were not there when the test began."""
        return _without(self._own_events().older)

    def end(self, status: str, exit_code: int, error: str | None = None) -> None:
        """Closes the session, as `close`. Blocks that are still alive mean nothing to the next test until it attaches
        them."""
        self._engines.detach()
        try:
            if self._keep:
                self.close(status, exit_code, error)
            else:
                self.discard()
        finally:
            _disown()

    def _own_events(self) -> OwnEvents:
        return OwnEvents(self.directory, _native.events_status()["written"])

    def _follow(self, prepared: Any) -> Attachment:
        self.attach(*prepared)
        return Attachment()  # the session detaches it


def empty_caches() -> None:
    """Frees what only reference cycles and caches keep alive."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # Each test then allocates the workspaces it needs, and none is taken for a leak.
        with contextlib.suppress(RuntimeError):  # a device in a state of error: the test says so by itself
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()


def _disown() -> None:
    """What is alive becomes unattributed: only what a later test attaches will be its own."""
    addresses = {block["address"] for block in _native.live_blocks() if block["category"] != "unattributed"}
    if addresses:
        known = [tensor for reference in _frozen_tensors if (tensor := reference()) is not None]
        for tensor in [*known, *_tensors(gc.get_objects())]:
            with contextlib.suppress(RuntimeError, NotImplementedError):  # tensors without storage
                if tensor.untyped_storage().data_ptr() in addresses:
                    _native.retag(tensor, UNATTRIBUTED, 0)


def _tensors(objects: list[Any]) -> list[torch.Tensor]:
    # By type: some objects import modules when they are asked for their __class__.
    return [thing for thing in objects if issubclass(type(thing), torch.Tensor)]


def _without(blocks: set[Block]) -> list[dict[str, Any]]:
    live = _native.live_blocks()
    return [block for block in live if (_number(block["device"]), block["address"]) not in blocks]


def _number(device: str) -> int:
    """As in the event file: 0 is the CPU, 1 + i is cuda:i."""
    return 0 if device == "cpu" else 1 + int(device.removeprefix("cuda:"))


def _mode(module: AbstractGradSampleHooks) -> str:
    name = _MODES.get(type(module).__name__, type(module).__name__)
    if name != "hooks":
        return name
    layers = module.modules() if isinstance(module, torch.nn.Module) else module._module.modules()
    known = GradSampleModule.GRAD_SAMPLERS
    functorch = any(type(layer) in known and hasattr(layer, "ft_compute_sample_grad") for layer in layers)
    return "functorch" if functorch else "hooks"
