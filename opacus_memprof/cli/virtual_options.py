# SPDX-License-Identifier: Apache-2.0
"""The options of commands that run a program on virtual GPUs."""

import os
import uuid
from dataclasses import dataclass
from typing import Annotated

import typer

from opacus_memprof import virtual_gpu
from opacus_memprof.cli.forked import one_process_for_each
from opacus_memprof.errors import MemprofError
from opacus_memprof.units import parse_size


@dataclass(frozen=True)
class VirtualGpuOptions:
    """What kind of GPU to play, how large, and how many; and which ranks of a job."""

    virtual_gpu: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="Run without a GPU, on books of one that compute nothing: h200, a100-40 … (`doctor` lists them).",
            show_default=False,
        ),
    ] = None
    virtual_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Its memory, as 24GiB, in place of the kind's own.", show_default=False),
    ] = None
    virtual_gpus: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="How many there are; one for each process of a launcher, else 1.", show_default=False
        ),
    ] = None

    virtual_ranks: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Play ranks of a job of N processes, one at a time and without the others.",
            show_default=False,
        ),
    ] = None
    rank: Annotated[
        list[int] | None,
        typer.Option(
            metavar="RANK", help="Which to play (default: 0); may be given several times.", show_default=False
        ),
    ] = None
    no_weights: Annotated[
        bool,
        typer.Option(
            "--no-weights",
            help="transformers' from_pretrained makes models from their configuration, and loads nothing.",
        ),
    ] = False

    def start(self) -> bool:
        """Gives this process the virtual GPUs; False where none were asked for.

        Raises:
            MemprofError: options that do not go together or that make no sense, or a virtual GPU cannot work here.
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
            rank = one_process_for_each(ranks)
            virtual_gpu.start(self.virtual_gpu, memory=memory, count=count)
            virtual_gpu.play_rank(rank, self.virtual_ranks, gpus=count, job=job, ranks=ranks)
            return True
        if self.rank is not None:
            raise MemprofError("--rank is one of the ranks of a job: add --virtual-ranks N")
        count = _processes_here() if self.virtual_gpus is None else self.virtual_gpus
        virtual_gpu.start(self.virtual_gpu, memory=memory, count=count)
        return True


def _processes_here() -> int:
    """How many processes a launcher (torchrun, accelerate) has started on this machine, of which each takes a GPU."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not text.isdecimal():
        raise MemprofError(f"LOCAL_WORLD_SIZE is {text!r} and should be a number: correct it, or give --virtual-gpus")
    return max(int(text), 1)
