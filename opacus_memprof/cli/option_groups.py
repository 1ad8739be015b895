# SPDX-License-Identifier: Apache-2.0
"""Option groups: options that several commands share, declared once as the fields of a dataclass."""

import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import wraps
from typing import Any


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Returns the command with a signature that typer understands: each parameter whose type is a dataclass is replaced
    by the fields of that class."""
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
