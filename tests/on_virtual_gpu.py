# SPDX-License-Identifier: Apache-2.0
"""Python with a virtual GPU: `python -m tests.on_virtual_gpu KIND -m MODULE|-c CODE ...`.

For tests that start programs, which do not inherit the virtual GPU of the process that starts them.
"""

import runpy
import sys

from opacus_memprof import virtual_gpu
from tests import warm_python


def interpreter() -> list[str]:
    """The command of a Python that sees the GPUs that this process sees: forked, where its environment allows it."""
    running = virtual_gpu.active()
    return [*warm_python.interpreter(), "-m", "tests.on_virtual_gpu", running.kind] if running else [sys.executable]


def main() -> None:
    _, kind, option, code, *arguments = sys.argv
    virtual_gpu.start(kind)
    sys.argv = [option, *arguments]
    if option == "-m":
        runpy.run_module(code, run_name="__main__", alter_sys=True)
    else:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
