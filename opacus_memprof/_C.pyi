"""Types of the compiled extension. Only opacus_memprof.recording.native imports it."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

HAS_CUDA: bool  # built with CUDA's allocator

# --- names: a name's id is its index in the list of its kind; registering it again gives the same id ---
def category_id(name: str) -> int: ...  # built-in names are known; others are added (at most 64 in all)
def module_id(name: str) -> int: ...  # 0 is "" (no module)
def op_id(name: str) -> int: ...  # 0 is "" (no op)
def phase_id(name: str) -> int: ...  # raises ValueError for an unknown phase
def set_component(module: int, component: str) -> None: ...  # the component of a module, for reports; "" for unknown
def set_program(libraries: Sequence[str], folders: Sequence[str]) -> None:
    """Sets which beginnings of paths are not the user's own code, and which folders to leave out of its paths."""

def names() -> dict[
    str, list[str]
]: ...  # categories, phases, modules, components, ops, lines, threads, streams, devices

# --- tags: what this thread is doing; every allocation copies the innermost one ---
class Tag:
    """The purpose of allocations. Immutable; omitted fields are inherited from the enclosing tag. Reusable."""

    def __init__(
        self,
        category: int | None = None,
        phase: int | None = None,
        module: int | None = None,
        op: int | None = None,
    ) -> None: ...
    def __enter__(self) -> Tag: ...
    def __exit__(self, *exc: object) -> None: ...
    def __call__(self, function: Callable[..., Any], module_of: str | None = None) -> Tagged: ...

class Tagged:
    """A callable that runs the wrapped callable under a tag.

    With `module_of`, the tag gets the module of the block under that argument. Picklable, deep-copyable, binds like a
    function (also on a class), and forwards __name__, __doc__ and attribute look-ups to the wrapped callable.
    """

    __wrapped__: Callable[..., Any]
    tag: Tag
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

class ScopedForward:
    """Replaces a module's `forward` in its __dict__: runs it under the module's tag, in the phase forward.

    Records autograd's sequence numbers, so that the module's backward nodes are known. Does not keep the module alive.
    `function` is the class' own, bound on each call (`bind`), or a callable that is called as it is. Copies and pickles
    are plain.
    """

    __wrapped__: Callable[..., Any]
    bound_by_class: bool
    def __init__(
        self, function: Callable[..., Any], module: weakref.ref[torch.nn.Module], module_id: int, bind: bool
    ) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

class CaptureActivations:
    """Wraps Opacus' forward hook: captures the tensors that it appends to `module.activations`, for `module_id`.

    `on_repeat(module_id, in_backward, refused)` is called when this happens inside a backward pass, and when the hook
    refuses it with NotImplementedError. Copies are copies of the wrapped hook.
    """

    __wrapped__: Callable[..., Any]
    def __init__(
        self, wrapped: Callable[..., Any], module_id: int, on_repeat: Callable[[int, bool, bool], object]
    ) -> None: ...
    def __call__(self, module: torch.nn.Module, inputs: Any, output: Any) -> Any: ...

class CaptureBackprops:
    """Wraps Opacus' full backward hook.

    Settles the module's captures, runs the hook under `before` until its sampler has returned and under `after` from
    then on, and releases the newest capture if the hook has used it. Copies are copies of the wrapped hook.
    """

    __wrapped__: Callable[..., Any]
    def __init__(self, wrapped: Callable[..., Any], module_id: int, before: Tag, after: Tag) -> None: ...
    def __call__(self, module: torch.nn.Module, grad_input: Any, grad_output: Any) -> Any: ...

class Sampler:
    """Runs a sampler `f(layer, activations, backprops) -> {parameter: result}` under `tag`.

    Results that were allocated as temp_matrices become `category`. Then `observe(layer, backprops, results)` is called,
    unless it is None or has seen this layer with backprops of this shape (last, and since `forget_observed_shapes`).
    """

    __wrapped__: Callable[..., Any]
    def __init__(
        self, wrapped: Callable[..., Any], tag: Tag, category: int, observe: Callable[..., object] | None
    ) -> None: ...
    def __call__(self, layer: Any, activations: Any, backprops: Any) -> Any: ...

def forget_observed_shapes() -> None: ...

class ParameterFunction:
    """Runs a function under `tag` that sets an attribute of a parameter.

    The attribute's block becomes `category` of the parameter's module. The parameter is the first argument, or that
    argument's attribute `via` if it has one.
    """

    __wrapped__: Callable[..., Any]
    def __init__(self, wrapped: Callable[..., Any], tag: Tag, sets: str, category: int, via: str | None) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

def set_phase(phase: int) -> int: ...  # of this thread; returns the previous one. Writes a phase event.
def set_second_backward(on: bool) -> None: ...  # for every thread: backward is ghost's second pass
def end_step(logical: bool) -> None: ...  # physical step += 1; logical += 1 if requested
def step() -> tuple[int, int]: ...  # (physical, logical)

# --- blocks: found by the address of a tensor's storage ---
def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in nested sequences and mappings. All functions below find tensors in this way."""

def retag(tensors: Any, category: int, module: int | None = None) -> int:
    """Gives the live blocks under the tensors another category (and module); returns the bytes that changed.

    Tensors whose block is unknown are skipped. A block that existed before the profiler is added to the ledger, so that
    its free is recorded.
    """

def retag_if(tensors: Any, expected: Sequence[int], category: int, module: int | None = None) -> int:
    """Does what `retag` does, for blocks whose category is one of `expected`."""

def tag_inputs(batch: Any) -> tuple[int, int]:
    """Tags tensors as inputs if they were not computed from parameters and their blocks have no other category.

    Returns the first dimension of the first one that has dimensions (-1 if none has), and the elements of all.
    """

def tag_target(target: object) -> None:
    """Tags the target of a loss as inputs.

    Skips tensors that were computed from parameters, or were made in forward and are held by autograd too, and
    everything that is not a plain tensor.
    """

def capture(module: int, tensors: Any) -> None:
    """Records that Opacus captured these tensors for `module`.

    Blocks that were allocated in forward, or recomputed in backward, become activation_hooks_*; captures nest.
    """

def release(module: int) -> None:
    """Records that Opacus dropped the module's newest capture. Blocks without others get their category back."""

