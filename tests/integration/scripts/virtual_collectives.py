# SPDX-License-Identifier: Apache-2.0
"""RANK RANKS [large]: simulates a rank, and prints what collectives give it."""

import json
import resource
import sys
from typing import Any

from opacus_memprof import virtual_gpu

RANK, RANKS = int(sys.argv[1]), int(sys.argv[2])
virtual_gpu.start("h100", count=8)
virtual_gpu.simulate_rank(RANK, RANKS)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch._C._distributed_c10d import FakeProcessGroup  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

torch.cuda.set_device(dist.get_node_local_rank())


def on_gpu(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).cuda()


def reduced(values: torch.Tensor, **options: Any) -> list[float]:
    dist.all_reduce(values, **options)
    return [float(value) for value in values.cpu()]


def print_large() -> None:
    dist.init_process_group("nccl")
    parts = torch.empty(16 * 2**20).cuda()
    whole = torch.empty(RANKS * parts.numel(), device="cuda")
    dist.all_gather_into_tensor(whole, parts)
    dist.all_reduce(parts)
    dist.reduce_scatter_tensor(parts, whole)
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"gathered_bytes": whole.nbytes, "rss_bytes": rss}))


def print_small() -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl")
    types = [torch.int32, torch.int64, torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64]
    found: dict[str, Any] = {"sums": {str(dtype): reduced(on_gpu(1, 2, 3, dtype=dtype)) for dtype in types}}
    dist.monitored_barrier()
    found["average"] = reduced(on_gpu(1, 2, 3), op=dist.ReduceOp.AVG)
    found["largest"] = reduced(on_gpu(1, 2, 3), op=dist.ReduceOp.MAX)
    found["product"] = reduced(on_gpu(1, 2), op=dist.ReduceOp.PRODUCT)
    whole = torch.zeros(2 * RANKS).cuda()
    dist.all_gather_into_tensor(whole, on_gpu(1, 2))
    found["gathered"] = whole.tolist()
    part = torch.zeros(2).cuda()
    dist.reduce_scatter_tensor(part, on_gpu(*range(2 * RANKS)))
    found["scattered"] = part.tolist()
    exchanged = torch.zeros(RANKS).cuda()
    dist.all_to_all_single(exchanged, on_gpu(*range(RANKS)))
    found["exchanged"] = exchanged.tolist()
    received = torch.zeros(3).cuda()
    send = dist.P2POp(dist.isend, on_gpu(7, 7, 7), (RANK + 1) % RANKS)
    for work in dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, received, (RANK - 1) % RANKS)]):
        work.wait()
    found["ring"] = received.tolist()
    mesh = init_device_mesh("cuda", (2, RANKS // 2), mesh_dim_names=("replicas", "shards"))
    found["in_groups"] = {
        "new_group of 3": reduced(on_gpu(1), group=dist.new_group([0, 3, RANK]))[0],
        "mesh of 2": reduced(on_gpu(1), group=mesh.get_group("replicas"))[0],
        "mesh of 4": reduced(on_gpu(1), group=mesh.get_group("shards"))[0],
    }
    if hasattr(FakeProcessGroup.Options(), "simulate_uniform_ranks"):  # before torch 2.12 it reduces nothing
        found["sums"]["of a CPU tensor"] = reduced(torch.tensor([1.0, 2, 3]))
        group = dist.new_group([0, 1, 2, RANK], backend="gloo")
        found["in_groups"]["gloo of 4"] = reduced(torch.ones(1), group=group)[0]
    # Of all 16-bit floats: three times the value, rounded as torch rounds on the CPU.
    three = dist.new_group([0, 4, RANK])
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    found["rounded"] = {}
    for dtype in (torch.float16, torch.bfloat16):
        values = every.view(dtype).cuda()
        dist.all_reduce(values, group=three)
        expected = (every.view(dtype).double() * 3).float().to(dtype)
        found["rounded"][str(dtype)] = torch.equal(values.cpu().nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))
    objects: list[Any] = [None] * RANKS
    dist.all_gather_object(objects, {"rank": RANK})
    found["objects"] = objects
    found["broadcast"] = [{"rank": RANK}, 3]
    dist.broadcast_object_list(found["broadcast"], src=0)
    print(json.dumps(found))


print_large() if sys.argv[3:] else print_small()
dist.destroy_process_group()
