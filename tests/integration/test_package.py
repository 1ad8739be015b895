# SPDX-License-Identifier: Apache-2.0
"""The package as a whole, in processes that import nothing else first: its names, and what it hands to torch and C."""

import ctypes
import subprocess
import sys

import pytest

import opacus_memprof
from opacus_memprof.recording import native


def python(program: str) -> str:
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def test_importing_the_package_is_cheap() -> None:
    assert (
        python("import opacus_memprof, sys; print('torch' in sys.modules, 'opacus' in sys.modules)") == "False False\n"
    )


def test_every_public_name_is_there() -> None:
    for name in opacus_memprof.__all__:
        assert getattr(opacus_memprof, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        opacus_memprof.nothing  # noqa: B018


def test_too_many_categories_are_refused() -> None:
    program = "import opacus_memprof\nfor i in range(65): opacus_memprof.tag(str(i))"
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "MemprofError: no room for the category" in completed.stderr


@pytest.mark.skipif(not native.HAS_CUDA, reason="built without CUDA")
def test_the_cuda_allocator_goes_where_torch_takes_it() -> None:
    program = """
import opacus_memprof, torch
from opacus_memprof.profiles.categories import REPORTED
from opacus_memprof.recording import native
torch.cuda.memory.change_current_allocator(opacus_memprof.allocator())
print(native.cuda_installed(), torch.cuda.is_initialized())
opacus_memprof.uninstall()
print(native.cuda_installed())
"""
    assert python(program) == "True False\nFalse\n"


@pytest.mark.skipif(not native.HAS_CUDA, reason="built without CUDA")
def test_the_library_has_the_plain_c_entry_points() -> None:
    library = ctypes.CDLL(opacus_memprof.library_path())
    assert library.opacus_memprof_malloc
    assert library.opacus_memprof_free
