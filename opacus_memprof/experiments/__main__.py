# SPDX-License-Identifier: Apache-2.0
"""The process of one run: `python -m opacus_memprof.experiments DIRECTORY`, which process.py starts."""

import ctypes
import os
import signal
import sys
import warnings
from pathlib import Path

from opacus_memprof import virtual_gpu
from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments.configuration import Configuration
from opacus_memprof.experiments.files import read_json, write_json
from opacus_memprof.experiments.process import CONFIGURATION, PROFILE, RESULT
from opacus_memprof.integrations.hub import use_cache_if_hub_unreachable

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Trains what configuration.json says, and leaves result.json."""
    # Whoever kills the one that waits for this run wants no GPU to stay busy.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    warnings.simplefilter("ignore")  # Opacus' and torch's advice to those who write training scripts
    directory = Path(sys.argv[1])
    if os.environ.get("RANK", "0") != "0":
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (what all ranks say, one says)
    configuration = Configuration.from_json(read_json(directory / CONFIGURATION))
    if configuration.virtual_gpu is not None and not _start_virtual_gpu(configuration, directory):
        return
    if configuration.pretrained:
        use_cache_if_hub_unreachable()
    from opacus_memprof.experiments.ranks import leave, result_file  # loads torch
    from opacus_memprof.experiments.training import train

    result = train(configuration, directory / PROFILE)
    write_json(directory / result_file(RESULT), result)
    if configuration.nproc > 1:
        if result["status"] != "finished":
            os._exit(1)  # the launcher then ends the others, which wait for this process
        leave()


def _start_virtual_gpu(configuration: Configuration, directory: Path) -> bool:
    """Without it the training cannot be run on this machine, which result.json says then."""
    assert configuration.virtual_gpu is not None
    try:
        virtual_gpu.load_no_weights()  # whose values nobody would read
        virtual_gpu.start(configuration.virtual_gpu, memory=configuration.virtual_memory, count=configuration.nproc)
        return True
    except MemprofError as error:
        from opacus_memprof.experiments.ranks import result_file  # loads torch
        from opacus_memprof.experiments.result import RunProgress, result_of

        profile = directory / PROFILE
        result = result_of(configuration, RunProgress(), None, profile, error, profile)
        write_json(directory / result_file(RESULT), result)
        return False


if __name__ == "__main__":
    main()
