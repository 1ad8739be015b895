# SPDX-License-Identifier: Apache-2.0
"""One process simulates a rank of a large job on a virtual GPU; and torchrun's processes with a virtual GPU each."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from opacus_memprof.virtual_gpu.requirements import LIBRARIES
from tests.integration.scripts.train_ranks import CLASSES, FEATURES, WIDTH
from tests.warm_python import ENVIRONMENT, interpreter

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
RUN = ("-m", "opacus_memprof", "run", "--virtual-gpu", "h100")

pytestmark = pytest.mark.skipif(
    not (LIBRARIES / "libcuda.so.1").is_file(), reason="the virtual GPU's libraries have not been built"
)


def _nightly(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.nightly)


def python(*arguments: str | Path, returns: int = 0) -> subprocess.CompletedProcess[str]:
    command = [*interpreter(), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
    assert done.returncode == returns, done.stdout + done.stderr
    return done


def printed(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def sharded_elements(shape: list[int], ranks: int, rank: int) -> int:
    """FSDP2 splits a parameter's rows evenly; each rank holds as many as the first, padded."""
    rows = -(-shape[0] // ranks)
    return rows * (1 if len(shape) == 1 else shape[1])


@pytest.mark.parametrize(("ranks", "rank"), [(2, 1), (64, 63), _nightly(8, 0), _nightly(1024, 0)])
def test_what_fsdp2_holds_of_each_parameter(ranks: int, rank: int) -> None:
    """Storage of the shards, which all ranks have alike; the ones at the end have rows that are padding."""
    (found,) = printed(python(SCRIPTS / "virtual_fsdp2.py", rank, ranks))
    assert found["parameters"], "no parameter was seen"
    for shape, storage in found["parameters"]:
        assert storage == 4 * sharded_elements(shape, ranks, rank), shape
    assert (found["rank"], found["ranks"]) == (rank, ranks)
    assert found["losses"] == 2


@pytest.mark.parametrize(("ranks", "rank"), [(8, 7), (1024, 0), _nightly(64, 0)])
def test_what_flash_clip_holds_under_fsdp2(tmp_path: Path, ranks: int, rank: int) -> None:
    """By category: shards of parameters, sums and optimizer states; one whole layer at a time while it runs."""
    many = ("--virtual-ranks", str(ranks), "--rank", str(rank))
    python(*RUN, *many, "-o", tmp_path, SCRIPTS / "train_ranks.py", "fsdp2/flash_clip/flat")
    profile = json.loads((tmp_path / f"rank_{rank}/profile.json").read_text())
    (device,) = (found for name, found in profile["devices"].items() if name.startswith("cuda"))
    layers = [[[WIDTH, FEATURES], [WIDTH]], [[WIDTH, WIDTH], [WIDTH]], [[CLASSES, WIDTH], [CLASSES]]]
    shards = [4 * sharded_elements(shape, ranks, rank) for layer in layers for shape in layer]
    whole = [ranks * sum(4 * sharded_elements(shape, ranks, rank) for shape in layer) for layer in layers]
    highest = {name: max(sizes) for name, sizes in device["timeline"]["categories"].items()}
    assert highest["model_parameters"] == highest["gradients"] == highest["summed_gradients"] == sum(shards)
    assert highest["optimizer_states"] == 2 * sum(shards)
    # Noise is drawn where it is added. The kernel needs a table, and was tried on some numbers.
    assert 6 * 8 * len(shards) <= highest["noise"] < 4096
    # The next layer may be gathered while one runs.
    assert max(whole) <= highest["unsharded_parameters"] <= sum(whole)
    assert highest.get("unsharded_gradients", 0) == 0
    assert device["peak"]["categories"]["unattributed"] == 0


def test_collectives_are_as_if_all_ranks_had_the_same_data() -> None:
    (found,) = printed(python(SCRIPTS / "virtual_collectives.py", 5, 8))
    ranks, rank = 8, 5
    for name, values in found["sums"].items():
        assert values == [ranks * 1, ranks * 2, ranks * 3], name
    assert found["rounded"] == {"torch.float16": True, "torch.bfloat16": True}
    assert found["average"] == found["largest"] == [1, 2, 3]
    assert found["product"] == [1, 2**ranks]
    assert found["gathered"] == [1, 2] * ranks
    assert found["scattered"] == [ranks * (2 * rank), ranks * (2 * rank + 1)]
    assert found["exchanged"] == [rank] * ranks  # from each what it has for this one
    assert found["ring"] == [7, 7, 7]
    assert len(found["in_groups"]) >= 3
    for name, size in found["in_groups"].items():
        assert size == int(name[-1]), name
    assert found["objects"] == [{"rank": rank}] * ranks
    assert found["broadcast"] == [{"rank": rank}, 3]


def test_large_collectives_are_only_booked() -> None:
    """A process would need 64 GiB for what is gathered here."""
    (found,) = printed(python(SCRIPTS / "virtual_collectives.py", 0, 1024, "large"))
    assert found["gathered_bytes"] == 1024 * 64 * 2**20
    assert found["rss_bytes"] < 3 * 2**30


def test_two_ranks_of_many_one_after_the_other(tmp_path: Path) -> None:
    script = ROOT / "examples/train_distributed.py"
    ranks = ("--virtual-ranks", "1024", "--rank", "1023", "--rank", "0")
    done = python(*RUN, *ranks, "-o", tmp_path / "out", script, "--wrap", "dpddp")
    assert "ranks 0, 1023 of 1024, finished" in done.stdout
    summary = json.loads((tmp_path / "out/ranks.json").read_text())
    assert summary["world_size"] == 1024
    assert summary["played"] == [0, 1023]
    assert summary["missing"] == []
    assert [(row["rank"], row["local_rank"], row["device"]) for row in summary["ranks"]] == [
        (0, 0, "cuda:0"),
        (1023, 7, "cuda:7"),
    ]
    for row in summary["ranks"]:
        assert sum(row["peak"]["categories"].values()) == row["peak"]["requested_bytes"] > 0
    reported = python("-m", "opacus_memprof", "report", tmp_path / "out/rank_1023")
    assert "rank 1023 of 1024" in reported.stdout


def steps_of_two_ranks(done: subprocess.CompletedProcess[str], directory: Path) -> list[int]:
    """Returns the steps of both, which have a virtual GPU each and are simulated by no other process."""
    assert "2 ranks, finished" in done.stdout
    summary = json.loads((directory / "ranks.json").read_text())
    assert "played" not in summary
    assert [(row["status"], row["device"]) for row in summary["ranks"]] == [
        ("finished", "cuda:0"),
        ("finished", "cuda:1"),
    ]
    return [row["steps"] for row in summary["ranks"]]


@pytest.mark.nightly
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_torchrun(tmp_path: Path, wrap: str) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    script = ROOT / "examples/train_distributed.py"
    done = python(*launcher, *RUN, "-o", tmp_path / "out", script, "--wrap", wrap)
    assert steps_of_two_ranks(done, tmp_path / "out") == [3, 3]


REFUSED = {
    "--virtual-gpu h100 --virtual-ranks 4 --rank 4": "has no rank 4",
    "--virtual-gpu h100 --virtual-ranks 4 --rank -1": "has no rank -1",
    "--virtual-gpu h100 --virtual-ranks 0": "cannot have 0 ranks",
    "--virtual-gpu h100 --virtual-ranks 12 --virtual-gpus 8": "a multiple",
    "--virtual-gpu h100 --rank 1": "add --virtual-ranks N",
    "--virtual-ranks 4": "add --virtual-gpu KIND",
    "--rank 4": "add --virtual-gpu KIND",
    "--no-weights": "add --virtual-gpu KIND",
}


@pytest.mark.parametrize("options", REFUSED)
def test_refusals(tmp_path: Path, options: str) -> None:
    script = ROOT / "examples/train_distributed.py"
    done = python("-m", "opacus_memprof", "run", *options.split(), "-o", tmp_path / "out", script, returns=2)
    assert REFUSED[options] in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_rank_that_is_simulated_alone_receives_no_objects(tmp_path: Path) -> None:
    script = tmp_path / "receive.py"
    script.write_text(
        "import torch.distributed as dist\ndist.init_process_group('nccl')\ndist.recv_object_list([None], src=0)\n"
    )
    completed = python(*RUN, "--virtual-ranks", "4", "--rank", "1", "-o", tmp_path / "out", script, returns=1)
    assert "a rank that is simulated alone cannot receive objects" in completed.stderr


def test_a_rank_of_a_real_job_plays_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from opacus_memprof import virtual_gpu
    from opacus_memprof.errors import MemprofError

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MemprofError, match="rank 1 of the 2 that its launcher has started"):
        virtual_gpu.check_ranks([0], 4)


