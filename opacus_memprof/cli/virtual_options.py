# SPDX-License-Identifier: Apache-2.0
"""The command-line options of commands that run a program on virtual GPUs."""

import os
import uuid
from dataclasses import dataclass
from typing import Annotated

import typer

from opacus_memprof import virtual_gpu
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.units import parse_size
from opacus_memprof.running.fork import fork_for_each

VirtualGpuKind = Annotated[
    str | None,
    typer.Option(
        "--virtual-gpu",
        metavar="KIND",
        help="Run on a virtual GPU, which counts memory but computes nothing: h200, a100-40 … (see `doctor`).",
        show_default=False,
    ),
]
VirtualMemory = Annotated[
    str | None,
    typer.Option(
        "--virtual-memory", metavar="SIZE", help="Its memory, such as 24GiB, instead of the kind's.", show_default=False
    ),
]


@dataclass(frozen=True)
class VirtualGpuOptions:
    """The options of virtual GPUs: their kind, memory and number, and which ranks of a job to run."""

    virtual_gpu: VirtualGpuKind = None
    virtual_memory: VirtualMemory = None
    virtual_gpus: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="How many there are. Default: one for each process of a launcher.", show_default=False
        ),
    ] = None

    virtual_ranks: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Run ranks of a job of N processes, one at a time and without the others.",
            show_default=False,
        ),
    ] = None
    rank: Annotated[
        list[int] | None,
        typer.Option(
            metavar="RANK", help="Which rank to run (default: 0); may be given several times.", show_default=False
        ),
    ] = None
    no_weights: Annotated[
        bool,
        typer.Option(
            "--no-weights",
            help="Let transformers' from_pretrained create models from their configuration, without loading weights.",
        ),
    ] = False

    def start(self) -> bool:
        """Starts the virtual GPUs in this process. Returns False if the options ask for none.

        With several ranks it forks: see `fork_for_each`.

        Raises:
            MemprofError: the options contradict each other, have an invalid value, or a virtual GPU cannot work here.
        """
        if self.virtual_gpu is None:
            for option in ("virtual_memory", "virtual_gpus", "virtual_ranks", "rank", "no_weights"):
                if getattr(self, option) not in (None, False):
                    raise MemprofError(f"--{option.replace('_', '-')} is for a virtual GPU: add --virtual-gpu KIND")
            return False
        if self.no_weights:
            virtual_gpu.load_no_weights()
        memory = None if self.virtual_memory is None else parse_size(self.virtual_memory)
        if self.virtual_ranks is not None:
            ranks = virtual_gpu.check_ranks(self.rank or [], self.virtual_ranks)
            count = virtual_gpu.local_world_size(self.virtual_ranks, self.virtual_gpus)
            job = uuid.uuid4().hex
            rank = fork_for_each(ranks)
            virtual_gpu.start(self.virtual_gpu, memory=memory, count=count)
            virtual_gpu.simulate_rank(rank, self.virtual_ranks, gpus=count, job=job, ranks=ranks)
            return True
        if self.rank is not None:
            raise MemprofError("--rank is one of the ranks of a job: add --virtual-ranks N")
        count = _local_world_size() if self.virtual_gpus is None else self.virtual_gpus
        virtual_gpu.start(self.virtual_gpu, memory=memory, count=count)
        return True


def _local_world_size() -> int:
    """The number of processes that a launcher (torchrun, accelerate) has started on this machine: a GPU for each."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not text.isdecimal():
        raise MemprofError(f"LOCAL_WORLD_SIZE is {text!r} and should be a number: correct it, or give --virtual-gpus")
    return max(int(text), 1)
