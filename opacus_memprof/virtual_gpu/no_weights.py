# SPDX-License-Identifier: Apache-2.0
"""Patches transformers' `from_pretrained` to create models from their configuration, without weights.

Weights are neither downloaded nor read. Large parameters are allocated but never written, so that their pages take no
host memory; a virtual GPU does not read them either. Small ones (norms, biases, rotary frequencies) have the values
with which transformers initializes them.

Imports torch.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opacus_memprof.errors import MemprofError

# Options of `from_pretrained` for loading (a configuration would mistake them for its settings), files and the hub.
_LOADING_OPTIONS = (
    *("attn_implementation", "device_map", "device_mesh", "distributed_config", "dtype", "experts_implementation"),
    *("generation_config", "low_cpu_mem_usage", "max_memory", "offload_buffers", "offload_folder"),
    *("output_loading_info", "torch_dtype", "tp_plan", "tp_size", "trust_remote_code"),
)
_FILE_OPTIONS = ("use_safetensors", "variant", "weights_only", "key_mapping", "ignore_mismatched_sizes", "disable_mmap")
_HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")

_SMALL = 2**20  # bytes; tensors up to this size are written. Equals kSmall of csrc/virtual_gpu/machine/limits.h

_FACTORIES = {
    getattr(torch.ops.aten, name)
    for name in ("zeros", "ones", "full", "rand", "randn", "zeros_like", "ones_like", "full_like", "rand_like")
}
_COPIES = {torch.ops.aten.clone, torch.ops.aten._to_copy}


def patch_from_pretrained() -> None:
    """Makes `from_pretrained` of transformers' models load no weights."""
    from transformers import modeling_utils as module

    modeling_utils: Any = module
    model_class: Any = modeling_utils.PreTrainedModel
    load = model_class.from_pretrained.__func__
    mode: Any = UnwrittenTensors

    def from_pretrained(cls: Any, path: Any, *args: Any, config: Any = None, **options: Any) -> Any:
        if path is None or options.get("state_dict") is not None:
            return load(cls, path, *args, config=config, **options)
        _refuse(path, options.get("gguf_file"), "a GGUF file")
        _refuse(path, options.get("quantization_config"), "quantized weights")
        loading = {name: options.pop(name) for name in _LOADING_OPTIONS if name in options}
        hub = {name: options.pop(name) for name in _HUB_OPTIONS if name in options}
        options = {name: value for name, value in options.items() if name not in _FILE_OPTIONS}
        if not isinstance(config, modeling_utils.PreTrainedConfig):
            source = path if config is None else config
            config, options = cls.config_class.from_pretrained(source, return_unused_kwargs=True, **hub, **options)
        _refuse(path, getattr(config, "quantization_config", None), "quantized weights")
        loading["dtype"] = _dtype(config, loading.pop("dtype", None) or loading.pop("torch_dtype", None))
        loading.pop("torch_dtype", None)
        with mode(), _quiet():
            model = load(cls, None, *args, config=config, state_dict={}, **loading, **options)
        (model[0] if isinstance(model, tuple) else model).config.name_or_path = str(path)
        return model

    replacement: Any = from_pretrained
    model_class.from_pretrained = classmethod(functools.wraps(load)(replacement))


def _refuse(path: Any, option: Any, description: str) -> None:
    """Raises MemprofError if `option` is set, because it needs the values of the weights."""
    if option is not None:
        raise MemprofError(
            f'"{path}" has {description}, which are made from the weights themselves: leave --no-weights out, or load '
            "the model in bfloat16"
        )


def _dtype(config: Any, requested: Any) -> Any:
    """Returns the requested dtype. Default: that of the configuration, or float32 if it has none."""
    default = getattr(config, "dtype", None)
    return (torch.float32 if default is None else default) if requested in (None, "auto") else requested


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences transformers, which would list every missing weight."""
    from transformers.utils import logging as module

    logging: Any = module
    verbosity, has_progress_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_progress_bar:
            logging.enable_progress_bar()


class UnwrittenTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that leaves tensors of more than `_SMALL` bytes unwritten, so that their pages are never mapped.

    It skips in-place operations (as in torch.nn.init), copies and factory functions.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        packet = func.overloadpacket
        if packet in _FACTORIES:
            template = func(*args, **(kwargs | {"device": "meta"}))
            if _bytes(template) > _SMALL:
                device = kwargs.get("device") or (args[0].device if isinstance(args[0], torch.Tensor) else None)
                return torch.empty_like(template, device=device or torch.get_default_device())
        elif packet in _COPIES and _bytes(args[0]) > _SMALL and args[0].device.type == "cpu":
            options = {name: kwargs[name] for name in ("dtype", "device") if kwargs.get(name) is not None}
            return torch.empty_like(args[0], **options)
        elif args and _is_in_place(func) and _bytes(args[0]) > _SMALL:
            return args[0]
        return func(*args, **kwargs)


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _is_in_place(func: Any) -> bool:
    """Returns whether an operation writes the values of its first argument, as opposed to its shape or storage."""
    name = func.overloadpacket.__name__
    return (
        name.endswith("_") and not name.endswith("__") and name not in ("set_", "resize_", "detach_", "requires_grad_")
    )
