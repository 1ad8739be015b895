# SPDX-License-Identifier: Apache-2.0
"""The structure of profile.json, the summary that every report reads, and of meta.json.

meta.json has the names of the ids in events.bin, and the origin of the profile.

Sizes are bytes; `unix_ns` are nanoseconds since 1970, `time_ns` since recording began; steps count from 0. `step` is a
physical one (a call of optimizer.step), `logical_step` one of the privacy accountant. `event` is the number of a record
in events.bin; None if there is no record of this instant. `categories` are bytes by category of reports.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from opacus_memprof.profiles.json_object import FORMAT, JsonObject, read_json_object
from opacus_memprof.profiles.launch import Launch
from opacus_memprof.profiles.units import format_bytes

Sizes = dict[str, int]  # bytes by category
PROOF = "proof"  # the phase of the parts of a step in which flash_clip proves its rules
PROOF_OP = "flash_clip_proof"  # the op of events in it
Groups = dict[str, Sizes]  # sizes by module, phase, op …


class HookedActivations(JsonObject):
    """The two parts of the category activation_hooks.

    Attributes:
        shared_with_autograd: bytes of captured layer inputs that autograd holds as well.
        opacus_only: bytes of captured layer inputs that only Opacus holds.
    """

    shared_with_autograd: int
    opacus_only: int


class Block(JsonObject):
    """A live block: its category and module, and the op, step and phase of its birth."""

    bytes: int
    category: str
    module: str
    op: str
    step: int
    phase: str


class Peak(JsonObject, kw_only=True):
    """The first instant of a device's highest requested bytes.

    Attributes:
        requested_bytes: the sum of `categories`.
        counted_bytes: requested bytes in the allocator's own count; None if it does not count them.
        allocated_bytes, reserved_bytes: the allocator's own counts at that instant, or None. It may have reserved more
            at another one: see Device.reserved_peak.
        rounding: allocated_bytes minus requested_bytes, or None.
        cached: reserved_bytes minus allocated_bytes, or None.
        source: "events", or "counters" if the event files lack the peak: then it has no modules, and has
            forward_undecided.
        categories: every built-in category, and the program's own categories that have bytes.
        remainder_bytes: requested_bytes minus the sum of `categories`: 0, or a defect of the profiler.
        activation_hooks: the two parts of that category.
        shared_captures: each module's share of activation_hooks.shared_with_autograd.
        modules: bytes by module and category; "" means no module.
        born_in, ops, streams, threads: bytes by category, by the phase, op, stream and thread of a block's birth.
        lines: bytes by category, by the lines of the user's own code that made a block: at most three, "train.py:41 in
            update < train.py:60 in main". Only of blocks of 1 MiB or more, and of smaller ones that were not claimed.
        largest_blocks: at most 50. `newest_blocks`: at most 10, the newest first.
        components: bytes by component (attention, mlp …) and category.
        module_tree: bytes of each module and all modules inside it; "" is the whole.
    """

    requested_bytes: int
    counted_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    rounding: int | None = None
    cached: int | None = None
    source: str
    event: int | None
    unix_ns: int
    step: int
    logical_step: int | None
    phase: str
    categories: Sizes
    remainder_bytes: int
    activation_hooks: HookedActivations
    shared_captures: Sizes = {}
    modules: Groups
    born_in: Groups
    ops: Groups
    lines: Groups = {}
    streams: Groups
    threads: Groups
    largest_blocks: list[Block]
    newest_blocks: list[Block]
    components: Groups
    module_tree: Sizes


class ReservedPeak(JsonObject):
    """The most bytes that the allocator has reserved from a device, and the physical step and the phase of it.

    A run needs so much memory; at its peak of requested bytes, the allocator may have reserved less.
    """

    bytes: int
    step: int
    phase: str


class PhasePeak(JsonObject):
    """The peak within a phase."""

    peak_bytes: int
    event: int
    unix_ns: int
    step: int
    logical_step: int
    categories: Sizes


class StepPeak(JsonObject):
    """The peak of a physical step, the live bytes at its end, and whether it is complete."""

    peak_bytes: int
    end_bytes: int
    complete: bool
    event: int
    unix_ns: int
    step: int
    logical_step: int
    phase: str
    categories: Sizes


class DeviceSnapshot(JsonObject):
    """One device at a call of session.snapshot.

    Attributes:
        allocated_bytes, reserved_bytes, rounding, cached, outside_pytorch, remainder: as counted by a snapshot (see
            DeviceCount); absent if snapshots.jsonl lacks it.
    """

    index: int
    name: str
    requested_bytes: int
    event: int | None
    unix_ns: int
    step: int
    logical_step: int
    phase: str | None
    categories: Sizes
    allocated_bytes: int | UnsetType | None = UNSET
    reserved_bytes: int | UnsetType | None = UNSET
    rounding: int | UnsetType | None = UNSET
    cached: int | UnsetType | None = UNSET
    outside_pytorch: int | UnsetType | None = UNSET
    remainder: int | UnsetType | None = UNSET


class FailedAllocation(JsonObject):
    """A failed allocation of requested_bytes for `category`, `module` and `op`, and the live bytes at that instant."""

    requested_bytes: int
    live_bytes: int
    category: str
    module: str
    op: str
    event: int
    unix_ns: int
    step: int
    logical_step: int
    phase: str
    categories: Sizes


class Timeline(JsonObject):
    """Columns of equal length. A row has the peak of consecutive events; one row has the peak of the whole run."""

    event: list[int]
    time_ns: list[int]
    step: list[int]
    logical_step: list[int]
    bytes: list[int]
    phase: list[str]
    categories: dict[str, list[int]]

    def thinned(self, group_size: int) -> "Timeline":
        """Returns a timeline with the highest row of each `group_size` rows, which still include the peak."""
        sizes = self.bytes
        groups = (range(first, min(first + group_size, len(sizes))) for first in range(0, len(sizes), group_size))
        kept = [max(rows, key=sizes.__getitem__) for rows in groups]
        columns = {name: [column[row] for row in kept] for name, column in self.items() if name != "categories"}
        categories = {name: [column[row] for row in kept] for name, column in self.categories.items()}
        return Timeline(**columns, categories=categories)


class Improvement(JsonObject):
    """A change of the program that lowers a device's peak, without other results or another batch.

    Attributes:
        title: the change, for people. `code`: the same as code. `computed`: how the prediction was computed.
        predicted_peak_bytes: the peak with the change.
        needs_edit: whether the program must be edited for it.
    """

    title: str
    code: str
    predicted_peak_bytes: int
    computed: str
    needs_edit: bool


class Device(JsonObject):
    """One device.

    Attributes:
        phases: peaks by phase.
        steps: at most 600, in order; `steps_left_out` counts the others.
        out_of_memory: allocations that failed.
        end_bytes: live bytes at the end.
        reserved_peak: the most reserved bytes of the whole run; None if the allocator does not count them, or if
            an older version has written the profile.
        improvements: the lowest predicted peak first; empty if no training was followed, absent if its shapes are not
            known, as of a run that was killed.
    """

    peak: Peak
    phases: dict[str, PhasePeak]
    steps: list[StepPeak]
    steps_left_out: int
    snapshots: list[DeviceSnapshot]
    out_of_memory: list[FailedAllocation]
    timeline: Timeline
    end_bytes: int
    reserved_peak: ReservedPeak | None = None
    improvements: list[Improvement] | UnsetType = UNSET


class GrowthSite(JsonObject):
    """A place where growing memory is allocated: `blocks` blocks by `steps` steps, `bytes` in total."""

    module: str
    phase: str
    op: str
    bytes: int
    blocks: int
    steps: int


class Finding(JsonObject):
    """A defect of the run.

    Attributes:
        module: the innermost module that contains the defect; "" is the model, or no module.
        bytes: memory that it costs.
        evidence: a sentence on what was observed. `remedy`: how to fix it.
        device: the device on which it costs memory. `category`: of growing memory.
        modules: bytes by module. `captures`: captures by module. `sites`: of growing memory.
        gradient_bytes: gradients that ghost avoids. `parameter_bytes`, `shard_bytes`: of the largest parameter.
        ranks: in a job's summary, the ranks with this finding.
        severity: of the toolkit's findings.
    """

    kind: str
    module: str
    bytes: int
    evidence: str
    remedy: str
    device: str | UnsetType = UNSET
    category: str | UnsetType = UNSET
    captures: dict[str, int] | UnsetType = UNSET
    modules: Sizes | UnsetType = UNSET
    sites: list[GrowthSite] | UnsetType = UNSET
    gradient_bytes: int | UnsetType = UNSET
    parameter_bytes: int | UnsetType = UNSET
    shard_bytes: int | UnsetType = UNSET
    ranks: list[int] | UnsetType = UNSET
    severity: Literal["warning", "error"] | UnsetType = UNSET


class EventGap(JsonObject):
    """Events that are in no file: removed because the run exceeded the bound, or lost.

    Attributes:
        first_event: number of events before the gap. `events`: number of missing events.
        time_ns: time of the last event before the gap, since recording began. `end_ns`: time of the gap's end.
        step: physical steps that ended before the gap. `end_step`: steps that ended before its end, as far as known.
    """

    first_event: int
    events: int
    time_ns: int
    end_ns: int
    step: int
    end_step: int


class EventCounts(JsonObject):
    """Counts of events.

    Attributes:
        recorded: events in the event files. `dropped`: events that are missing there, the sum of `gaps`.
        capacity: the most records that the files may hold.
        closed: whether recording ended properly.
        contradictions: contradictory events by kind; 0 in an intact file.
    """

    recorded: int
    dropped: int
    capacity: int
    closed: bool
    contradictions: dict[str, int]
    gaps: list[EventGap] = []


class UnknownUse(JsonObject):
    """An operation that needed a value that a virtual GPU does not compute, with its line.

    It happened `count` times at `line` ("file:line"; "" if no line of the program called it).
    """

    operation: str
    line: str
    count: int


class EstimatedWorkspaces(JsonObject):
    """Convolutions of a virtual GPU whose workspace in cuDNN was estimated, because it was not measured on a GPU.

    Attributes:
        convolutions: their number, of each direction and size.
        largest_bytes: the largest of these workspaces.
    """

    convolutions: int
    largest_bytes: int


class VirtualGpus(JsonObject):
    """The virtual GPUs of a run, and the values that they did not compute.

    meta.json, and the profile of a killed run, have the first four fields only.

    Attributes:
        gpu: the kind, such as h200. `name`: torch's name. `memory_bytes`: memory of each. `devices`: their number.
        unknown_reads: values that the host read and that were not computed. `assumed_shapes`: shapes set to a bound.
        not_computed: by operation, how often the CPU could not execute it.
        default_answers: by symbol, calls that returned success and did nothing.
        estimated_workspaces: convolutions whose workspace was estimated.
        proofs_left_out: whether flash_clip's proofs were left out, whose memory a real GPU would need in first steps.
    """

    gpu: str
    name: str
    memory_bytes: int
    devices: int
    unknown_reads: list[UnknownUse] | UnsetType = UNSET
    assumed_shapes: list[UnknownUse] | UnsetType = UNSET
    not_computed: dict[str, int] | UnsetType = UNSET
    default_answers: dict[str, int] | UnsetType = UNSET
    estimated_workspaces: EstimatedWorkspaces | UnsetType = UNSET
    proofs_left_out: bool | UnsetType = UNSET


Virtual = VirtualGpus | UnsetType  # UNSET for a run on real devices


def virtual_gpu_of(virtual: Virtual) -> str | None:
    """Returns the virtual GPU of a run, as `virtual NVIDIA H200 (139.80 GiB)`; None for a run on real devices."""
    return None if virtual is UNSET else f"virtual {virtual.name} ({format_bytes(virtual.memory_bytes)})"


def virtual_mark(virtual: Virtual) -> str | None:
    """Returns the first sentence of every report of a run on virtual GPUs; None for a run on real devices."""
    if virtual is UNSET:
        return None
    name, limits = virtual_gpu_of(virtual), "".join(_limits_of(virtual)).removeprefix("; ")
    if not limits:
        return f"on a {name}: memory is counted as on a real one, and values of large tensors were not computed"
    return f"on a {name}: memory is counted as on a real one ({limits}), and values of large tensors were not computed"


_LIBRARY_WITHOUT_WORKSPACE = re.compile(r"(cufft)\w*MakePlan\w*|(cusolver|cusparse)\w*_bufferSize\w*")
_LIBRARIES = {"cufft": "cuFFT", "cusolver": "cuSOLVER", "cusparse": "cuSPARSE"}


def _limits_of(virtual: VirtualGpus) -> Iterator[str]:
    """Yields what is not counted, or not exactly, in words."""
    estimated = virtual.estimated_workspaces
    if estimated is not UNSET and estimated.convolutions:
        size = format_bytes(estimated.largest_bytes)
        yield f"; estimated workspaces of convolutions: {estimated.convolutions}, at most {size}"
    answers = {} if virtual.default_answers is UNSET else virtual.default_answers
    found = filter(None, map(_LIBRARY_WITHOUT_WORKSPACE.fullmatch, answers))
    if libraries := sorted({_LIBRARIES[each[1] or each[2]] for each in found}):
        yield f"; without workspaces of {', '.join(libraries)}"
    if virtual.proofs_left_out is not UNSET and virtual.proofs_left_out:
        yield "; without the proofs of flash_clip, which may make the peak of first steps higher"


class Profile(JsonObject, kw_only=True):
    """The content of profile.json.

    Attributes:
        format: 1.
        versions: by package; None if a package is not installed.
        virtual: the virtual GPUs of the run; absent for real ones.
        status: "finished", "failed", "out_of_memory", "killed" or "running".
        exit_code: exit code of the program; None if it is unknown.
        error: a line with the reason why the program ended, or None.
        command: the program's sys.argv.
        launch: the rank of the process; None for a single process.
        devices: by name, as "cuda:0".
        components: the user's own rules, regular expression → component.
        warnings: sentences about the limits of the profile.
    """

    format: Literal[1] = FORMAT
    versions: dict[str, str | None]
    virtual: VirtualGpus | UnsetType = UNSET
    status: str
    exit_code: int | None = None
    error: str | None = None
    command: list[str] = []
    launch: Launch | None = None
    pid: int
    started_unix_ns: int
    ended_unix_ns: int
    events: EventCounts
    devices: dict[str, Device]
    components: dict[str, str] = {}
    findings: list[Finding]
    warnings: list[str]


def by_innermost_line(lines: Groups) -> Groups:
    """Adds up sizes by the innermost of the lines that made a block, "train.py:41 in update"."""
    result: Groups = {}
    for stack, sizes in lines.items():
        total = result.setdefault(stack.split(" < ")[0], {})
        for category, size in sizes.items():
            total[category] = total.get(category, 0) + size
    return result


class NameLists(JsonObject):
    """The names of the ids. A name's id is its index in the list of its kind.

    Attributes:
        components: the component of each module, such as "attention", as hooks recognised it; "" if they did not.
        lines: for each op that stands for lines of the user's own code, the innermost: "train.py:41 in update"; "" for
            others.
    """

    categories: list[str] = []
    phases: list[str] = []
    modules: list[str] = []
    components: list[str] = []
    ops: list[str] = []
    lines: list[str] = []
    threads: list[str] = []
    streams: list[str] = []
    devices: list[str] = []


class Meta(JsonObject):
    """The fields of meta.json that readers need; those of profile.json with the same names have the same meaning.

    Attributes:
        names: names of the ids in events.bin; those of a killed process may lack the ids of its last events.
        reserved_peaks: by device, as of the time when the file was written.
    """

    format: Literal[1] = FORMAT
    versions: dict[str, str | None] = {}
    virtual: VirtualGpus | UnsetType = UNSET
    command: list[str] = []
    launch: Launch | None = None
    names: NameLists = msgspec.field(default_factory=NameLists)
    reserved_peaks: dict[str, ReservedPeak] = {}


def read_meta(path: Path) -> Meta:
    """Reads meta.json, or returns an empty one without the file. Raises MemprofError if it cannot be read."""
    return read_json_object(path, Meta, "remove it, or profile again") if path.exists() else Meta()