def settle(module: int) -> None:
    """Finds out for each captured block of the module who else holds its storage.

    Chooses between activation_hooks_shared and activation_hooks_opacus_only by the storage's use count.
    """

def settle_all(outputs: Any) -> None:
    """Does what `settle` does, for all modules.

    `outputs` are the tensors that a forward is about to return; references that only the program holds do not count.
    """

def captures() -> dict[int, int]: ...  # module id -> captures outstanding

# --- the module of a parameter, by the parameter's id(): nothing is kept alive ---
def set_owner(parameter: torch.Tensor, module: int) -> None: ...
def remove_owner(id: int) -> None: ...
def owner_of(parameter: object) -> int: ...  # 0 if it is unknown
def follow_gradient(parameter: torch.Tensor, module: int) -> None:
    """Gives the block of `parameter.grad` the category `gradients` each time that autograd has accumulated into it."""

def unfollow_gradient(parameter: torch.Tensor) -> None: ...
def gradient_hooks_lost() -> int:
    """Returns the number of gradients that are not followed any more.

    Either their tensor is gone, or the first hook that Python registered there has replaced the profiler's hook.
    """

def retag_first_state(states: dict[Any, Any], category: int) -> int:
    """Does what `retag` does, for an optimizer's `state` of its first parameter, with the parameter's owner."""

def retag_attribute(parameters: Any, name: str, category: int) -> int:
    """Does what `retag` does, for the tensor that each parameter has in its own __dict__ under this name.

    The module is the parameter's owner. Parameters without such a tensor are skipped.
    """

def retag_gradients(parameters: Any, category: int) -> int: ...  # the same for .grad

# --- counters ---
def snapshot(name: str) -> dict[str, Any]:
    """Takes a snapshot: {"index", "name", "unix_ns", "step", "logical_step", "devices"}.

    "devices" is {"cuda:0": {"requested_bytes": int, "categories": {name: bytes}}}. Consistent across threads; writes a
    snapshot event.
    """

def counters() -> dict[str, Any]:
    """Returns the counters: {"unix_ns", "step", "logical_step", "devices"}.

    "devices" is {"cuda:0": {"requested_bytes", "peak_bytes" (since reset_peaks), "phase" (of the newest allocation),
    "categories": {name: bytes}, "reserved_peak" as in peaks()}}. Consistent across threads; writes no event.
    """

def peaks() -> dict[str, dict[str, Any]]:
    """Returns each device's figures at the instant of its highest requested bytes.

    They are {"requested_bytes", "allocated_bytes", "reserved_bytes" (both -1 if unknown), "step", "phase", "unix_ns",
    "categories": {...}}, and "reserved_peak": {"bytes" (None if unknown), "step", "phase"}, the most bytes that the
    allocator has reserved since reset_peaks.
    """

def reset_peaks() -> None: ...
def live_blocks() -> list[dict[str, Any]]:
    """Returns all live blocks: address, bytes, category, phase, module, op, step, device, stream, thread."""

def failures() -> list[dict[str, Any]]:
    """Returns the newest 16 allocations that failed since events were started, the oldest first.

    Each is {"number", "requested" (bytes), "unix_ns", "step", "logical_step", "device", the request's "category",
    "phase", "module" and "op", "holdings", "upstream"}. Holdings are the device's live blocks by origin, the largest
    first: {"bytes", "blocks", "largest", "category", "module", "op", "phase", "step"}. Upstream has counts of the
    wrapped allocator and the device, None if unknown: {"reserved", "allocated", "pending", "largest_free",
    "free_segments", "free_expandable", "device_free", "device_total", "limit"}; see csrc/core/failures.h.
    """

# --- the event file ---
def start_events(directory: str, max_events: int, info_json: str) -> None:
    """Creates events.bin and meta.json. `info_json` is merged into meta.json (versions, devices). Raises OSError."""

def stop_events() -> None: ...  # trims the file and writes the last meta.json
def write_meta() -> None: ...  # immediately; the file is also refreshed in the background when names change
def events_status() -> dict[str, Any]: ...  # {"recording": bool, "written": int, "dropped": int, "error": str}

# --- allocators ---
def cpu_install() -> None: ...
def cpu_uninstall() -> None: ...
def cpu_installed() -> bool: ...
def cpu_limit(bytes: int) -> None: ...  # then the CPU runs out of memory as a device of that size would; 0: never
def cpu_reported_bytes() -> int: ...  # c10's own count of the bytes that the CPU allocator has handed out
def cuda_install() -> None: ...  # at any time; seeds the ledger from the native snapshot
def cuda_uninstall() -> None: ...
def cuda_installed() -> bool: ...  # our allocator is the current one
def cuda_allocator() -> Any: ...  # the torch._C._cuda_CUDAAllocator for change_current_allocator
def cuda_current_name() -> str: ...  # the name of the current allocator
def cuda_refresh(device: int) -> int:
    """Asks the native allocator which blocks still exist, and drops seeded blocks that are gone.

    Returns the bytes that wait for a side stream (pending_free).
    """
