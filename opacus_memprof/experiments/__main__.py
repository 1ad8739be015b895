# SPDX-License-Identifier: Apache-2.0
"""The process of one run: `python -m opacus_memprof.experiments DIRECTORY`, which process.py starts."""

import ctypes
import os
import signal
import sys
import warnings
from pathlib import Path

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


if __name__ == "__main__":
    main()
