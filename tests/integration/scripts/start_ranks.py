# SPDX-License-Identifier: Apache-2.0
"""Runs a program as each rank of a job, in forks of one process.

python start_ranks.py RANKS PROGRAM ARGUMENT...    prints as JSON the exit codes, and what each rank printed
"""

import json
import os
import socket
import sys
import tempfile

from tests.warm_python import run_program


def main() -> None:
    """Ranks of a machine are known by their parent, which is this process."""
    ranks, *arguments = sys.argv[1:]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(int(ranks)):
        output = tempfile.TemporaryFile("w+")  # noqa: SIM115  # open until all have ended
        process = os.fork()
        if process == 0:
            os.environ |= {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            for target in (1, 2):
                os.dup2(output.fileno(), target)
            return run_program(arguments)
        started.append((process, output))
    codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process, _ in started]
    printed = [output.seek(0) or output.read() for _, output in started]
    print(json.dumps([codes, printed]))


if __name__ == "__main__":
    main()
