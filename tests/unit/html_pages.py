# SPDX-License-Identifier: Apache-2.0
"""Profiles for the HTML report."""

from pathlib import Path

from event_files import CATEGORIES
from large_event_files import one_step
from made_profiles import a_live_peak, an_oom_report
from msgspec.structs import replace

from opacus_memprof.analysis.profile import build_profile
from opacus_memprof.profiles.json_object import to_json
from opacus_memprof.profiles.live_memory import LivePeak
from opacus_memprof.profiles.profile import Finding, Profile

MODULES = ["encoder.layers.0.attention", "encoder.layers.0.mlp", "encoder.layers.1.mlp", "encoder.norm", "head", ""]
SIZES = [1, 1023, 1024, 1152, 1157, 1028, 10_235, 2**20 - 1, 2**20 - 6, 1_234_567, 2**30 + 5 * 2**20 + 5243, 2**41 + 1]


def failed_training(directory: Path) -> Profile:
    """The profile of a run on two GPUs that ended out of memory. At cuda:0's peak every category has bytes."""
    file = one_step(120, MODULES)
    file.add("alloc", 0x9000, 3000, "activation_hooks_shared", phase="forward", step=1, module="encoder.norm")
    file.add("alloc", 0xA000, 5000, "activation_hooks_opacus_only", phase="forward", step=1, module="encoder.norm")
    for index, category in enumerate(CATEGORIES):
        module = MODULES[index % len(MODULES)]
        file.add("alloc", 0xB00000 + index, 200_001 + index, category, phase="backward", step=1, module=module, op="mm")
    file.add(
        "alloc", 0xC00000, 2**23, "per_sample_gradients", phase="backward", step=1, module="encoder.norm", op="bmm"
    )
    file.add("snapshot", size=0, op="before it fails", step=1)
    file.add("alloc", 0x1000, 4321, "noise", device=2, module="head", step=1)
    for size in SIZES:
        file.add("oom", size=size, category="temp_matrices", phase="backward", step=1, module="head", op="bmm")
    counts = {"allocated_bytes": 2**42, "reserved_bytes": 2**43, "rounding": 12, "cached": 34, "outside_pytorch": 56}
    peaks = _live_peak(file.write(directory))
    profile = build_profile(directory, status="out_of_memory", exit_code=1, peaks=peaks, warnings=["mind the gap"])
    (snapshot,) = profile.devices["cuda:0"].snapshots
    profile.devices["cuda:0"].snapshots = [replace(snapshot, **counts, remainder=0)]
    profile.findings = [Finding("noise_allocated_twice", "head", 77, evidence="it is", remedy="do not")]
    reduced = {"predicted_peak_bytes": 8001, "saved_bytes": 4002}
    suggestion = {"title": "a smaller batch", "actions": [], "code": "B = 1", "computed": "by hand", **reduced}
    report = an_oom_report(needed={"bytes": 12_003}, suggestions=[{**suggestion, "fits": True}])
    (directory / "oom_report.json").write_text(to_json(report))
    return profile


def _live_peak(directory: Path) -> dict[str, LivePeak]:
    """What the live counters would have said at cuda:0's peak, had they been there."""
    peak = build_profile(directory, status="failed", exit_code=1)["devices"]["cuda:0"]["peak"]
    size = peak["requested_bytes"]
    allocator = {"counted_bytes": size, "allocated_bytes": size + 512, "reserved_bytes": size + 2**20}
    reserved = {"bytes": size + 2**22, "step": 0, "phase": "forward"}
    return {"cuda:0": a_live_peak(requested_bytes=size, **allocator, reserved_peak=reserved)}


def half_of(profile: Profile) -> Profile:
    """The profile of a run without privacy that held half as much of everything."""
    devices = {}
    for name, device in profile.devices.items():
        modules = {
            module: {key: size // 2 for key, size in sizes.items()} for module, sizes in device.peak.modules.items()
        }
        categories: dict[str, int] = {}
        for sizes in modules.values():
            for key, size in sizes.items():
                categories[key] = categories.get(key, 0) + size
        peak = replace(device.peak, modules=modules, categories=categories, requested_bytes=sum(categories.values()))
        phases = {phase: found for phase, found in device.phases.items() if phase not in ("clip", "noise")}
        devices[name] = replace(device, phases=phases, peak=peak)
    return replace(profile, devices=devices)
