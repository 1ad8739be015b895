# SPDX-License-Identifier: Apache-2.0
"""A session for one test, whose profile contains only the test's own memory, and which affects no later test.

A block from before the test (of earlier tests, wider fixtures or the test's module) is in the event file as a seed. It
counts if the test retags it, as attaching a model does with parameters. Otherwise all of its events are omitted, so
that the replay is the same as in a process in which only this test has run.
"""

import contextlib
import gc
import importlib
import sys
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from opacus.grad_sample import AbstractGradSampleHooks, GradSampleModule

from opacus_memprof.analysis.events import FREE, RETAG, ROW, SEED, Events, Rows
from opacus_memprof.analysis.profile import build_profile
from opacus_memprof.analysis.verdict_view import VerdictView, device_verdict, failure_verdict
from opacus_memprof.errors import MemprofError
from opacus_memprof.hooks.opacus_hooks import observe_make_private
from opacus_memprof.hooks.vocabulary import UNATTRIBUTED
from opacus_memprof.profiles.categories import reported_name
from opacus_memprof.profiles.directory import DEFAULT_MAX_EVENTS, EVENT_BYTES, EVENT_HEADER_BYTES, EVENTS, META
from opacus_memprof.profiles.profile import Device, Profile
from opacus_memprof.recording import live, native, observations
from opacus_memprof.recording.attachment import Attachment
from opacus_memprof.session import Session

BlockKey = tuple[int, int]  # number of the device in the event file, address

# See docs/format.md.
_COUNT, _FIRST_EVENT, _SEEDS = slice(16, 24), slice(96, 104), slice(104, 112)
_SETTLED = 9


class TestEvents:
    """The events so far of a running test.

    Args:
        directory: the directory of the profile.

    Attributes:
        earlier_blocks: blocks from before the test that are still live.
        foreign_blocks: the earlier blocks that the test has not retagged.

    Raises:
        MemprofError: the events cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        rows = _rows_of_seeded_blocks(Events(directory))
        block, kind = rows["block"], rows["kind"]
        retagged = block[kind == RETAG]
        live = rows[(kind == SEED) & ~np.isin(block, block[kind == FREE])]
        self.earlier_blocks = _keys(live)
        self.foreign_blocks = _keys(live[~np.isin(live["block"], retagged)])
        self._excluded: npt.NDArray[np.uint64] = np.unique(rows["event"][~np.isin(block, retagged)])

    def profile(self) -> Profile:
        """Returns the profile of the test's own memory, without a timeline.

        Raises:
            MemprofError: see build_profile.
        """
        if not self._excluded.size:
            return self._build(self._directory)
        header, records = _read_records(self._directory)
        kept = np.delete(records, self._excluded)
        header[_COUNT] = len(kept).to_bytes(8, "little")
        with tempfile.TemporaryDirectory(prefix="memprof_") as folder:
            (Path(folder) / META).write_bytes((self._directory / META).read_bytes())
            (Path(folder) / EVENTS).write_bytes(bytes(header) + kept.tobytes())
            return self._build(folder)

    def _build(self, directory: str | Path) -> Profile:
        shapes = observations.layer_shapes()
        return build_profile(directory, status="running", exit_code=None, timeline_points=1, shapes=shapes)


def _read_records(directory: Path) -> tuple[bytearray, npt.NDArray[np.void]]:
    """Returns the header of the first piece of events, and the records of all pieces without their live sets."""
    pieces = []
    for path in [directory / EVENTS, *directory.glob("events.*.bin")]:
        with open(path, "rb") as file:
            header = bytearray(file.read(EVENT_HEADER_BYTES))
            records = np.fromfile(file, f"V{EVENT_BYTES}")
        first, seeds = (int.from_bytes(header[field], "little") for field in (_FIRST_EVENT, _SEEDS))
        events = records[seeds:]
        events = events[events.view("<u8").reshape(-1, 4)[:, 0] >> 48 & 255 != _SETTLED]
        pieces.append((first, header, events))
    pieces.sort(key=lambda piece: piece[0])
    return pieces[0][1], np.concatenate([events for _, _, events in pieces])


def _rows_of_seeded_blocks(events: Events) -> Rows:
    """Returns the rows of all blocks from before the test, from seed to free."""
    chunks: list[Rows] = [np.empty(0, ROW)]
    seeded: npt.NDArray[np.int64] = np.empty(0, "<i8")

    def keep(rows: Rows) -> None:
        nonlocal seeded
        seeded = np.append(seeded, rows["block"][rows["kind"] == SEED])
        chunks.append(rows[np.isin(rows["block"], seeded)])

    events.for_each_chunk(keep)
    return np.concatenate(chunks)


def _keys(rows: Rows) -> set[BlockKey]:
    return set(zip(rows["device"].tolist(), rows["address"].tolist(), strict=True))


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


def freeze_imported_objects() -> None:
    """Exempts the objects that imports have created from garbage collection.

    Collecting before each test then takes milliseconds, instead of a tenth of a second for torch's objects.
    """
    importlib.import_module("torch._dynamo")  # has a third of them, and is imported when an optimizer is first used
    gc.collect()
    _frozen_tensors.extend(weakref.ref(tensor) for tensor in _tensors(gc.get_objects()))
    gc.freeze()


def unfreeze() -> None:
    """Undoes `freeze_imported_objects`."""
    _frozen_tensors.clear()
    gc.unfreeze()


class CleanSession(Session):
    """The session of one test. It attaches the results of any PrivacyEngine.

    Args:
        directory: the directory of the profile.
        keep: whether to write profile.json at the end.

    Attributes:
        modes: the grad-sample modes of the models that were attached.
    """

    def __init__(self, directory: Path, *, keep: bool) -> None:
        super().__init__(directory, device="auto", max_events=DEFAULT_MAX_EVENTS)
        self._keep = keep
        self.modes: set[str] = set()
        self._engines = Attachment()

    def start(self) -> None:
        """Frees unreachable objects of earlier tests, and starts recording."""
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):  # keep frames of failed tests alive
            if hasattr(sys, name):
                delattr(sys, name)
        empty_caches()
        super().start()
        observe_make_private(self._engines, self._follow)

    def attach(self, *objects: Any) -> None:
        """Attaches objects as `Session.attach` does. PrivacyEngines are attached already."""
        self.modes.update(_mode(target) for target in objects if isinstance(target, AbstractGradSampleHooks))
        super().attach(*objects)

    def devices_so_far(self) -> dict[str, Device]:
        """Returns the devices of profile.json so far, for the test's own memory.

        Raises:
            MemprofError: events were lost.
        """
        if native.events_status()["dropped"]:
            raise MemprofError(f"a profile holds at most {DEFAULT_MAX_EVENTS} events: let the test train fewer steps")
        devices = self._test_events().profile().devices
        for name, peak in live.read_peaks().items():
            if name in devices:
                devices[name].reserved_peak = peak.reserved_peak
        return devices

    def verdicts(self, devices: Mapping[str, Device]) -> list[VerdictView]:
        """Returns what to change: after a failed allocation, or on each device with predictions.

        Args:
            devices: the result of `devices_so_far`.
        """
        if self._forensics is not None and self._forensics.report is not None:
            return [failure_verdict(self._forensics.report)]
        return [device_verdict(name, device) for name, device in devices.items() if device.improvements]

    def breakdown(self) -> dict[str, dict[str, int]]:
        """Returns the live bytes of the test, as `Session.breakdown` does.

        The two categories of captured activations are added up.
        """
        result: dict[str, dict[str, int]] = {}
        for block in _without(self._test_events().foreign_blocks):
            category = reported_name(block["category"])
            sizes = result.setdefault(block["device"], {})
            sizes[category] = sizes.get(category, 0) + block["bytes"]
        return result

    def leaked_blocks(self) -> list[dict[str, Any]]:
        """Returns the live blocks that did not exist when the test began."""
        return _without(self._test_events().earlier_blocks)

    def end(self, status: str, exit_code: int, error: str | None = None) -> None:
        """Closes the session, as `close` does.

        Blocks that are still live become unattributed, so that they count in a later test only if it attaches them.
        """
        self._engines.detach()
        try:
            if self._keep:
                self.close(status, exit_code, error)
            else:
                self.discard()
        finally:
            _make_live_unattributed()

    def _test_events(self) -> TestEvents:
        native.write_meta()
        return TestEvents(self.directory)

    def _follow(self, engines: Attachment, prepared: Any) -> None:
        self.attach(*prepared)


def empty_caches() -> None:
    """Frees memory that only reference cycles and caches keep alive."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # Each test then allocates the workspaces that it needs, and they do not count as leaks.
        with contextlib.suppress(RuntimeError):  # the device is in an error state, which the test itself will report
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()


