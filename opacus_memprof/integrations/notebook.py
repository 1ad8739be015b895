# SPDX-License-Identifier: Apache-2.0
"""Notebooks: `%load_ext opacus_memprof` gives `%%memprof` and `%memprof_report`."""

import shlex
from collections.abc import Mapping
from typing import Any

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.display import HTML, display
from torch import nn
from torch.optim import Optimizer

from opacus_memprof.analysis.job_view import load_view
from opacus_memprof.errors import MemprofError
from opacus_memprof.hooks.opacus_types import find
from opacus_memprof.profiles.directory import DEFAULT_DIRECTORY
from opacus_memprof.reports.html.report_page import framed
from opacus_memprof.session import profile


@magics_class
class MemprofMagics(Magics):
    """The commands of a notebook."""

    shell: Any  # never None: a notebook has registered them

    @cell_magic
    def memprof(self, line: str, cell: str) -> None:
        """`%%memprof [DIR]` profiles a cell into DIR, and shows the report below it.

        Follows the models and optimizers that the notebook has in variables, and what a PrivacyEngine makes private.
        An exception of the cell ends it as without the profiler.
        """
        with profile(_directory(line)) as session:
            if (engine := find("opacus", "PrivacyEngine")) is not None:
                session.attach(engine)
            session.attach(*_trained(self.shell.user_ns))
            exec(compile(self.shell.transform_cell(cell), "<%%memprof>", "exec"), self.shell.user_ns)
        display(session)  # type: ignore[no-untyped-call]

    @line_magic
    def memprof_report(self, line: str) -> None:
        """`%memprof_report [DIR]` shows the report of a profile."""
        display(HTML(framed(load_view(_directory(line)))))  # type: ignore[no-untyped-call]


def _trained(variables: Mapping[str, Any]) -> list[Any]:
    """Returns the models and optimizers in variables, without modules that are inside others."""
    values = {id(value): value for value in variables.values()}.values()
    modules = [value for value in values if isinstance(value, nn.Module)]
    inside = {id(part) for module in modules for part in module.modules() if part is not module}
    models = [module for module in modules if id(module) not in inside]
    return [*models, *(value for value in values if isinstance(value, Optimizer))]


def _directory(line: str) -> str:
    words = shlex.split(line)
    if len(words) > 1:
        raise MemprofError(f"{line!r} is more than one directory: give one, or none for {DEFAULT_DIRECTORY}")
    return words[0] if words else DEFAULT_DIRECTORY
