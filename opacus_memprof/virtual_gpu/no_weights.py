# SPDX-License-Identifier: Apache-2.0
"""Models of transformers from their configuration alone: `from_pretrained` reads and downloads no weights.

Parameters are address space that nothing has touched, so that a model of any size takes no memory of the host before
it goes to a virtual GPU, which does not read it either. What is small (norms, biases, rotary frequencies) has the
values that transformers initializes it with.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opacus_memprof.errors import MemprofError
from opacus_memprof.imports import AfterImport

# What a configuration would take for settings of its own, and what says how weights are read.
_LOADING = (
    *("attn_implementation", "device_map", "device_mesh", "distributed_config", "dtype", "experts_implementation"),
    *("generation_config", "low_cpu_mem_usage", "max_memory", "offload_buffers", "offload_folder"),
    *("output_loading_info", "torch_dtype", "tp_plan", "tp_size", "trust_remote_code"),
)
_OF_FILES = ("use_safetensors", "variant", "weights_only", "key_mapping", "ignore_mismatched_sizes", "disable_mmap")
_OF_THE_HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def load_no_weights() -> None:
    """From now on, and in this process, `from_pretrained` of transformers' models loads no weights."""
    AfterImport("transformers.modeling_utils", _replace)


def _replace() -> None:
    from transformers import modeling_utils as module

    modeling_utils: Any = module
    model_class: Any = modeling_utils.PreTrainedModel
    load = model_class.from_pretrained.__func__

    def from_pretrained(cls: Any, path: Any, *args: Any, config: Any = None, **options: Any) -> Any:
        if path is None or options.get("state_dict") is not None:
            return load(cls, path, *args, config=config, **options)
        _refuse(path, options.get("gguf_file"), "a GGUF file")
        _refuse(path, options.get("quantization_config"), "quantized weights")
        loading = {name: options.pop(name) for name in _LOADING if name in options}
        hub = {name: options.pop(name) for name in _OF_THE_HUB if name in options}
        options = {name: value for name, value in options.items() if name not in _OF_FILES}
        if not isinstance(config, modeling_utils.PreTrainedConfig):
            where = path if config is None else config
            config, options = cls.config_class.from_pretrained(where, return_unused_kwargs=True, **hub, **options)
        _refuse(path, getattr(config, "quantization_config", None), "quantized weights")
        loading["dtype"] = _dtype(config, loading.pop("dtype", None) or loading.pop("torch_dtype", None))
        loading.pop("torch_dtype", None)
        with _without_large_values(), _quiet():
            model = load(cls, None, *args, config=config, state_dict={}, **loading, **options)
        (model[0] if isinstance(model, tuple) else model).config.name_or_path = str(path)
        return model

    replacement: Any = from_pretrained
    model_class.from_pretrained = classmethod(functools.wraps(load)(replacement))


def _refuse(path: Any, asked: Any, what: str) -> None:
    if asked is not None:
        raise MemprofError(
            f'"{path}" has {what}, which are made from the weights themselves: leave --no-weights out, or load the '
            "model in bfloat16"
        )


def _dtype(config: Any, asked: Any) -> Any:
    """The weights' own where nobody asks for another; as a checkpoint's that does not say, float32."""
    import torch

    own = getattr(config, "dtype", None)
    return (torch.float32 if own is None else own) if asked in (None, "auto") else asked


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers would list every weight that is not there."""
    from transformers.utils import logging as module

    logging: Any = module
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _without_large_values() -> Iterator[None]:
    """Nothing is written into large tensors, whatever initializes them, so that their pages do not come into being."""
    from opacus_memprof.virtual_gpu import untouched

    mode: Any = untouched.UntouchedTensors
    with mode():
        yield
