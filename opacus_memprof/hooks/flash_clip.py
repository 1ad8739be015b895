# SPDX-License-Identifier: Apache-2.0
"""grad_sample_mode="flash_clip": what its book keeps from each layer's backward until the optimizer's step.

The step itself is an Opacus optimizer's: optimizer.py follows its clipping and noise.
"""

import functools
from collections.abc import Callable
from typing import Any

from opacus_memprof import _native
from opacus_memprof.clipping.book import Book
from opacus_memprof.hooks.attach import Attachment
from opacus_memprof.hooks.vocabulary import TEMP_MATRICES

_TAKE = _native.op_id("flash_clip")
# A layer's input is the one of them that forward has made: autograd lets go of it right after the book has taken it.
_CATEGORIES = {
    name: _native.category_id("activation_hooks_opacus_only" if name == "activation_hooks" else name)
    for name in ("activation_hooks", "backprop_copies", "norm_samples", "per_sample_gradients", "summed_gradients")
}
_FROM_ELSEWHERE = tuple(
    _native.category_id(name) for name in ("forward_undecided", "backward_temporaries", "temp_matrices")
)


def follow_book(attachment: Attachment) -> None:
    """On the class: a copy of a model has a book of its own."""
    attachment.replace_attribute(Book, "take", _taking(Book.take))


def _taking(take: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(take)
    def wrapper(self: Book, layer: Any, x: Any, g: Any) -> None:
        module = _native.owner_of(next(iter(layer.trainable())))
        with _tag(module):
            take(self, layer, x, g)
        for category, tensor in self.taken(layer):
            _native.retag_if(tensor, _FROM_ELSEWHERE, _CATEGORIES[category], module)

    return wrapper


@functools.cache
def _tag(module: int) -> _native.Tag:
    return _native.Tag(category=TEMP_MATRICES, module=module, op=_TAKE)
