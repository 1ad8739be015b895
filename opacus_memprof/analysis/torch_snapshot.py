# SPDX-License-Identifier: Apache-2.0
"""Makes a profile of a file that torch.cuda.memory._dump_snapshot has written.

The trace becomes events.bin, so that every report works. Blocks that the trace does not allocate are seeds. What a
block is for is inferred from its stack, unless its metadata has it from a recording of this package.
"""

import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from opacus_memprof.analysis.profile import build_profile, write_profile
from opacus_memprof.analysis.stacks import IN_AUTOGRAD_THREAD, Frame, Purpose, purposes
from opacus_memprof.analysis.trace_events import ACTIONS, LIVE_STATES, PurposeOf, TraceEvents
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles import core
from opacus_memprof.profiles.directory import EVENTS, META, PROFILE, SNAPSHOTS, ProfileDirectory
from opacus_memprof.profiles.files import write_text, writing
from opacus_memprof.profiles.json_object import to_json
from opacus_memprof.profiles.live_memory import DeviceCount, Snapshot
from opacus_memprof.profiles.profile import Finding
from opacus_memprof.profiles.units import format_bytes, format_count, format_share
from opacus_memprof.versions import VERSION

Array = npt.NDArray[Any]

# The structs of csrc/core/torch_snapshot.h.
_TEXTS = [(name, "<u4") for name in ("stack", "action", "metadata", "device")]
_ENTRY = np.dtype([(name, "<u8") for name in ("address", "size", "stream", "time_us")] + _TEXTS)
_BLOCK = np.dtype(
    [(name, "<u8") for name in ("address", "size", "requested", "stream")]
    + [(name, "<u4") for name in ("stack", "state", "metadata", "device")]
    + [("segment", "<u8")]
)
_SEGMENT = np.dtype(
    [(name, "<u8") for name in ("address", "size", "stream")] + [("device", "<u4"), ("expandable", "<u4")]
)
_FRAME = np.dtype([(name, "<u4") for name in ("name", "file", "line")])
_CALL = np.dtype([("caller", "<u4"), ("frame", "<u4")])

_FRAGMENTED = 0.1  # the part of the reserved memory above which fragments are a finding
_METADATA = re.compile(r"(?:^|.* )category=(\S+)(?: module=(\S+))?")
_SUFFIX = ".memprof"


def profile_of(path: str | Path) -> Path:
    """Returns the directory of the profile in `path`; if that is a snapshot of torch, of the profile made from it.

    That directory is beside the file, `run.memprof` for `run.pickle`. It is made once, and again if the file is newer.

    Raises:
        MemprofError: the file is not a snapshot that can be read, or the directory cannot be written.
    """
    file = Path(path)
    if not file.is_file():
        return file
    directory = file.with_suffix(_SUFFIX)
    summary = directory / PROFILE
    if not summary.is_file() or summary.stat().st_mtime_ns < file.stat().st_mtime_ns:
        claimed = ProfileDirectory(directory)
        try:
            snapshot = TorchSnapshot(file)
            claimed.clear()
            snapshot.write(claimed.path)
        finally:
            claimed.release()
    return directory


