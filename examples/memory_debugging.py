# SPDX-License-Identifier: Apache-2.0
"""The debugging toolkit on a small training run: a timeline of events, checkpoints with monitoring, stages, a report.

python examples/memory_debugging.py --log-dir logs/memory_debugging
"""

import argparse
from pathlib import Path

import torch
from torch import nn

import opacus_memprof

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def create_model() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10)).to(DEVICE)


def create_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(64, 256, device=DEVICE), torch.randint(10, (64,), device=DEVICE)) for _ in range(20)]


def train(
    model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]], profiler: opacus_memprof.GPUMemoryProfiler
) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters())
    for features, labels in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(features), labels)
        profiler.record("forward", f"loss={loss.item():.4f}")
        loss.backward()
        profiler.record("backward")
        optimizer.step()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log-dir", type=Path, default=Path("logs/memory_debugging"))
    log_dir: Path = parser.parse_args().log_dir

    opacus_memprof.memory_snapshot("start")
    with (
        opacus_memprof.memory_profiled_training(log_dir) as training,
        opacus_memprof.create_memory_debugger(log_dir, enable_real_time=True) as debugger,
    ):
        profiler = opacus_memprof.GPUMemoryProfiler(log_dir=log_dir, threshold_mb=4096)
        debugger.create_memory_checkpoint("before")
        model = training.profile_stage("model_creation", create_model)
        batches = training.profile_stage("data_loading", create_batches)
        training.profile_stage("training", train, model, batches, profiler)
        debugger.create_memory_checkpoint("after")
        debugger.compare_checkpoints("before", "after")
        debugger.check_memory_anomalies(threshold_mb=200.0)
        debugger.generate_memory_report()

    profiler.print_report()
    profiler.generate_summary_report()
    profiler.save_to_json()
    profiler.cleanup()
    opacus_memprof.analyze_model(model, "trained model")
    opacus_memprof.check_memory_status(threshold_mb=4096)
    print(opacus_memprof.generate_report(log_dir / "report.txt"))


if __name__ == "__main__":
    main()
