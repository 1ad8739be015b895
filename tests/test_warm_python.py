# SPDX-License-Identifier: Apache-2.0
"""What a program sees of a warm Python is what it sees of Python."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.warm_python import ENVIRONMENT, interpreter

SEES = """
import os, sys, warnings
print(sys.argv[1:], sys.path[:2], __name__, globals().get("__file__"), os.getcwd(), sys.stdin.read())
print([name for name in ("torch", "opacus", "numpy", "scipy", "sympy") if name in sys.modules])
print(sorted(os.environ.items()), sys.warnoptions, sys.flags, sys.stdout.encoding, sys.stdout.line_buffering)
print("to stderr", file=sys.stderr)
if sys.argv[0] == "program.py":  # once is enough
    import torch, opacus
    print(torch.__file__, opacus.__spec__.name, torch.get_num_threads(), torch.cuda.is_initialized(), flush=True)
"""
ENDS = ("sys.exit(7)", "sys.exit('a sentence')", "os._exit(9)", "os.kill(os.getpid(), 9)", "os.abort()", "1 / 0")


def both(*arguments: str, directory: Path) -> tuple[subprocess.CompletedProcess[str], ...]:
    """What Python makes of this command, and what a warm one does."""
    streams = {"input": "typed", "capture_output": True, "text": True}
    environment = ENVIRONMENT | {"COLUMNS": "99"}
    commands = ([*python, *arguments] for python in ([sys.executable], interpreter()))
    return tuple(subprocess.run(command, **streams, cwd=directory, env=environment) for command in commands)


@pytest.mark.parametrize("start", [["program.py"], ["-m", "program"], ["-c", SEES]], ids=["script", "-m", "-c"])
def test_a_program_sees_the_same(start: list[str], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SEES)
    new, warm = both(*start, "--one", "2", directory=tmp_path)
    assert new.returncode == 0, new.stderr
    assert new.stdout.startswith("['--one', '2'] ")
    assert (warm.returncode, warm.stdout, warm.stderr) == (0, new.stdout, new.stderr)


@pytest.mark.parametrize("end", ENDS)
def test_a_program_ends_the_same(end: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(f"import os, sys\n{end}\n")
    new, warm = both("program.py", directory=tmp_path)
    assert new.returncode != 0
    assert (warm.returncode, warm.stderr) == (new.returncode, new.stderr)


def test_another_environment_is_a_new_process() -> None:
    program = "import torch, sys; print(torch.get_num_threads(), sys.orig_argv[1:2])"
    environment = ENVIRONMENT | {"OMP_NUM_THREADS": "2"}
    ran = subprocess.run([*interpreter(), "-c", program], capture_output=True, text=True, env=environment)
    assert ran.stdout == "2 ['-c']\n", ran.stderr


def test_a_test_that_imports_torch_begins_once() -> None:
    """pytest has changed its own variables by then."""
    program = "import os; print('begun', flush=True); os.environ['PYTEST_CURRENT_TEST'] = 'test_it'; import torch"
    ran = subprocess.run([*interpreter(), "-c", program], capture_output=True, text=True, env=ENVIRONMENT)
    assert (ran.returncode, ran.stdout) == (0, "begun\n")


def test_what_ends_the_command_ends_the_program() -> None:
    program = "import time; print('begun', flush=True); time.sleep(600)"
    command = [*interpreter(), "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "begun\n"
        started.kill()
        assert started.stdout.read() == ""  # it ends when no process has it any more
