# SPDX-License-Identifier: Apache-2.0
"""Writes a trace for ui.perfetto.dev: counters by category, slices for steps and phases, and instants."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from opacus_memprof.analysis.events import ALLOC, FREE, OOM, PHASE, ROW, STEP, Events, Rows
from opacus_memprof.analysis.profile_view import ProfileView
from opacus_memprof.errors import require
from opacus_memprof.profiles.categories import stack_order
from opacus_memprof.profiles.files import replacing
from opacus_memprof.profiles.profile import Timeline
from opacus_memprof.profiles.units import format_bytes

TIMELINE_ROWS = 20_000  # of a device; the peak is always among them
MAX_SLICES = 50_000  # of steps, and of phases; the longest are kept
# Kinds of events whose phase is the thread's: a seed has the phase of its birth, and a retag ignores backward.
_PHASE_KINDS = (ALLOC, FREE, PHASE, STEP, OOM)
_SEQUENCE = 1
_PROCESS = 1  # uuids of tracks count from here


def write_perfetto(view: ProfileView, path: str | os.PathLike[str]) -> None:
    """Writes a Perfetto trace (protobuf) and replaces `path` atomically. Times are nanoseconds since recording started.

    Each device has a counter of its requested bytes and one for each category, exact at up to TIMELINE_ROWS instants,
    which are chosen as in profile.json's timeline; each value holds until the next. There is a track of steps, and one
    of phases for each thread. Instants are allocations that failed, snapshots, the peaks, and, at the first device's
    peak, the findings.

    Raises:
        MemprofError: perfetto is not installed, events.bin is not readable, or `path` cannot be written.
    """
    proto = require("perfetto.protos.perfetto.trace.perfetto_trace_pb2", "Perfetto traces")
    trace = _Trace(proto, view)
    with replacing(path) as temporary, open(temporary, "wb") as file:
        for packet in trace.packets():
            # A trace is the concatenation of traces: writing one packet at a time never holds the whole.
            file.write(proto.Trace(packet=[packet]).SerializeToString())


class _Trace:
    def __init__(self, proto: Any, view: ProfileView) -> None:
        self._proto = proto
        self._view, self._profile = view, view.profile
        self._uuid = _PROCESS

    def packets(self) -> Iterator[Any]:
        yield self._process()
        instants = self._track("memory events")
        yield instants
        yield from self._instants(instants.track_descriptor.uuid)
        gaps = self._profile.events.gaps
        begins, ends = [gap.time_ns for gap in gaps], [gap.end_ns for gap in gaps]
        yield from self._row_of_slices("gaps", begins, ends, [f"{gap.events} events are missing" for gap in gaps])
        yield from self._slices(self._view.events())
        for device, timeline in self._view.timelines(TIMELINE_ROWS).items():
            yield from self._counters(device, timeline)

    def _packet(self, time_ns: int = 0) -> Any:
        return self._proto.TracePacket(timestamp=time_ns, trusted_packet_sequence_id=_SEQUENCE)

    def _process(self) -> Any:
        packet = self._packet()
        # Readers require this flag on the first packet, although the trace has no incremental state.
        packet.sequence_flags = self._proto.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        packet.track_descriptor.uuid = _PROCESS
        packet.track_descriptor.process.pid = self._profile.pid
        name = " ".join(self._profile.command) or "training"
        virtual = self._view.virtual_gpu
        packet.track_descriptor.process.process_name = name if virtual is None else f"{name}, on a {virtual}"
        return packet

    def _track(self, name: str, parent: int = _PROCESS) -> Any:
        """Returns the description of a new track, with the next uuid."""
        self._uuid += 1
        packet = self._packet()
        packet.track_descriptor.uuid = self._uuid
        packet.track_descriptor.parent_uuid = parent
        packet.track_descriptor.name = name
        return packet

    def _event(
        self, kind: str, track: int, time_ns: int, name: str = "", notes: Mapping[str, Any] | None = None
    ) -> Any:
        # A time before the start comes from a system clock that was set back.
        packet = self._packet(max(time_ns, 0))
        event = packet.track_event
        event.type = getattr(event, f"TYPE_{kind}")
        event.track_uuid = track
        if name:
            event.name = name
            event.categories.append("memory")
        for key, value in (notes or {}).items():
            annotation = event.debug_annotations.add(name=key)
            if isinstance(value, int):
                annotation.int_value = value
            else:
                annotation.string_value = str(value)
        return packet

    def _counters(self, device: str, timeline: Timeline) -> Iterator[Any]:
        group = self._track(f"{device} requested bytes")
        group.track_descriptor.child_ordering = self._proto.TrackDescriptor.EXPLICIT
        yield group
        columns = {"total": timeline.bytes}
        columns |= {category: timeline.categories[category] for category in stack_order(timeline.categories)}
        for rank, (name, column) in enumerate(columns.items()):
            track = self._track(name, parent=group.track_descriptor.uuid)
            track.track_descriptor.sibling_order_rank = rank
            track.track_descriptor.counter.unit = self._proto.CounterDescriptor.UNIT_SIZE_BYTES
            yield track
            before = None
            for time, size in zip(timeline.time_ns, column, strict=True):
                if size != before:
                    packet = self._event("COUNTER", track.track_descriptor.uuid, time)
                    packet.track_event.counter_value = size
                    yield packet
                    before = size

    def _slices(self, events: Events) -> Iterator[Any]:
        """Yields the tracks of steps, which end at their events, and of each thread's phases, from its events."""
        ends: list[Rows] = []
        phase_changes: dict[int, list[Rows]] = {}

        def collect(rows: Rows) -> None:
            ends.append(rows[rows["kind"] == STEP])
            phased = rows[np.isin(rows["kind"], _PHASE_KINDS)]
            for thread in np.unique(phased["thread"]).tolist():
                phase_changes.setdefault(thread, []).append(_changes(phased[phased["thread"] == thread]))

        events.for_each_chunk(collect)
        steps = np.concatenate(ends or [np.empty(0, ROW)])
        starts = self._after_gaps(np.concatenate([[0], steps["time_ns"]])[:-1], steps["time_ns"])
        labels = [f"step {number - 1}" for number in steps["step"].tolist()]
        yield from self._row_of_slices("steps", starts, steps["time_ns"], labels)
        end = self._profile.ended_unix_ns - self._profile.started_unix_ns
        for thread, pieces in sorted(phase_changes.items()):
            rows = _changes(np.concatenate(pieces))
            until = self._before_gaps(
                rows["time_ns"], np.append(rows["time_ns"][1:], max(end, int(rows["time_ns"][-1])))
            )
            busy = rows["phase"] != 0  # nothing is drawn for idle time
            labels = [events.names.phase(phase) for phase in rows["phase"][busy].tolist()]
            name = f"{events.names.thread(thread)}: phases"
            yield from self._row_of_slices(name, rows["time_ns"][busy], until[busy], labels)

    def _after_gaps(self, starts: Any, ends: Any) -> Any:
        """Returns the starts of slices. A slice that began in a gap or before it begins at the gap's end."""
        for gap in self._profile.events.gaps:
            starts = np.where((starts <= gap.time_ns) & (ends >= gap.end_ns), gap.end_ns, starts)
        return starts

    def _before_gaps(self, starts: Any, ends: Any) -> Any:
        """Returns the ends of slices. A slice that continues in a gap ends where the gap begins."""
        for gap in self._profile.events.gaps:
            ends = np.where((starts <= gap.time_ns) & (ends > gap.time_ns), gap.time_ns, ends)
        return ends

    def _row_of_slices(self, name: str, starts: Any, ends: Any, names: list[str]) -> Iterator[Any]:
        if not names:
            return
        track = self._track(name)
        yield track
        uuid = track.track_descriptor.uuid
        longest = np.sort(np.argsort(np.subtract(starts, ends), kind="stable")[:MAX_SLICES])
        for index in longest.tolist():
            yield self._event("SLICE_BEGIN", uuid, int(starts[index]), names[index])
            yield self._event("SLICE_END", uuid, int(ends[index]))

    def _instants(self, track: int) -> Iterator[Any]:
        start = self._profile.started_unix_ns
        peak_time = 0
        for name, device in reversed(self._profile.devices.items()):
            peak = device.peak
            peak_time = peak.unix_ns - start
            notes = {"requested_bytes": peak.requested_bytes, "phase": peak.phase, "step": peak.step}
            yield self._event("INSTANT", track, peak_time, f"{name}: peak, {format_bytes(peak.requested_bytes)}", notes)
            for failure in device.out_of_memory:
                title = f"{name}: out of memory, {format_bytes(failure.requested_bytes)}"
                keys = ("requested_bytes", "live_bytes", "category", "module", "op", "phase", "step")
                notes = {key: failure[key] for key in keys}
                yield self._event("INSTANT", track, failure.unix_ns - start, title, notes)
            for snapshot in device.snapshots:
                notes = {"requested_bytes": snapshot.requested_bytes, "step": snapshot.step}
                title = f"{name}: snapshot {snapshot.name}"
                yield self._event("INSTANT", track, snapshot.unix_ns - start, title, notes)
        for finding in self._profile.findings:
            notes = {key: finding[key] for key in ("module", "bytes", "evidence", "remedy")}
            yield self._event("INSTANT", track, peak_time, f"finding: {finding.kind.replace('_', ' ')}", notes)


def _changes(rows: Rows) -> Rows:
    """Returns the rows of a thread whose phase differs from that of the previous row."""
    changes = np.ones(len(rows), np.bool_)
    changes[1:] = rows["phase"][1:] != rows["phase"][:-1]
    changed: Rows = rows[changes]
    return changed
