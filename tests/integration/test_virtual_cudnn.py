# SPDX-License-Identifier: Apache-2.0
"""What cuDNN takes on the virtual H200, against what was measured on a real one and against the sizes of weights.

The numbers are those of benchmarks/virtual_gpu/workspaces.py and recurrent_workspaces.py on an H200 with torch 2.11 and
cuDNN 9.19.
"""

import json
import re
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest

from opacus_memprof.virtual_gpu.requirements import LIBRARIES
from tests.warm_python import ENVIRONMENT, interpreter

ROOT = Path(__file__).parents[2]
LAYERS = ROOT / "tests" / "data" / "recurrent_h200.tsv"
TABLE = ROOT / "opacus_memprof" / "virtual_gpu" / "cudnn_workspaces.tsv"
needs_libraries = pytest.mark.skipif(not (LIBRARIES / "libcuda.so.1").is_file(), reason="the virtual GPU was not built")


def run(code: str) -> dict[str, Any]:
    """What the program prints last, on a virtual H200."""
    start = "from opacus_memprof.virtual_gpu import start\nstart('h200')\nimport json, torch\n"
    done = subprocess.run(
        [*interpreter(), "-c", start + textwrap.dedent(code)],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@needs_libraries
def test_workspaces_of_convolutions() -> None:
    found = run("""
        conv, gradient = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default

        def workspace(call):  # what was live beside the result
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_stats()["requested_bytes.all.current"]
            kept = [tensor for tensor in call() if tensor is not None]
            most = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
            return most - sum(tensor.nbytes for tensor in kept)

        def measure(n, c, o, size, kernel, dtype=torch.float32, layout=torch.contiguous_format):
            make = lambda *shape: torch.empty(shape, device="cuda", dtype=dtype).to(memory_format=layout)
            x, w, y = make(n, c, size, size), make(o, c, kernel, kernel), make(n, o, size, size)
            rest = [1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], 1
            return [
                workspace(lambda: [conv(x, w, None, *rest)]),
                workspace(lambda: gradient(y, x, w, None, *rest, [True, False, False])),
                workspace(lambda: gradient(y, x, w, None, *rest, [False, True, False])),
            ]

        last = torch.channels_last
        found = {
            "in the table": [measure(32, 64, 256, 56, 1), measure(64, 64, 256, 56, 1, torch.bfloat16, last)],
            "between": [measure(40, 64, 256, 56, 1), measure(2731, 64, 64, 8, 3)],
            "product": measure(24, 96, 40, 20, 1, torch.bfloat16),
        }
        torch.backends.cudnn.allow_tf32 = False
        found["plain"] = measure(64, 704, 128, 7, 1)
        torch.backends.cudnn.benchmark = True
        found["tried"] = measure(4, 24, 40, 14, 3)
        found["cudnn"] = torch.backends.cudnn.version()
        print(json.dumps(found))
    """)
    assert found["in the table"] == [[0, 0, 2097152], [0, 0, 4325632]]
    assert found["between"][0] == [200, 0, (2097152 + 3145728) // 2]  # of 40 samples, between 32 and 48
    assert found["between"][1][2] == 91701927  # measured on an H200, and not in the table
    assert found["product"] == [0, 0, 24 * 96 * 40 * 4]  # the weights' gradient of each sample, in fp32
    if found["cudnn"] == 91900:  # this one it chooses itself, and versions differ
        assert found["plain"] == [0, 0, 10436624]
    assert found["tried"][2] > 0  # the most of all engines that were tried


# Bytes on an H100 (cuDNN 9.19) forward (0), for the input's (1) and for the weights' (2) gradient. None is in the
# table, and without a GPU cuDNN itself answers 69 MB to the first, and 1.6 to 8.7 MB too little to the others.
NOT_IN_TABLE = {
    ("100x20x10801 8x20x1 1 0 1 1 - bf16 first", 0): 0,
    ("64x96x23x26 128x96x5x3 1x1 0x0 1x1 1 - tf32 first", 1): 38240675,
    ("8x320x19x48 128x320x5x2 1x1 2x0 1x1 1 - tf32 first", 1): 22499743,
    ("10x64x7983 64x64x3 1 0 1 1 - tf32 first", 2): 43080395,
    ("28x128x1564 72x128x3 1 1 2 1 - bf16 first", 2): 21300263,
    ("50x64x36x95 8x64x5x3 1x1 0x0 1x1 1 - bf16 last", 2): 1720899,
    ("10x64x31x32 64x256x3x2 2x2 1x1 1x1 1 t tf32 last", 2): 3539631,
    ("16x256x17x11x5 160x256x1x1x2 1x1x1 0x0x1 1x1x1 1 - tf32 first", 2): 31330927,
    ("6x128x11x14x22 100x128x2x3x2 1x1x1 1x0x0 1x1x1 1 - tf32 last", 2): 8651487,
}


@needs_libraries
def test_workspaces_that_were_not_measured() -> None:
    found = run(f"""
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        from benchmarks.virtual_gpu.convolution_cases import Conv
        from benchmarks.virtual_gpu.workspace_calls import Trace, measure_convolution

        trace = Trace()
        calls = {list(NOT_IN_TABLE)}
        found = [measure_convolution(Conv.parse(key), trace)[direction] for key, direction in calls]
        print(json.dumps({{"bytes": found, "cudnn": torch.backends.cudnn.version()}}))
    """)
    if found["cudnn"] not in (91900, 92600):
        pytest.skip("another cuDNN may choose other engines")
    for call, expected, temporary in zip(NOT_IN_TABLE, NOT_IN_TABLE.values(), found["bytes"], strict=True):
        assert sum(temporary) == pytest.approx(expected, abs=1024), call  # without the blocks' counters


@needs_libraries
def test_convolutions_that_were_not_measured_are_counted() -> None:
    found = run("""
        from opacus_memprof.virtual_gpu.process import estimated_workspaces

        def count(n, c, o, size, kernel):  # after the gradient of the weights
            x, w, y = (torch.empty(shape, device="cuda") for shape in
                       ((n, c, size, size), (o, c, kernel, kernel), (n, o, size, size)))
            rest = [1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], 1
            torch.ops.aten.convolution_backward(y, x, w, None, *rest, [False, True, False])
            return estimated_workspaces()

        torch.backends.cudnn.allow_tf32 = True
        # In the table, twice between batch sizes in it, and not in it.
        shapes = [(32, 64, 256, 56, 1), (40, 64, 256, 56, 1), (40, 64, 256, 56, 1), (3, 13, 17, 19, 5)]
        print(json.dumps([count(*shape) for shape in shapes]))
    """)
    assert [convolutions for convolutions, _ in found] == [0, 1, 1, 2]
    assert found[0][1] == 0
    assert found[1][1] == (2097152 + 3145728) // 2


@needs_libraries
def test_memory_of_recurrent_layers() -> None:
    found = run("""
        def make(kind, **options):
            torch.manual_seed(0)
            layer = kind(128, 64, **options, device="cuda")
            own = {weight.untyped_storage().data_ptr() for weight in layer.parameters()}
            starts = sorted((weight.data_ptr(), weight.nbytes) for weight in layer.parameters())
            apart = all(start + size <= other for (start, size), (other, _) in zip(starts, starts[1:]))
            weights = next(layer.parameters()).untyped_storage().nbytes()
            return layer, [len(own), apart, weights, sum(weight.nbytes for weight in layer.parameters())]

        def reserve(layer, mode, dropout=0.0):
            x = torch.zeros(32, 64, 128, device="cuda")
            layers, both = layer.num_layers, layer.bidirectional
            state = torch.zeros(layers * (1 + both), 64, 64, device="cuda")
            return torch._VF._cudnn_rnn(
                x, layer._flat_weights, 4, None, state, state if mode == 2 else None, mode, 64, 0, layers, False,
                dropout, True, both, [], None,
            )[3].nbytes

        lstm, lstm_weights = make(torch.nn.LSTM)
        deep, deep_weights = make(torch.nn.LSTM, num_layers=2, bidirectional=True)
        gru, gru_weights = make(torch.nn.GRU, num_layers=2)
        projected, projected_weights = make(torch.nn.LSTM, proj_size=32)
        out, _ = deep(torch.zeros(7, 5, 128, device="cuda"))
        out.sum().backward()
        print(json.dumps({
            "weights": [lstm_weights, deep_weights, gru_weights, projected_weights],
            "reserve": [reserve(lstm, 2), reserve(gru, 3)],
            "dropout": torch._cudnn_init_dropout_state(0.3, True, 0, dtype=torch.uint8, device="cuda").nbytes,
            "gradients": all(weight.grad is not None for weight in deep.parameters()),
        }))
    """)
    for storages, apart, buffer, sizes in found["weights"]:
        assert (storages, apart, buffer) == (1, True, sizes)
    assert found["reserve"] == [2621696, 6816000]
    assert found["dropout"] == 6488064
    assert found["gradients"]


@needs_libraries
def test_dropout_of_recurrent_layers_has_one_state() -> None:
    """As on an H100 (torch 2.11.0+cu130, one NVIDIA H100 80GB HBM3): one for all calls, which draw anew each."""
    found = run("""
        from opacus_memprof.virtual_gpu import values
        values.install()
        torch.cuda.memory._record_memory_history(context=None)
        layer = torch.nn.GRU(64, 256, 3, dropout=0.1).cuda()

        def trained():
            outputs = []
            for _ in range(3):
                outputs.append(layer(torch.ones(4, 2, 64, device="cuda"))[0])
                outputs[-1].sum().backward()
            return [output.sum().item() for output in outputs]

        torch.manual_seed(0)
        first = trained()
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        states = sum(entry["action"] == "alloc" and entry["size"] == 6488064 for entry in trace)
        torch.manual_seed(0)
        print(json.dumps([states, first, trained()]))
    """)
    states, first, again = found
    assert states == 1
    assert len(set(first)) == 3
    assert again == first


@needs_libraries
def test_sizes_of_recurrent_layers() -> None:
    """Workspace, reserve and weights are the ones cuDNN reports on an H200, for layers of all kinds."""
    found = run(f"""
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        from benchmarks.virtual_gpu.recurrent_workspaces import Cudnn, Layer

        torch.zeros(1, device="cuda")
        cudnn = Cudnn()
        lines = open({str(LAYERS)!r}).read().splitlines()[1:]
        wrong = []
        for line in lines:
            words = line.split("\\t")
            numbers = [int(word) for word in words[2:10]]
            flags = [word == "True" for word in words[11:13]]
            layer = Layer(words[0], words[1], *numbers, float(words[10]), *flags)
            sizes = cudnn.sizes(layer)
            if list(sizes) != [int(word) for word in words[13:]]:
                wrong.append([line, sizes])
        print(json.dumps({{"wrong": wrong, "count": len(lines)}}))
    """)
    assert found["count"] > 200
    assert not found["wrong"]


def test_the_table_is_sorted() -> None:
    """Of each convolution for three directions; batch sizes ascend, for the lookup stops at the first that serves."""
    rows = [line.split("\t") for line in TABLE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert {len(row) for row in rows} == {4}
    keys = [row[0].encode() for row in rows]
    assert len(rows) > 2000
    assert keys == sorted(set(keys))
    for field in {field for row in rows for field in row[1:]} - {"", "="}:
        assert re.fullmatch(r"\d+(?:=|:\d+)(?: \d+(?:=|:\d+))*", field), field
        batches = [int(word.partition(":")[0].rstrip("=")) for word in field.split()]
        assert batches == sorted(set(batches))
