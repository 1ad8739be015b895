# SPDX-License-Identifier: Apache-2.0
"""The table of categories: their meaning, colours and properties.

All code that names a category reads this table. tests/unit/test_categories.py compares it with csrc/core/vocabulary.h,
whose numbers are part of the event file's format, and with the table in docs/categories.md.

Related categories have related hues. Model state is blue, memory that autograd saves green, memory that only privacy
needs red to purple, temporaries yellow, communication and libraries turquoise, the rest grey. A search in OKLab
(Ottosson 2020) chose hues, lightness and chroma that maximize the smallest distance between two categories, for people
with normal vision, protanopia and deuteranopia (Machado et al. 2009). The colours work on light and dark backgrounds.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

ACTIVATION_HOOKS: Final = "activation_hooks"
FORWARD_UNDECIDED: Final = "forward_undecided"


@dataclass(frozen=True)
class Category:
    """One row of the table.

    Attributes:
        name: its name in reports, profile.json and `tag`.
        color: `#rrggbb`.
        meaning: a phrase that explains the name.
        per_sample: whether it grows with the number of samples in the batch.
        private: whether only private training has it.
        resident: whether it stays from step to step, with the same size for every mode.
        part: the name in profile.json of a part of activation_hooks, which the live counters count separately;
            otherwise None.
        live: whether only live views have it. A profile has the final category of these bytes instead.
        core: whether the C++ core has an id for it; others get ids like a program's own categories.
    """

    name: str
    color: str
    meaning: str
    per_sample: bool = False
    private: bool = False
    resident: bool = False
    part: str | None = None
    live: bool = False
    core: bool = True


# In the order of a stack, from the bottom: lasting memory first, temporary memory above.
CATEGORIES: Final = (
    # model state
    Category("model_parameters", "#7bbff7", "the model's parameters", resident=True),
    Category("buffers", "#3b64b7", "the model's buffers", resident=True),
    Category(
        "unsharded_parameters",
        "#002a94",
        "parameters that FSDP2 has gathered, for as long as a layer computes",
        core=False,
    ),
    Category("optimizer_states", "#434e92", "what the optimizer keeps from step to step, such as Adam's moments"),
    Category("gradients", "#5c8ce3", "p.grad"),
    Category(
        "unsharded_gradients", "#2103fe", "gradients of whole parameters, until FSDP2 has scattered them", core=False
    ),
    # forward's
    Category("dataset", "#0e7e43", "tensors of the data set that a DataLoader draws from", core=False),
    Category("inputs", "#b6dcac", "the batch", per_sample=True),
    Category("activations", "#92c27f", "made in forward and kept for backward", per_sample=True),
    Category(FORWARD_UNDECIDED, "#648b76", "made in forward; whether kept for backward is not known", live=True),
    # privacy's
    Category(
        ACTIVATION_HOOKS,
        "#f94b01",
        "layer inputs that Opacus' hooks have captured",
        per_sample=True,
        private=True,
        core=False,
    ),
    Category(
        "activation_hooks_shared",
        "#f97a45",
        "captured layer inputs that autograd holds as well",
        part="shared_with_autograd",
    ),
    Category(
        "activation_hooks_opacus_only",
        "#e04300",
        "captured layer inputs that only Opacus holds",
        part="opacus_only",
    ),
    Category(
        "backprop_copies",
        "#fc8431",
        "copies of output gradients that Opacus' hooks make",
        per_sample=True,
        private=True,
    ),
    Category(
        "per_sample_gradients",
        "#cb2a39",
        "a gradient for every sample of the batch, grad_sample",
        per_sample=True,
        private=True,
    ),
    Category(
        "temp_matrices",
        "#9d1910",
        "temporaries of norms and per-sample gradients, such as T×T matrices",  # noqa: RUF001
        per_sample=True,
        private=True,
    ),
    Category("norm_samples", "#fc83c9", "per-sample norms of ghost clipping", per_sample=True, private=True),
    Category(
        "clipping_temporaries",
        "#9347d7",
        "norms, clip factors and products in clipping",
        per_sample=True,
        private=True,
    ),
    Category("summed_gradients", "#823660", "the sum of clipped gradients, summed_grad", private=True),
    Category("noise", "#ac5ca2", "the noise that is added for privacy", private=True),
    # temporaries
    Category("forward_temporaries", "#e6be40", "made and freed within forward", per_sample=True),
    Category("backward_temporaries", "#fdde48", "made and freed within backward", per_sample=True),
    Category("optimizer_temporaries", "#edcf8d", "made and freed within the optimizer's step"),
    # around it
    Category("communication", "#32b6a9", "buckets and reductions of distributed training", resident=True),
    Category("library_workspace", "#86dbd3", "workspaces of cuBLAS and cuDNN", resident=True),
    Category("pending_free", "#8e8d96", "freed by the program, while a side stream still uses it"),
    Category("unattributed", "#686e70", "the rest", resident=True),
)

BY_NAME: Final = {category.name: category for category in CATEGORIES}
# The parts of activation_hooks: the live counters' name → profile.json's.
PARTS: Final = {category.name: category.part for category in CATEGORIES if category.part is not None}
# Categories in profile.json and reports, in the order of a stack; a program's own categories come on top.
REPORTED: Final = tuple(category.name for category in CATEGORIES if category.part is None and not category.live)
PER_SAMPLE: Final = frozenset(category.name for category in CATEGORIES if category.per_sample)
PRIVATE: Final = frozenset(category.name for category in CATEGORIES if category.private)
RESIDENT: Final = frozenset(category.name for category in CATEGORIES if category.resident)
# Categories without ids in the core, which programs and hooks may use.
NOT_IN_CORE: Final = tuple(
    category.name for category in CATEGORIES if not category.core and category.name != ACTIVATION_HOOKS
)


def reported_name(category: str) -> str:
    """Returns the report's name of a live counters' category: both parts of activation_hooks have one name."""
    return ACTIVATION_HOOKS if category in PARTS else category


def name_at_failure(category: str) -> str:
    """Returns the name of a live counters' category in reports of failures.

    There, live blocks of a forward pass count as activations.
    """
    return "activations" if category == FORWARD_UNDECIDED else reported_name(category)


def add_parts(live: Mapping[str, int]) -> dict[str, int]:
    """Converts bytes by category of the live counters to bytes by category of reports."""
    sums: dict[str, int] = {}
    for category, size in live.items():
        name = reported_name(category)
        sums[name] = sums.get(name, 0) + size
    return sums


def as_without_dp(sizes: Mapping[str, int], shared: int) -> dict[str, int]:
    """Returns the bytes by reported category that a run without Opacus would have.

    The `shared` bytes of captures, which autograd holds too, count as activations.
    """
    if not shared:
        return dict(sizes)
    activations = sizes.get("activations", 0) + shared
    return {**sizes, ACTIVATION_HOOKS: sizes.get(ACTIVATION_HOOKS, 0) - shared, "activations": activations}


def stack_order(categories: Iterable[str]) -> list[str]:
    """Sorts categories from the bottom of a stack to its top: in the order of the table, then the program's own."""
    place = {name: index for index, name in enumerate(BY_NAME)}
    return sorted(set(categories), key=lambda category: (place.get(category, len(place)), category))
