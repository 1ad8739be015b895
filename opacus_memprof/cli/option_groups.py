# SPDX-License-Identifier: Apache-2.0
"""Option groups: options that several commands share, declared once as the fields of a dataclass; and the panels of
--help, in which the options of commands with many of them stand."""

import copy
import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import wraps
from typing import Annotated, Any, get_args

# Panel → the parameters whose options it has, in every command. Other options stand in the panel "Options".
PANELS = {
    "Model and data": (
        *("config", "model_name", "token", "dataset"),
        *("vocab_size", "hidden_dim", "num_layers", "num_heads", "use_lora", "lora_rank", "lora_ranks"),
    ),
    "Training": (
        *("mode", "seq_length", "seq_lengths", "batch_size", "batch_sizes"),
        *("max_physical_batch_size", "max_physical_batch_sizes", "num_steps", "warmup_steps"),
        *("learning_rate", "sigma", "max_grad_norm", "checkpointing", "dtype"),
    ),
    "Comparison": ("search", "modes", "settings", "steps"),
    "Machine": (
        *("device", "gpu", "memory", "gpus", "nproc", "launcher", "launcher_option", "pause"),
        *("virtual_gpu", "virtual_memory", "virtual_gpus", "virtual_ranks", "rank", "no_weights"),
    ),
    "Results": ("output", "results_dir", "resume", "detailed", "run_all", "max_events"),
}
_PANEL = {parameter: panel for panel, parameters in PANELS.items() for parameter in parameters}


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Returns the command with a signature that typer understands: each parameter whose type is a dataclass is replaced
    by the fields of that class, and each option has its panel of PANELS."""
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

    by_keyword = [
        option.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=_annotation_in_panel(option)) for option in flat
    ]
    vars(grouped)["__signature__"] = inspect.Signature(by_keyword)
    grouped.__annotations__ = {option.name: option.annotation for option in by_keyword}
    return grouped


def _annotation_in_panel(option: inspect.Parameter) -> Any:
    """The annotation of an option, with its panel; as it is, if the option has none."""
    if option.name not in _PANEL:
        return option.annotation
    kind, info = get_args(option.annotation)
    shown = copy.copy(info)  # groups share it
    shown.rich_help_panel = _PANEL[option.name]
    return Annotated[kind, shown]
