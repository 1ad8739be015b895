# SPDX-License-Identifier: Apache-2.0
"""Groups categories into a few types of memory, such as parameters, optimizer and gradients."""

from opacus_memprof.profiles.profile import Peak, Sizes

OTHER = "other"

# `privacy` has the categories that only Opacus needs.
MEMORY_TYPES = {
    "parameters": ("model_parameters", "buffers", "unsharded_parameters"),
    "optimizer": ("optimizer_states",),
    "gradients": ("gradients", "unsharded_gradients"),
    "activations": ("activations", "activation_hooks_shared", "forward_undecided", "inputs"),
    "privacy": (
        "activation_hooks_opacus_only",
        "backprop_copies",
        "per_sample_gradients",
        "temp_matrices",
        "norm_samples",
        "clipping_temporaries",
        "summed_gradients",
        "noise",
    ),
    "temporaries": ("forward_temporaries", "backward_temporaries", "optimizer_temporaries"),
    OTHER: (),
}
_TYPE_OF = {category: name for name, categories in MEMORY_TYPES.items() for category in categories}


def memory_types(peak: Peak) -> Sizes:
    """Returns the bytes of a peak by type of memory. Their sum is the requested bytes."""
    split = peak.activation_hooks
    categories = {
        **{name: size for name, size in peak.categories.items() if name != "activation_hooks"},
        "activation_hooks_shared": split.shared_with_autograd,
        "activation_hooks_opacus_only": split.opacus_only,
    }
    sums = dict.fromkeys(MEMORY_TYPES, 0)
    for category, size in categories.items():
        sums[_TYPE_OF.get(category, OTHER)] += size
    return sums
