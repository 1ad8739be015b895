# SPDX-License-Identifier: Apache-2.0
"""The process of one run: `python -m opacus_memprof.experiments DIRECTORY`, started by process.py."""

import ctypes
import os
import signal
import sys
import warnings
from pathlib import Path

from opacus_memprof import virtual_gpu
from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments.configuration import Configuration
from opacus_memprof.experiments.files import rank_result_file, read_json, write_json
from opacus_memprof.experiments.process import CONFIGURATION, PROFILE_DIRECTORY, RESULT
from opacus_memprof.integrations.hub import use_cache_if_hub_unreachable

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Trains the configuration in configuration.json, and writes result.json."""
    # If the process that waits for this run is killed, the run ends too, and frees its GPU.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    warnings.simplefilter("ignore")  # advice of Opacus and torch to authors of training scripts
    directory = Path(sys.argv[1])
    if os.environ.get("RANK", "0") != "0":
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (what all ranks say, one says)
    configuration = Configuration.from_json(read_json(directory / CONFIGURATION))
    if configuration.virtual_gpu is not None and not _start_virtual_gpu(configuration, directory):
        return
    if configuration.pretrained:
        use_cache_if_hub_unreachable()
    from opacus_memprof.experiments.training import leave_group, train  # loads torch

    result = train(configuration, directory / PROFILE_DIRECTORY)
    write_json(directory / rank_result_file(RESULT), result)
    if configuration.nproc > 1:
        if result.status != "finished":
            os._exit(1)  # the launcher then ends the others, which wait for this process
        leave_group()


def _start_virtual_gpu(configuration: Configuration, directory: Path) -> bool:
    """Starts the virtual GPUs of a configuration.

    If that is not possible, writes a result with the reason and returns False.
    """
    assert configuration.virtual_gpu is not None
    try:
        virtual_gpu.load_no_weights()  # nobody would read their values
        virtual_gpu.start(configuration.virtual_gpu, memory=configuration.virtual_memory, count=configuration.nproc)
        return True
    except MemprofError as error:
        from opacus_memprof.experiments.result import ProgressLog, build_result

        profile = directory / PROFILE_DIRECTORY
        result = build_result(configuration, ProgressLog(), None, profile, error, profile)
        write_json(directory / rank_result_file(RESULT), result)
        return False


if __name__ == "__main__":
    main()
