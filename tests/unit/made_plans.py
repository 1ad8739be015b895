# SPDX-License-Identifier: Apache-2.0
"""Plans as plan.json has them, made up."""

from typing import Any

from opacus_memprof.planning.draws import LargestBatch
from opacus_memprof.profiles.plan import (
    ComputedBytes,
    DrawnAbove,
    DrawnPeak,
    Plan,
    PlanCell,
    PlanDraws,
    PlannedRun,
    PlanVerdict,
    RunOfValue,
    SearchedArgument,
    SmallestGpu,
    TriedAdvice,
)

MIB = 2**20
ROOM = {"a100-40": 39_000 * MIB, "h100": 78_000 * MIB}


def a_run(batch: int, gpu: str = "h100", fits: bool = True, kind: type[PlannedRun] = PlannedRun, **more: Any) -> Any:
    """Takes 100 MiB a sample and 1 GiB."""
    categories = {
        "model_parameters": 1024 * MIB,
        "activations": 60 * batch * MIB,
        "per_sample_gradients": 40 * batch * MIB,
    }
    requested = sum(categories.values())
    return kind(
        fits=fits,
        status="finished" if fits else "out_of_memory",
        error="",
        steps=2,
        samples=batch,
        requested_bytes=requested,
        reserved_bytes=min(requested + requested // 20, ROOM[gpu]),
        may_reserve_bytes=ROOM[gpu],
        context_bytes=500 * MIB,
        retries=0,
        category="activations",
        module="<b>blocks.0",
        phase="backward",
        categories=categories,
        poisson={},
        seconds=5.0,
        directory="runs/x",
        **more,
    )


def a_search() -> Plan:
    """Two modes on two GPUs; of one cell nothing fits."""
    cells = []
    for gpu, mode, largest in (
        ("a100-40", "hooks", 370),
        ("a100-40", "ghost", None),
        ("h100", "hooks", 740),
        ("h100", "ghost", 738),
    ):
        runs = [a_run(5000, gpu, False, RunOfValue, value=1)]
        if largest is not None:
            runs = [a_run(value, gpu, value <= largest, RunOfValue, value=value) for value in (1, largest, largest + 1)]
        cells.append(
            PlanCell(
                mode=mode,
                settings=None,
                fixed={},
                gpu=gpu,
                memory_bytes=None,
                gpu_memory_bytes=ROOM[gpu] + 500 * MIB,
                largest=largest,
                error="" if largest else "not even <i>batch-size=1</i> fits",
                computed=ComputedBytes(base_bytes=1024 * MIB, bytes_per_value=100 * MIB),
                runs=runs,
            )
        )
    search = SearchedArgument(argument="batch-size", low=1, high=4096)
    smallest = [
        SmallestGpu(candidate=mode, gpu=gpu, memory_bytes=ROOM[gpu] + 500 * MIB)
        for mode, gpu in (("hooks", "a100-40"), ("ghost", "h100"))
    ]
    return Plan(
        program="<u>train.py", arguments=["--lr", "1"], ranks=1, search=search, cells=cells, smallest_gpus=smallest
    )


def a_verdict() -> Plan:
    """Of drawn batches that do not fit, with three pieces of advice."""
    drawn = LargestBatch(20_000, 0.02, 5000)
    advice = [
        TriedAdvice(title="a smaller batch", code="B = 7", predicted_peak_bytes=1, tried=a_run(100), failure=""),
        TriedAdvice(title="other settings", code="S", predicted_peak_bytes=2, tried=a_run(800, fits=False), failure=""),
        TriedAdvice(title="an edit", code="<s>E", predicted_peak_bytes=3 * MIB, tried=None, failure="it failed"),
    ]
    whole = a_run(800)
    verdict = PlanVerdict(
        gpu="h100",
        memory_bytes=None,
        fits=False,
        needed_bytes=whole.reserved_bytes,
        spare_bytes=ROOM["h100"] - 84_000 * MIB,
        predicted_gpu="h200",
        run=a_run(700, fits=False),
        with_more_memory=whole,
        advice=advice,
    )
    draws = PlanDraws(
        samples=drawn.samples,
        rate=drawn.rate,
        steps=drawn.steps,
        largest_batch_that_fits=480,
        ran=[400, 480, 481],
        out_of_memory_probability=drawn.probability_above(480),
        peaks=[DrawnPeak(probability=p, batch=drawn.quantile(p), requested_bytes=MIB) for p in (0.5, 0.999999)],
        above=[DrawnAbove(batch=size, probability=drawn.probability_above(size)) for size in range(400, 540, 4)],
        max_physical_batch_size=480,
        with_it=a_run(480),
    )
    return Plan(program="train.py", arguments=[], ranks=1, verdict=verdict, draws=draws)
