# SPDX-License-Identifier: Apache-2.0
"""What the pytest plugin costs a training test: the same test run with and without a profile, in one process.

Rounds alternate the two, the order shuffled; the ratio is taken within a round and the median over rounds is quoted.

    python -m benchmarks.profiling.pytest_plugin --rounds 20 --steps 10
"""

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

import pytest

from opacus_memprof.pytest_plugin import plugin

TEST = """
import opacus, pytest, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def train():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear({width}, {width}), nn.ReLU(), nn.Linear({width}, {width}), nn.ReLU(),
                          nn.Linear({width}, 10))
    data = TensorDataset(torch.randn(32 * {steps}, {width}), torch.randint(10, (32 * {steps},)))
    model, optimizer, loader = opacus.PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.Adam(model.parameters()), data_loader=DataLoader(data, batch_size=32),
        noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False)
    device = next(model.parameters()).device
    for features, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(features.to(device)), labels.to(device)).backward()
        optimizer.step()

{tests}
"""


class Times:
    """Seconds of each test, its setup and teardown included."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        begin = time.perf_counter()
        try:
            return (yield)
        finally:
            self.seconds[item.name] = time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--width", type=int, default=256)
    arguments = parser.parse_args()
    random.seed(0)
    tests = ["def test_warm_up(memprof):\n    train()\n"]
    for number in range(arguments.rounds):
        kinds = [("profiled", "memprof"), ("plain", "")]
        random.shuffle(kinds)
        tests += [f"def test_{kind}_{number}({fixture}):\n    train()\n" for kind, fixture in kinds]
    times = Times()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "test_cost.py"
        file.write_text(TEST.format(width=arguments.width, steps=arguments.steps, tests="\n".join(tests)))
        manager = [times] if _is_installed() else [times, plugin]
        code = pytest.main([str(file), "-q", "-W", "ignore", "-p", "no:cacheprovider", "-p", "no:randomly"], manager)
    if code:
        raise SystemExit(int(code))
    rounds = [
        (times.seconds[f"test_plain_{number}"], times.seconds[f"test_profiled_{number}"])
        for number in range(arguments.rounds)
    ]
    plain = statistics.median(before for before, _ in rounds)
    added = statistics.median(after - before for before, after in rounds)
    ratio = statistics.median(after / before for before, after in rounds)
    print(f"{1e3 * plain:.1f} ms a test, {1e3 * added:+.1f} ms profiled: {100 * (ratio - 1):+.1f} %")


def _is_installed() -> bool:
    from importlib.metadata import entry_points

    return any(entry.value == plugin.__name__ for entry in entry_points(group="pytest11"))


if __name__ == "__main__":
    main()
