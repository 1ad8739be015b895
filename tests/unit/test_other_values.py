# SPDX-License-Identifier: Apache-2.0
"""What tensors are in batches with some other samples."""

import weakref
from typing import Any

import torch

from opacus_memprof.clipping.forwards.state import PLAIN
from opacus_memprof.clipping.module.other_values import OtherValues


def test_a_mode_that_ends_while_gone_tensors_are_forgotten() -> None:
    """As when garbage collection frees its model at that moment."""
    values = OtherValues(batch=4, size=0)
    tensors = [torch.randn(4, 3) for _ in range(3)]
    for x in tensors:
        values.add(x, PLAIN)

    class Ending:
        def expired(self) -> bool:
            values.clear()
            return False

    table: dict[int, Any] = values._others
    for key, (_, storages) in list(table.items()):
        table[key] = Ending(), storages
    assert not values.has_computed()  # they are the program's data
    values.prune()


def test_a_kept_sample_has_its_own_values_in_each_plan() -> None:
    values = OtherValues(batch=4, size=0)
    x = torch.arange(12.0).view(4, 3)
    values.add(x, PLAIN)
    assert len(values.kept) >= 2
    for plan, kept in enumerate(values.kept):
        other = values.other(x, plan)
        assert other is not None
        assert torch.equal(other[kept], x[kept])
        assert not torch.equal(other[~kept], x[~kept])


def test_what_is_written_in_place_has_memory_of_its_own() -> None:
    values = OtherValues(batch=4, size=0)
    x = torch.zeros(4, 3)
    values.write(x, [0])
    other = values.other(x, 0)
    assert other is not None
    other += 1
    assert values.is_changed(x, 0)
    assert not values.is_changed(x, 1)
    assert float(x.sum()) == 0


def test_what_gone_tensors_were_in_other_shapes_and_places_is_freed() -> None:
    values = OtherValues(batch=4, size=0)
    x, longer = torch.ones(2), torch.ones(3)
    values.add_output(x, {0: longer})
    values.set_view(x[1], {0: longer[2]})
    assert values.in_plan(x, 0) is longer
    gone = weakref.ref(longer)
    del x, longer
    values.prune()
    assert gone() is None
    assert not values.take_view(torch.ones(2)[1])
