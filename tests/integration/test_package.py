# SPDX-License-Identifier: Apache-2.0
"""The package as a whole, in processes that import nothing else first: its names, and what it hands to torch and C."""

import ast
import ctypes
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import opacus_memprof
from opacus_memprof import clipping
from opacus_memprof.recording import native


def python(program: str) -> str:
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def test_importing_the_package_is_cheap() -> None:
    assert (
        python("import opacus_memprof, sys; print('torch' in sys.modules, 'opacus' in sys.modules)") == "False False\n"
    )


@pytest.mark.parametrize("package", [opacus_memprof, clipping])
def test_every_public_name_is_there(package: ModuleType) -> None:
    assert package.__all__
    for name in package.__all__:
        assert getattr(package, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        package.nothing  # noqa: B018


@pytest.mark.parametrize("package", [opacus_memprof, clipping])
def test_type_checkers_know_every_public_name(package: ModuleType) -> None:
    """They read the imports under TYPE_CHECKING; Python reads the table of modules."""
    assert package.__file__ is not None
    tree = ast.parse(Path(package.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert sorted(alias.name for node in imports for alias in node.names) == sorted(package.__all__)


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
