# SPDX-License-Identifier: Apache-2.0
"""Trains tests.estimated_models on a virtual GPU in each mode, and once in the mode hooks with too little memory.

Prints a line of JSON for each model: by mode, the peak that is predicted from the failed run, which is profiled, and
torch's requested peak of the run in that mode. The mode "adopted" is hooks, where Opacus keeps the samplers' results
(adopt_grad_samples).

For one of them also by changes of the training, such as checkpoints, in the modes hooks and flash_clip: their code is
executed as it is printed.
"""

import gc
import importlib
import json
import math
import sys
import tempfile
from functools import partial
from pathlib import Path

from opacus_memprof import virtual_gpu

virtual_gpu.start("h200")

import torch  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import opacus_memprof  # noqa: E402
from opacus_memprof.analysis.oom import failure_report  # noqa: E402
from opacus_memprof.analysis.oom.advice import training  # noqa: E402
from opacus_memprof.analysis.oom.advice.suggestion import Change  # noqa: E402
from opacus_memprof.analysis.oom.predict import Case  # noqa: E402
from opacus_memprof.clipping import adopt_grad_samples  # noqa: E402
from opacus_memprof.pytest_plugin.clean_session import empty_caches  # noqa: E402
from tests.estimated_models import MODELS, EstimatedModel  # noqa: E402
from tests.models import MeanCrossEntropy  # noqa: E402
from tests.planted_models import Attention  # noqa: E402

LIMIT = 0.7  # of the peak in the mode hooks
CHANGED = "transformer, long"


def fused_attention(module: Attention, x: torch.Tensor) -> torch.Tensor:
    """The forward of Attention with the kernel that the change names."""
    batch, length, width = x.shape
    q, k, v = (part.view(batch, length, module.heads, -1).transpose(1, 2) for part in module.qkv(x).chunk(3, -1))
    mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    return module.out(mixed.transpose(1, 2).reshape(batch, length, width))


def train(chosen: EstimatedModel, mode: str, change: Change | None = None) -> None:
    if mode == "adopted":
        restore = adopt_grad_samples()
        try:
            train(chosen, "hooks")
        finally:
            restore()
        return
    model = chosen.build().to(chosen.dtype).cuda().train()
    inputs, targets = chosen.batch(2 * chosen.samples)
    inputs = inputs.to(chosen.dtype) if inputs.is_floating_point() else inputs
    kind = change.actions[0].kind if change else ""
    if change and kind == "sequence_length":
        names = {"ids": inputs}
        exec(change.code, names)
        inputs, targets = names["ids"], targets[:, : names["ids"].shape[1]]
    elif kind == "fused_attention":
        for module in filter(lambda each: isinstance(each, Attention), model.modules()):
            module.forward = partial(fused_attention, module)
    elif change and kind != "optimizer":
        names = {"model": model, "torch": torch}
        exec(change.code, names)
        model = names["model"]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    module, optimizer, *criteria, loader = opacus_memprof.PrivacyEngine().make_private(
        module=model,
        optimizer=(torch.optim.SGD if kind == "optimizer" else chosen.optimizer)(trained, lr=1e-3),
        criterion=MeanCrossEntropy(),
        data_loader=DataLoader(TensorDataset(inputs, targets), batch_size=chosen.samples),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
        check="off" if mode == "flash_clip" else None,  # the first step would prove privacy, which takes more memory
    )
    criterion = criteria[0] if criteria else MeanCrossEntropy()
    for x, y in loader:
        x, y = x.cuda(), y.cuda()
        with torch.autocast("cuda", torch.bfloat16, enabled=chosen.autocast):
            output = module(x)
            loss = criterion(output, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(mode == "flash_clip")


def start(limit: float) -> None:
    """Frees what an earlier run has left, and lets the next one have so many bytes."""
    empty_caches()
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))


def peak(chosen: EstimatedModel, mode: str, change: Change | None = None) -> int:
    """The requested peak of a run without the profiler, as torch counts it."""
    start(math.inf)
    torch.cuda.reset_peak_memory_stats()
    train(chosen, mode, change)
    return int(torch.cuda.memory_stats()["requested_bytes.all.peak"])


def run_out_of_memory(chosen: EstimatedModel, mode: str, needed: int) -> None:
    """Runs it under the profiler with less memory than it needs."""
    start(LIMIT * needed)
    with tempfile.TemporaryDirectory() as directory, opacus_memprof.profile(Path(directory) / "out", device="cuda"):
        try:
            train(chosen, mode)
        except torch.OutOfMemoryError:
            return
    raise AssertionError(f"{LIMIT} of the peak was enough")


def predicted_peak(case: Case, mode: str) -> int:
    if mode == case.shapes.mode:
        return case.peak().bytes
    assert case.step is not None
    if mode == "adopted":
        return case.peak_of(case.step.with_changes(copies_samples=False)).bytes
    keeps = case.step.keeps_gradients and mode != "flash_clip"
    return case.peak_of(case.step.with_changes(mode=mode, keeps_gradients=keeps)).bytes


def compare_changes(name: str, mode: str, cases: list[Case]) -> dict[str, list[int]]:
    """By change, the predicted peak and that of the run with it."""
    chosen = MODELS[name]
    run_out_of_memory(chosen, mode, peak(chosen, mode))
    changes = training.training_changes(cases[-1])
    return {
        change.actions[0].kind: [training.peak_with(cases[-1], [change]).bytes, peak(chosen, mode, change)]
        for change in changes
    }


def main() -> None:
    importlib.import_module("torch._dynamo")  # which the first optimizer would import
    gc.freeze()  # else each collection looks through all that has been imported
    cases: list[Case] = []
    failure_report.advise = lambda case: cases.append(case) or []  # type: ignore[assignment, func-returns-value]
    for name in sys.argv[1:] or MODELS:
        chosen = MODELS[name]
        peaks = {mode: peak(chosen, mode) for mode in chosen.modes}
        run_out_of_memory(chosen, "hooks", peaks["hooks"])
        row = {mode: [predicted_peak(cases[-1], mode), size] for mode, size in peaks.items()}
        changes = {mode: compare_changes(name, mode, cases) for mode in ("hooks", "flash_clip") if name == CHANGED}
        print(json.dumps({"model": name, "peaks": row, "changes": changes}), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    main()
