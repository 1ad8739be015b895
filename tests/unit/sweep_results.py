# SPDX-License-Identifier: Apache-2.0
"""Results of runs, made by hand: what docs/experiments.md says that a run leaves."""

from typing import Any

from msgspec import to_builtins

from opacus_memprof.experiments.configuration import Configuration
from opacus_memprof.experiments.rows import Row
from opacus_memprof.profiles.experiment_result import ExperimentResult
from opacus_memprof.profiles.json_object import convert_json
from tests.unit.made_profiles import a_device, a_peak

GIB = 2**30
BASE = Configuration(task="classification", device="cpu")
# What cuDNN did without.
HANDLED = {"requested_bytes": 5, "live_bytes": 0, "category": "library_workspace", "module": "", "phase": "forward"}
SNAPSHOT = {"allocated_mb": None, "reserved_mb": None, "timestamp": 1.0}


def finished(configuration: Configuration) -> dict[str, Any]:
    """Two steps. The parameters take 1 GiB, the activations 1 MiB for each token that goes through at once."""
    activations = configuration.seq_length * configuration.physical_batch_size * 2**20
    at_peak = {"model_parameters": GIB, "activations": activations, "activation_hooks": 300, "noise": 0}
    requested = GIB + activations + 300
    peak = {
        "requested_bytes": requested,
        "event": 3,
        "unix_ns": 3 * 10**9,
        "phase": "backward",
        "step": 1,
        "categories": at_peak,
        "activation_hooks": {"shared_with_autograd": 200, "opacus_only": 100},
        "components": {
            "mlp": {"model_parameters": GIB, "activation_hooks": 300},
            "other": {"activations": activations},
        },
        "born_in": {"setup": {"model_parameters": GIB}, "forward": {"activations": activations + 300}},
        "modules": {"mlp": at_peak},
        "module_tree": {"": GIB},
    }
    sizes = [0, GIB, GIB + activations, requested, GIB]
    phases = {
        "forward": {"peak_bytes": GIB + activations, "categories": {"model_parameters": GIB, "activations": 1}},
        "backward": {"peak_bytes": requested, "categories": at_peak},
    }
    snapshots = [
        {"name": "0_model_loaded", "requested_bytes": GIB, "unix_ns": 8 * 10**9, "event": 2},
        {"name": "1_step_0_forward", "requested_bytes": GIB + activations, "unix_ns": 9 * 10**9, "event": 3},
        {"name": "2_step_0_optimizer", "requested_bytes": GIB, "unix_ns": 12 * 10**9, "event": 5},
    ]
    device = to_builtins(a_device(peak=a_peak(**peak), phases=phases, snapshots=snapshots, out_of_memory=[HANDLED]))
    device["snapshots"] = [{**snapshot, **SNAPSHOT} for snapshot in device["snapshots"]]
    device["snapshots"][0]["peak_bytes"] = GIB + 2**20
    return {
        "format": 1,
        "experiment": configuration.mode,
        "config": configuration.to_json(),
        "status": "finished",
        "error": None,
        "refused": False,
        "progress": {"stage": "training", "steps_completed": 2, "steps": 2},
        "environment": {"device_name": "a machine", "torch": "2", "opacus": "1"},
        "data": {"source": "synthetic", "reason": "random tokens"},
        "started_unix_ns": 0,
        "parameters": {"total": 1000, "trainable": 10},
        "findings": [],
        "avg_time_ms": 12.5,
        "peak_memory_mb": requested / 2**20,
        "breakdown": {},
        **{key: device[key] for key in ("peak", "phases", "snapshots", "out_of_memory")},
        "timeline": {
            "event": [1, 2, 3, 4, 5],
            "time_ns": [0, 8 * 10**9, 9 * 10**9, 10 * 10**9, 12 * 10**9],
            "step": [0, 0, 0, 0, 1],
            "logical_step": [0, 0, 0, 0, 1],
            "phase": ["idle", "forward", "backward", "backward", "zero_grad"],
            "bytes": sizes,
            "categories": {
                "model_parameters": [0, GIB, GIB, GIB, GIB],
                "activations": [max(0, size - GIB) for size in sizes],
            },
        },
        "allocator_peak": None,
        "oom_suggestion": None,
        "oom_report": None,
        "profile": "profile",
    }


def out_of_memory(configuration: Configuration) -> dict[str, Any]:
    """Got as far as `finished`, and asked 3 GiB more."""
    failed = {
        "requested_bytes": 3 * GIB,
        "live_bytes": GIB,
        "category": "per_sample_gradients",
        "module": "mlp",
        "phase": "backward",
    }
    return finished(configuration) | {
        "status": "out_of_memory",
        "error": "OutOfMemoryError while training: tried to allocate 3 GiB",
        "avg_time_ms": None,
        "allocator_peak": {"max_allocated_bytes": GIB, "max_reserved_bytes": 2 * GIB},
        "oom_suggestion": {
            "title": "physical batches of 1",
            "code": "max_physical_batch_size=1",
            "predicted_peak_bytes": GIB // 2,
            "fits": True,
        },
        "oom_report": "profile/oom_report.txt",
        "out_of_memory": to_builtins(a_device(out_of_memory=[HANDLED, failed]))["out_of_memory"],
    }


def failed(configuration: Configuration) -> dict[str, Any]:
    """Could not begin."""
    return finished(configuration) | {
        "status": "failed",
        "error": "ValueError while loading the model: no",
        "avg_time_ms": None,
        "peak_memory_mb": None,
        "peak": None,
        "phases": {},
        "snapshots": [],
        "timeline": {},
        "data": None,
    }


def typed(result: dict[str, Any]) -> ExperimentResult:
    """The result as files.read_result reads it."""
    return convert_json(result, ExperimentResult, "a result made by hand")


def a_row(name: str, label: str, result: dict[str, Any]) -> Row:
    return Row(name, label, typed(result))


def with_fields(result: ExperimentResult, **fields: Any) -> ExperimentResult:
    """The result with other values of some fields, as JSON has them."""
    return typed(to_builtins(result) | fields)


def assert_contains(read: Any, written: Any) -> None:
    """That all of `written` is in `read`, which may have fields that earlier releases did not write."""
    if isinstance(written, dict):
        for key, value in written.items():
            assert_contains(read[key], value)
    elif isinstance(written, list):
        for one, other in zip(read, written, strict=True):
            assert_contains(one, other)
    else:
        assert read == written
