# SPDX-License-Identifier: Apache-2.0
"""The examples run, small and in this process, and their profiles agree with formulas and with a plain loop."""

import contextlib
import copy
import gc
import json
import runpy
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader

import opacus_memprof
from opacus_memprof.analysis.profile import load_profile
from opacus_memprof.errors import MemprofError
from opacus_memprof.integrations import loggers, register_magics
from opacus_memprof.integrations.loggers import StepLog, scalars
from opacus_memprof.recording import native

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks


@pytest.fixture(autouse=True)
def own_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the notebook's kernel
    yield
    gc.collect()  # models are in cycles with their trainers
    assert native.live_blocks() == []


def run(example: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The profile that the example leaves."""
    monkeypatch.setattr(sys, "argv", [example, *arguments, "-o", "profile"])
    runpy.run_path(str(EXAMPLES / example), run_name="__main__")
    assert opacus_memprof.session.current() is None
    profile: dict[str, Any] = json.loads(Path("profile", "profile.json").read_text())
    assert profile["status"] == "finished"
    assert profile["warnings"] == []
    peak = profile["devices"]["cpu"]["peak"]
    assert sum(peak["categories"].values()) == peak["requested_bytes"]
    assert peak["categories"]["unattributed"] < 0.02 * peak["requested_bytes"]
    return profile


def test_plain_loop_with_tensorboard_and_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    arguments = ("--steps", "3", "--tensorboard", "runs", "--wandb", "offline")
    device = run("plain_loop.py", *arguments, monkeypatch=monkeypatch)["devices"]["cpu"]
    written = EventAccumulator("runs").Reload()

    def values(name: str) -> dict[int, float]:
        return {event.step: event.value for event in written.Scalars(f"memory/cpu/{name}")}

    steps = {step["step"]: step for step in device["steps"]}
    assert values("step_peak/total") == {number: step["peak_bytes"] for number, step in steps.items()}
    key = "per_sample_gradients"
    assert values(f"step_peak/{key}") == {
        number: step["categories"][key] for number, step in steps.items() if key in step["categories"]
    }
    parameters = 4 * (64 * 256 + 256 + 256 * 10 + 10)
    assert values("live/model_parameters") == dict.fromkeys((1, 2, 3), parameters)
    assert values("live/optimizer_states") == dict.fromkeys((1, 2, 3), 2 * parameters + 4 * 4)
    live = [name.rpartition("/")[2] for name in written.Tags()["scalars"] if name.startswith("memory/cpu/live/")]
    assert sum(values(f"live/{name}")[3] for name in live if name != "total") == values("live/total")[3]
    peaks = values("peak/total")
    assert peaks[3] == max(step["peak_bytes"] for number, step in steps.items() if number < 3)
    (kept,) = Path("wandb").glob("offline-run-*/*.wandb")
    deadline = time.monotonic() + 20  # wandb's own process may still be writing
    while b"memory/cpu/peak/per_sample_gradients" not in kept.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert b"memory/cpu/peak/per_sample_gradients" in kept.read_bytes()


def test_huggingface_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = run("huggingface_trainer.py", "--steps", "3", monkeypatch=monkeypatch)
    assert len([step for step in profile["devices"]["cpu"]["steps"] if step["complete"]]) == 3
    assert [snapshot["name"] for snapshot in profile["devices"]["cpu"]["snapshots"]] == ["epoch 0.375", "end"]
    assert Path("profile_adapters", "adapter_model.safetensors").exists()


def test_the_trainer_trains_as_a_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without noise, on the same batches: the same weights bit for bit. And its memory is that of the formula."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    from opacus_memprof.integrations.huggingface import MemprofCallback

    example = runpy.run_path(str(EXAMPLES / "huggingface_trainer.py"), run_name="example")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
    start: Any = get_peft_model(LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape)), lora).train()
    rows = torch.randint(64, (24, 8))
    data: Any = [{"input_ids": row, "labels": row} for row in rows]

    def private() -> Any:
        model = copy.deepcopy(start)
        return model, PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3),
            data_loader=DataLoader(data, batch_size=8),
            noise_multiplier=0.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
        )

    def by_trainer(*callbacks: Any, clears: bool = True) -> Any:
        model, (wrapped, optimizer, loader) = private()
        trainer = example["PrivateTrainer"](
            model=wrapped,
            optimizers=(optimizer, None),
            train_dataloader=loader,
            callbacks=list(callbacks),
            args=TrainingArguments(
                output_dir="out",
                num_train_epochs=1,
                max_grad_norm=0.0,
                lr_scheduler_type="constant",
                remove_unused_columns=False,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
        )
        if not clears:
            trainer.remove_callback(example["ClearOptimizer"])
        trainer.train()
        return model

    with opacus_memprof.profile("profile", device="cpu") as session:
        trained = by_trainer(MemprofCallback())
    looped, (wrapped, optimizer, loader) = private()
    for batch in loader:
        optimizer.zero_grad()
        # The Trainer has the model divide by all labels, where it would by the labels that have a token before them.
        wrapped(**batch, num_items_in_batch=batch["labels"].numel()).loss.backward()
        optimizer.step()
    for name, value in looped.state_dict().items():
        assert torch.equal(value, trained.state_dict()[name]), name

    adapters = sum(p.numel() for p in start.parameters() if p.requires_grad)
    assert adapters == 2 * (4 * 32 + 32 * 4)
    clip = session.result["devices"]["cpu"]["phases"]["clip"]["categories"]
    assert clip["per_sample_gradients"] == 8 * adapters * 4

    # The profiler's callback does nothing for the training: one that fails without it fails with it.
    with (
        pytest.raises(ValueError, match="Gradients haven't been cleared"),
        opacus_memprof.profile("failed", device="cpu"),
    ):
        by_trainer(MemprofCallback(), clears=False)


def test_the_trainer_s_callback_opens_a_session_where_none_runs() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from opacus_memprof.integrations.huggingface import MemprofCallback

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape))
    rows = torch.randint(64, (8, 8))
    Trainer(
        model=model,
        args=TrainingArguments("out", max_steps=2, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[MemprofCallback(directory="profile")],
    ).train()
    assert opacus_memprof.session.current() is None
    profile = load_profile("profile")
    peak = profile.devices["cpu"].peak
    assert profile.status == "finished"
    assert peak.categories["model_parameters"] == 4 * sum(parameter.numel() for parameter in model.parameters())
    assert sum(peak.categories.values()) == peak.requested_bytes


@pytest.mark.parametrize("fails", [False, True])
def test_lightning_s_callback_opens_a_session_where_none_runs(fails: bool) -> None:
    import pytorch_lightning as pl

    from opacus_memprof.integrations.lightning import MemprofCallback

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 2)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            if fails:
                raise ValueError("mine")
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1}
    trainer = pl.Trainer(accelerator="cpu", callbacks=[MemprofCallback(directory="profile")], **quiet)
    with contextlib.suppress(ValueError):
        trainer.fit(Classifier(), DataLoader(torch.randn(8, 16), batch_size=4))
    assert opacus_memprof.session.current() is None
    profile = load_profile("profile")
    assert (profile.status, profile.error) == (("failed", "ValueError: mine") if fails else ("finished", None))
    assert profile.devices["cpu"].peak.categories["model_parameters"] == 4 * (16 * 2 + 2)


def test_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    device = run("lightning_training.py", "--samples", "64", "--epochs", "2", monkeypatch=monkeypatch)["devices"]["cpu"]
    assert [snapshot["name"] for snapshot in device["snapshots"]] == ["epoch 0", "epoch 1", "end"]
    assert len([step for step in device["steps"] if step["complete"]]) == 4
    parameters = 64 * 256 + 256 + 256 * 10 + 10
    assert device["peak"]["categories"]["model_parameters"] == 4 * parameters
    batches = device["phases"]["clip"]["categories"]["per_sample_gradients"] / (4 * parameters)
    assert batches == int(batches) > 0  # Poisson sampling: of so many samples
    assert {"forward", "backward", "clip", "noise", "optimizer_step"} <= set(device["phases"])


def test_scalars_are_the_live_bytes_and_those_at_the_peak() -> None:
    model = nn.Linear(64, 64)
    with opacus_memprof.profile("profile", device="cpu") as session:
        session.attach(model)
        in_use = torch.empty(2**20, dtype=torch.uint8)
        del in_use
        found = scalars()
        live = {f"memory/cpu/live/{name}": size for name, size in session.breakdown()["cpu"].items()}
        assert {name: size for name, size in found.items() if "/live/" in name and size} == live | {
            "memory/cpu/live/total": sum(live.values())
        }
        assert found["memory/cpu/peak/total"] == 2**20 + found["memory/cpu/live/total"]
        assert found["memory/cpu/peak/model_parameters"] == 4 * (64 * 64 + 64)
    with pytest.raises(opacus_memprof.MemprofError, match="every=0 is not a number of steps"):
        StepLog([], 0)


def test_notebook() -> None:
    """Executed by a kernel of its own: the session's output is the report in a frame."""
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    (output,) = notebook.cells[-1].outputs
    page = output.data["text/html"]
    assert page.startswith('<iframe srcdoc="&lt;!')
    assert "per_sample_gradients" in page
    assert page.count('"') < 20  # all of the page itself is escaped


def test_a_running_session_shows_what_it_has_so_far() -> None:
    session = opacus_memprof.profile("profile", device="cpu")
    assert session._repr_html_() is None
    with session, opacus_memprof.tag("teacher"):
        in_use = torch.zeros(1000)
        page = session._repr_html_()
        assert page is not None
        assert "teacher" in page
    del in_use


def test_a_tracker_by_its_name_gets_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trackers of a name: the real ones where they are installed, into the run that the program has started."""
    import prometheus_client
    import wandb
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = wandb.init(mode="offline", project="memory")
    names = ["prometheus", "tensorboard", "wandb"]
    if find_spec("mlflow") is not None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{Path.cwd()}/runs.db")
        names.append("mlflow")
    if find_spec("trackio") is not None:
        monkeypatch.setenv("TRACKIO_DIR", str(Path.cwd()))
        __import__("trackio").init(project="memory")
        names.append("trackio")
    log = StepLog(names, 1, "profile")
    session = log.begin()
    model = nn.Linear(64, 64)
    session.attach(model)
    log.step_ended(1)
    log.end()
    name, size = "memory/cpu/live/model_parameters", 4 * (64 * 64 + 64)
    assert prometheus_client.REGISTRY.get_sample_value("opacus_memprof_logged_bytes", {"name": name}) == size
    loggers.tracker("tensorboard")._log.__self__._writer.close()  # type: ignore[attr-defined]
    (folder,) = Path("runs").iterdir()
    (event,) = EventAccumulator(str(folder)).Reload().Scalars(name)
    assert (event.step, event.value) == (1, size)
    assert run.summary[name] == size
    run.finish()
    if "mlflow" in names:
        import mlflow

        assert mlflow.active_run().info.run_id
        assert mlflow.get_run(mlflow.active_run().info.run_id).data.metrics[name] == size
        mlflow.end_run()


def test_trackers_that_cannot_log(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(opacus_memprof.MemprofError, match="there is no tracker 'neptune': use mlflow, "):
        StepLog(["neptune"], 1)
    monkeypatch.setitem(sys.modules, "trackio", None)
    loggers.tracker.cache_clear()
    with pytest.raises(opacus_memprof.MemprofError, match=r"logging to trackio needs trackio .*: pip install trackio"):
        StepLog(["trackio"], 1)
    with pytest.raises(opacus_memprof.MemprofError, match=r"wandb has no run to log memory to: call wandb\.init"):
        loggers.tracker("wandb").log({"a": 1}, 1)


def test_magics_profile_a_cell_and_show_a_profile() -> None:
    """In a kernel of its own: the model of an earlier cell is followed, and a cell that fails shows its exception."""
    cells = [
        "%load_ext opacus_memprof",
        "import torch\nmodel = torch.nn.Linear(64, 64)\noptimizer = torch.optim.Adam(model.parameters())",
        "%%memprof cell\nmodel(torch.ones(2, 64)).sum().backward()\noptimizer.step()\nseen = 1",
        "%memprof_report cell",
        "seen",
        "%%memprof failed\nraise ValueError('mine')",
        "%%memprof two words\npass",
        "import opacus_memprof\nopacus_memprof.session.current() is None",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=120, kernel_name="python3", allow_errors=True).execute()
    outputs = [cell.outputs for cell in notebook.cells]
    for shown in (outputs[2], outputs[3]):
        (page,) = (output.data["text/html"] for output in shown if "data" in output)
        assert page.startswith('<iframe srcdoc="&lt;!')
        assert "optimizer_states" in page
    assert outputs[4][0].data["text/plain"] == "1"
    assert (outputs[5][-1].ename, outputs[5][-1].evalue) == ("ValueError", "mine")
    assert outputs[6][0].ename == "MemprofError"
    assert outputs[7][0].data["text/plain"] == "True"
    parameters = 64 * 64 + 64
    assert load_profile("cell").devices["cpu"].peak.categories["model_parameters"] == 4 * parameters
    assert load_profile("failed").status == "failed"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("one two", "'one two' is more than one directory: give one"),
        ("'one", '"\'one" is not a directory (No closing quotation): close its quotes'),
        ("nowhere", "nowhere is not there: give the directory of a profile"),
    ],
)
def test_magics_refuse_in_a_sentence(line: str, sentence: str) -> None:
    magics: dict[str, Any] = {}
    register_magics(SimpleNamespace(register_magic_function=lambda function, kind: magics.update({kind: function})))
    with pytest.raises(MemprofError) as refused:
        magics["line"](line)
    assert str(refused.value).startswith(sentence)
