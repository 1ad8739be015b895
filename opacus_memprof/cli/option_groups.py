# SPDX-License-Identifier: Apache-2.0
"""Options that several commands have, declared once: as the fields of a dataclass, which is then one parameter."""

import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import wraps
from typing import Any


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer takes it: each parameter that is a dataclass is in its place the fields of that class."""
    groups: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    flat: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        group = parameter.annotation
        if isinstance(group, type) and is_dataclass(group):
            options = inspect.signature(group).parameters
            groups[parameter.name] = group, list(options)
            flat += options.values()
        else:
            flat.append(parameter)

    @wraps(command)
    def grouped(**values: Any) -> None:
        for name, (group, options) in groups.items():
            values[name] = group(**{option: values.pop(option) for option in options})
        command(**values)

    by_keyword = [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in flat]
    vars(grouped)["__signature__"] = inspect.Signature(by_keyword)
    grouped.__annotations__ = {option.name: option.annotation for option in flat}
    return grouped
