# SPDX-License-Identifier: Apache-2.0
"""Other frameworks, trackers, notebooks and running programs.

Each file of this folder needs its framework only. This one has a notebook's magics, and what `opacus-memprof attach`
runs in the process of the program.
"""

import atexit
import gc
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.directory import DEFAULT_DIRECTORY


def register_magics(shell: Any) -> None:
    """Gives a notebook `%%memprof` and `%memprof_report`.

    Args:
        shell: IPython's shell.
    """

    def memprof(line: str, cell: str) -> Any:
        """`%%memprof [DIR]` profiles a cell into DIR, and shows the report below it.

        Follows the models and optimizers that the notebook has in variables, and what a PrivacyEngine makes private.
        """
        from opacus_memprof.hooks.vocabulary import find
        from opacus_memprof.session import profile

        with profile(_directory(line)) as session:
            if (engine := find("opacus", "PrivacyEngine")) is not None:
                session.attach(engine)
            session.attach(*_trained(shell.user_ns))
            exec(compile(shell.transform_cell(cell), "<%%memprof>", "exec"), shell.user_ns)
        return session  # which the notebook shows

    def memprof_report(line: str) -> Any:
        """`%memprof_report [DIR]` shows the report of a profile."""
        from IPython.display import HTML

        from opacus_memprof.analysis.job_view import load_view
        from opacus_memprof.reports.html.report_page import framed

        return HTML(framed(load_view(_directory(line))))  # type: ignore[no-untyped-call]

    shell.register_magic_function(memprof, "cell")
    shell.register_magic_function(memprof_report, "line")


def _trained(variables: Mapping[str, Any]) -> list[Any]:
    """Returns the models and optimizers in variables, without modules that are inside others."""
    from torch import nn
    from torch.optim import Optimizer

    values = {id(value): value for value in variables.values()}.values()
    modules = [value for value in values if isinstance(value, nn.Module)]
    inside = {id(part) for module in modules for part in module.modules() if part is not module}
    models = [module for module in modules if id(module) not in inside]
    return [*models, *(value for value in values if isinstance(value, Optimizer))]


def begin_recording(directory: str) -> None:
    """Starts a session in this process, whose program runs already, and follows its models and optimizers.

    Args:
        directory: the directory of the profile, which is written at the latest when the process ends.

    Raises:
        MemprofError: the program has not imported torch, or see Session.start.
    """
    if "torch" not in sys.modules:
        raise MemprofError("the program has not imported torch: attach to it when it trains")
    from opacus_memprof.hooks.vocabulary import find
    from opacus_memprof.session import profile

    session = profile(directory)
    session.start()
    if (engine := find("opacus", "PrivacyEngine")) is not None:
        session.attach(engine)
    session.attach(*_in_training())
    atexit.register(end_recording)


def end_recording() -> None:
    """Ends the session of `begin_recording`, if it runs, and writes its profile."""
    from opacus_memprof.session import current

    atexit.unregister(end_recording)
    if (session := current()) is not None:
        session.close()


def _in_training() -> list[Any]:
    """Returns the optimizers of this process, except those inside others, and the models that they train."""
    from torch import nn
    from torch.optim import Optimizer

    living = gc.get_objects()  # by type, because isinstance asks objects that import modules when they are asked
    optimizers = [each for each in living if issubclass(type(each), Optimizer)]
    trained = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    modules = [each for each in living if issubclass(type(each), nn.Module)]
    models = [module for module in modules if any(id(p) in trained for p in module.parameters())]
    inside = {id(getattr(optimizer, "original_optimizer", None)) for optimizer in optimizers}
    return _trained({str(id(each)): each for each in (*models, *optimizers) if id(each) not in inside})


def _directory(line: str) -> str:
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise MemprofError(f"{line!r} is not a directory ({error}): close its quotes") from error
    if len(words) > 1:
        raise MemprofError(f"{line!r} is more than one directory: give one, or none for {DEFAULT_DIRECTORY}")
    return words[0] if words else DEFAULT_DIRECTORY