def test_models_without_their_weights(tmp_path: Path) -> None:
    """Two blocks of Llama-3.1-8B's width with its vocabulary: 2.9 GB in bf16, of which no page is touched."""
    pytest.importorskip("peft")
    (found,) = printed(python(SCRIPTS / "virtual_no_weights.py", tmp_path))
    assert found["parameters"] == 2 * 128256 * 4096 + 4096 + 2 * (
        2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336 + 2 * 4096
    )
    assert found["dtypes"] == {"as asked": "torch.float16", "the configuration's": "torch.bfloat16"}
    assert found["attention"] == "eager"
    assert found["rotary_as_transformers"]
    assert found["norms_are_one"]
    assert found["devices"] == ["cpu", "cuda:0", "cuda:0"]
    assert found["host_bytes"] < 400 * 2**20  # of 2.9 GB on the CPU, and on the device for a step with adapters
    assert found["allocated_bytes"] >= 2 * found["parameters"]
    assert "quantized weights" in found["refusal"]


def test_ranks_that_a_program_starts_record_themselves(tmp_path: Path) -> None:
    """And the process that waits for them leaves no profile of its own, in a directory that can be used again."""
    for device, failing in (("--device cpu", []), ("--virtual-gpu h100 --virtual-gpus 2", ["fail"])):
        program = (SCRIPTS / "spawned_ranks.py", tmp_path / f"store {failing}", *failing)
        done = python(
            "-m", "opacus_memprof", "run", *device.split(), "-o", tmp_path / "out", *program, returns=len(failing)
        )
        assert f"2 ranks, {'failed' if failing else 'finished'}" in done.stdout
        assert sorted(each.name for each in (tmp_path / "out").iterdir()) == ["rank_0", "rank_1", "ranks.json"]
        summary = json.loads((tmp_path / "out/ranks.json").read_text())
        assert (summary["world_size"], summary["missing"]) == (2, [])
        statuses = {row["rank"]: row["status"] for row in summary["ranks"]}
        assert statuses[1] == ("failed" if failing else "finished")
        for row in summary["ranks"]:
            assert row["peak"]["categories"]["model_parameters"] >= 4 * 256 * 256
            assert row["steps"] == 3


def test_decisions_by_what_other_ranks_give_are_said(tmp_path: Path) -> None:
    """With operation and line; not so what a rank gives itself, prints, or what DDP does with it."""
    script = SCRIPTS / "virtual_rank_reads.py"
    expected = {number for number, line in enumerate(script.read_text().splitlines(), 1) if "# decides" in line}
    found: dict[str, set[int]] = {}
    for ranks in ("8", "1"):
        python(*RUN, "--virtual-ranks", ranks, "--rank", "0", "-o", tmp_path / ranks, script, "simulated")
        (file,) = (tmp_path / ranks).rglob("profile.json")
        warnings = [each for each in json.loads(file.read_text())["warnings"] if "other ranks" in each]
        found[ranks] = {int(each.partition(f"{script}:")[2].split()[0]) for each in warnings}
    assert found == {"8": expected, "1": set()}


def test_objects_of_processes_are_gathered(tmp_path: Path) -> None:
    """The script compares them."""
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    done = python(*launcher, *RUN, "-o", tmp_path / "out", SCRIPTS / "virtual_rank_reads.py")
    assert "copies" not in done.stdout
    assert steps_of_two_ranks(done, tmp_path / "out") == [2, 2]