def _make_live_unattributed() -> None:
    """Retags all live blocks as unattributed, so that they count in a later test only if it attaches them."""
    addresses = {block["address"] for block in native.live_blocks() if block["category"] != "unattributed"}
    if addresses:
        frozen = [tensor for reference in _frozen_tensors if (tensor := reference()) is not None]
        for tensor in [*frozen, *_tensors(gc.get_objects())]:
            with contextlib.suppress(RuntimeError, NotImplementedError):  # tensors without storage
                if tensor.untyped_storage().data_ptr() in addresses:
                    native.retag(tensor, UNATTRIBUTED, 0)


def _tensors(objects: list[Any]) -> list[torch.Tensor]:
    # `type(...)` instead of isinstance: some lazy objects import modules when their __class__ is read.
    return [each for each in objects if issubclass(type(each), torch.Tensor)]


def _without(blocks: set[BlockKey]) -> list[dict[str, Any]]:
    live = native.live_blocks()
    return [block for block in live if (_number(block["device"]), block["address"]) not in blocks]


def _number(device: str) -> int:
    """Returns the number of a device in the event file: 0 is the CPU, 1 + i is cuda:i."""
    return 0 if device == "cpu" else 1 + int(device.removeprefix("cuda:"))


def _mode(module: AbstractGradSampleHooks) -> str:
    name = _MODES.get(type(module).__name__, type(module).__name__)
    if name != "hooks":
        return name
    layers = module.modules() if isinstance(module, torch.nn.Module) else module._module.modules()
    samplers = GradSampleModule.GRAD_SAMPLERS
    functorch = any(type(layer) in samplers and hasattr(layer, "ft_compute_sample_grad") for layer in layers)
    return "functorch" if functorch else "hooks"
