# SPDX-License-Identifier: Apache-2.0
"""`make bench`: what is read from the benchmarks' output, and what counts as slower."""

import json
import sys
import warnings

import pytest
import torch

from benchmarks import compare
from benchmarks.clipping import host_time


def test_ratios_and_percents_are_read() -> None:
    read = compare.Benchmark("none", {"a": r"^a .*?([\d.]+) x", "b": r"b: ([+-][\d.]+) %"}).ratios_in
    assert read("a   17.0 ms  1.25 x vanilla\nb: -10.0 % (of 3)\n") == {"a": 1.25, "b": 0.9}
    with pytest.raises(SystemExit, match="none did not print b"):
        read("a 1 ms 1.5 x\n")


def test_slower_is_what_is_beyond_the_tolerance() -> None:
    found = {"same": 1.2, "within": 1.3, "beyond": 1.4, "faster": 0.5, "new": 9.0}
    committed = {"same": 1.2, "within": 1.2, "beyond": 1.2, "faster": 1.2}
    assert compare.slower(found, committed, 0.1) == ["beyond"]


def test_every_ratio_is_committed() -> None:
    names = [name for benchmark in compare.BENCHMARKS for name in benchmark.patterns]
    assert [*json.loads(compare.COMMITTED.read_text())["ratios"]] == names


def test_host_time_prints_what_is_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--layers 1 --width 8 --batch 2 --length 3 --rounds 1"
    monkeypatch.setattr(sys, "argv", ["host_time", *sizes.split()])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    with warnings.catch_warnings():
        host_time.main()
    (ratio,) = compare.BENCHMARKS[0].ratios_in(capsys.readouterr().out).values()
    assert ratio > 0