class TorchSnapshot:
    """The content of a snapshot.

    Raises:
        MemprofError: the file is not a snapshot that can be read.
    """

    def __init__(self, path: Path) -> None:
        try:
            content = core.read_torch_snapshot(str(path))
        except RuntimeError as error:
            raise MemprofError(
                f"{path} cannot be read as a snapshot of torch ({error}): record it with "
                "torch.cuda.memory._dump_snapshot of torch 2.1 or newer"
            ) from error
        self._path = path
        # Somebody else's texts must not control the terminal on which names are shown.
        self._strings = [text if text.isprintable() else repr(text)[1:-1] for text in content["strings"]]
        self._entries = np.frombuffer(content["entries"], _ENTRY)
        self._blocks = np.frombuffer(content["blocks"], _BLOCK)
        self._segments = np.frombuffer(content["segments"], _SEGMENT)
        self._frames = np.frombuffer(content["frames"], _FRAME)
        self._calls = np.frombuffer(content["calls"], _CALL)
        if len(self._entries) == 0 and len(self._segments) == 0:
            raise MemprofError(f"{path} is the snapshot of a process that used no memory of a GPU")
        traced = [self._text_index(action) for action in ACTIONS]
        if not np.isin(self._entries["action"], traced).any() and len(self._live()) == 0:
            raise MemprofError(
                f"{path} has no allocation, neither live nor in a trace: record it with "
                'torch.cuda.memory._record_memory_history(context="all"), while memory is in use'
            )

    def write(self, directory: Path) -> None:
        """Writes the profile into `directory`. Raises MemprofError if it cannot be written."""
        events = TraceEvents(self._entries, self._live(), self._text_index, self._purpose_of(), self._path.name)
        with writing(directory / EVENTS), open(directory / EVENTS, "wb") as file:
            file.write(events.header())
            events.records.tofile(file)
        write_text(directory / META, json.dumps(self._meta(events)))
        write_text(directory / SNAPSHOTS, to_json(self._end(events)))
        status = "out_of_memory" if events.out_of_memory else "finished"
        profile = build_profile(directory, status=status, exit_code=None, warnings=self._warnings(events))
        for name, device in profile.devices.items():
            number = int(name.partition(":")[2])
            device.peak.reserved_bytes = events.reserved_at(number, device.peak.unix_ns, self._reserved(number))
        profile.findings.extend(self._fragments())
        write_profile(profile, directory)

    def _live(self) -> Array:
        """Returns the live blocks as entries of a trace, with requested sizes."""
        states = [self._text_index(state) for state in LIVE_STATES]
        blocks = self._blocks[np.isin(self._blocks["state"], states)]
        live = np.zeros(len(blocks), _ENTRY)
        for field in ("address", "stream", "stack", "metadata", "device"):
            live[field] = blocks[field]
        live["size"] = blocks["requested"]
        return live

    def _reserved(self, device: int) -> int:
        return int(self._segments["size"][self._segments["device"] == device].sum())

    def _text_index(self, text: str) -> int:
        return self._strings.index(text) if text in self._strings else -1

    @cached_property
    def _has_stacks(self) -> bool:
        return bool(self._entries["stack"].any() or self._blocks["stack"].any())

    def _purpose_of(self) -> PurposeOf:
        strings = self._strings
        frames = [Frame(strings[name], strings[file], line) for name, file, line in self._frames.tolist()]
        inferred = purposes(frames, self._calls["caller"].tolist(), self._calls["frame"].tolist())
        if self._has_stacks:
            inferred[0] = IN_AUTOGRAD_THREAD

        return lambda stack, metadata: self._named(inferred[stack], metadata)

    def _named(self, purpose: Purpose, metadata: int) -> Purpose:
        """Returns the purpose with the category and the module of the metadata, if it has them."""
        found = _METADATA.fullmatch(self._strings[metadata]) if metadata < len(self._strings) else None
        return Purpose(purpose.phase, found[1], found[2] or "", purpose.line, named=True) if found else purpose

    def _meta(self, events: TraceEvents) -> dict[str, Any]:
        return {
            "clock": {"unix_ns": events.end_unix_ns, "unit": "ns"},
            "format": 1,
            "record_bytes": 32,
            "versions": {"opacus_memprof": VERSION, "torch": None, "cuda": None, "opacus": None, "python": None},
            "device": "cuda",
            "command": [str(self._path)],
            "launch": None,
            "pid": 0,
            "names": events.names(),
        }

    def _end(self, events: TraceEvents) -> Snapshot:
        """Returns what the segments say of the instant of the snapshot."""
        live = np.isin(self._blocks["state"], [self._text_index(state) for state in LIVE_STATES])
        devices = {}
        for device in np.unique(self._segments["device"]).tolist():
            blocks = self._blocks[live & (self._blocks["device"] == device)]
            allocated, requested = int(blocks["size"].sum()), int(blocks["requested"].sum())
            reserved, replayed = self._reserved(device), events.end_bytes.get(device, 0)
            devices[f"cuda:{device}"] = DeviceCount(
                requested_bytes=replayed,
                categories={},
                allocated_bytes=allocated,
                reserved_bytes=reserved,
                rounding=allocated - requested,
                cached=reserved - allocated,
                outside_pytorch=None,
                remainder=requested - replayed,
            )
        name, time = self._path.name, events.end_unix_ns
        return Snapshot(index=0, name=name, unix_ns=time, step=0, logical_step=0, devices=devices)

    def _warnings(self, events: TraceEvents) -> list[str]:
        sentences = []
        if self._has_stacks:
            sentences.append(
                "this is a snapshot of torch: categories, phases, steps and modules are inferred from the stacks of "
                "allocations, and allocations without a stack are taken for those of autograd's threads"
            )
        else:
            sentences.append(
                "this is a snapshot of torch without stacks, which tell what memory is for: record it with "
                'torch.cuda.memory._record_memory_history(context="all")'
            )
        if early := events.older_bytes:
            sentences.append(
                f"{format_bytes(early)} were allocated before the trace begins: history was recorded late, or has more "
                "than max_entries entries, and the peak is that of the trace"
            )
        return sentences

    def _fragments(self) -> list[Finding]:
        """Returns a finding for each device whose segments have much free memory that torch cannot give back."""
        findings = []
        live = self._blocks["state"] != self._text_index("inactive")
        for device in np.unique(self._segments["device"]).tolist():
            here = self._segments["device"] == device
            used = np.isin(np.arange(len(self._segments)), self._blocks["segment"][live])
            free = self._blocks["size"][~live & used[self._blocks["segment"]] & (self._blocks["device"] == device)]
            reserved, fragments = int(self._segments["size"][here].sum()), int(free.sum())
            if fragments > _FRAGMENTED * reserved:
                evidence = (
                    f"at the snapshot, {format_bytes(fragments)} of the {format_bytes(reserved)} that torch has "
                    f"reserved on cuda:{device}, {format_share(fragments, reserved)}, are free in "
                    f"{format_count(len(free), 'piece')} of segments with live blocks; the largest piece has "
                    f"{format_bytes(int(free.max()))}"
                )
                remedy = (
                    "try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; to see what it reserves: opacus-memprof "
                    f"replay {self._path.name} --gpu KIND --settings expandable_segments:True"
                )
                finding = Finding("fragmentation", "", fragments, evidence, remedy, device=f"cuda:{device}")
                findings.append(finding)
        return findings
