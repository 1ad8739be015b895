# SPDX-License-Identifier: Apache-2.0
"""What a stream costs a training run: the same steps with and without one, in one session.

Each round runs both, the order shuffled; the ratio is taken within a round and the median over rounds is quoted. The
stream reads a hundred times as often as it does by default, so that there is something to measure. Beside it, what one
reading costs.

    python -m benchmarks.profiling.stream --rounds 30
"""

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import opacus_memprof
from opacus_memprof.recording.live import read_live
from opacus_memprof.recording.stream import Stream, make_sinks

DEFAULT_INTERVAL = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=1.0, help="of training, in each half of a round")
    parser.add_argument("--interval", type=float, default=0.1)
    arguments = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    batch = torch.randn(32, 256, device=device)
    with tempfile.TemporaryDirectory() as folder, opacus_memprof.profile(Path(folder) / "profile") as session:
        model, optimizer, _ = opacus_memprof.PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.Adam(model.parameters()),
            data_loader=torch.utils.data.DataLoader(torch.zeros(32, 1), batch_size=32),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
        )

        def steps_a_second() -> float:
            """By the CPU's time of the whole process where there is no GPU: other programs do not count there."""
            clock = time.perf_counter if device == "cuda" else time.process_time
            begin, count = clock(), 0
            while clock() - begin < arguments.seconds:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                if device == "cuda":
                    torch.cuda.synchronize()
                count += 1
            return count / (clock() - begin)

        def with_stream() -> float:
            targets = [f"{folder}/memory.jsonl", f"{folder}/memory.prom"]
            stream = Stream(make_sinks(targets), arguments.interval, print)
            try:
                return steps_a_second()
            finally:
                stream.stop()

        steps_a_second()
        ratios = []
        for _ in range(arguments.rounds):
            halves = [("plain", steps_a_second), ("streamed", with_stream)]
            random.shuffle(halves)
            found = {name: run() for name, run in halves}
            ratios.append(found["plain"] / found["streamed"])
        costs = {}
        for name, target in (("JSON lines", "memory.jsonl"), ("Prometheus' file", "memory.prom")):
            (sink,) = make_sinks(f"{folder}/{target}")
            sink.open()
            times = []
            for _ in range(300):
                begin = time.thread_time()
                sink.write(read_live())
                times.append(time.thread_time() - begin)
            sink.close()
            costs[name] = statistics.median(times)
        assert session.warnings == []
    percent = 100 * (statistics.median(ratios) - 1)
    quarters = statistics.quantiles([100 * (ratio - 1) for ratio in ratios])
    between = f"half of {len(ratios)} rounds between {quarters[0]:+.2f} and {quarters[2]:+.2f} %"
    print(f"a step, streamed every {arguments.interval:g} s: {percent:+.2f} % ({between})")
    for name, seconds in costs.items():
        print(f"{name}: {1e6 * seconds:.0f} us a reading, {100 * seconds / DEFAULT_INTERVAL:.4f} % at one every 10 s")


if __name__ == "__main__":
    main()
