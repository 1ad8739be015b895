# SPDX-License-Identifier: Apache-2.0
"""Summaries of tensors, by sample, against the tensors themselves, and of the arguments of calls."""

import pytest
import torch

from opacus_memprof.clipping.arguments import has_sums_checked, is_checked, is_explained
from opacus_memprof.clipping.proof.model_state import Arguments
from opacus_memprof.clipping.proof.recorder import far_apart
from opacus_memprof.clipping.proof.summary import ManyRows, Rows

SHAPES = [(3,), (3, 5), (3, 2, 7), (3, (1 << 17) + 9)]


def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES for _ in range(2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_changed_bit_changes_one_hash(dtype: torch.dtype) -> None:
    for x in tensors(dtype):
        other = x.clone()
        last = other[1].view(-1)[-1]
        last.copy_(torch.nextafter(last, last + 1))
        assert (Rows.of(x).bits == Rows.of(other).bits).tolist() == [True, False, True]


def test_columns_that_change_places_change_the_hash() -> None:
    x = tensors(torch.float32)[-1]
    swapped = torch.cat([x[:, 1 << 17 :], x[:, : 1 << 17]], 1)
    assert not (Rows.of(x).bits == Rows.of(swapped).bits).any()


def test_norms_and_largest_values_are_those_of_the_samples() -> None:
    for x in tensors(torch.float64):
        rows = Rows.of(x)
        assert torch.allclose(rows.norms, x.flatten(1).norm(dim=1) if x.dim() > 1 else x.abs())
        assert torch.equal(rows.largest, x.abs().reshape(3, -1).amax(1))


def test_differences_are_about_as_large_as_those_of_the_samples() -> None:
    x = tensors(torch.float64)[-1]
    other = x.clone()
    other[1] *= 1.01
    found = Rows.of(x).differences(Rows.of(other))
    assert found[[0, 2]].tolist() == [0, 0]
    assert 0.001 < found[1] < 0.1


@pytest.mark.parametrize("most_bytes", [1, 1 << 30])
def test_many_tensors_are_summarized_as_each_alone(most_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ManyRows, "_MOST_BYTES", most_bytes)
    many, each = ManyRows(3), [x for dtype in (torch.float32, torch.bfloat16) for x in tensors(dtype)]
    for x in each:
        many.add(x)
    bits, projections, norms, largest = many.numbers()
    for n, x in enumerate(each):
        alone = Rows.of(x)
        assert torch.equal(bits[n], alone.bits)
        assert torch.allclose(projections[n], alone.projections.double(), rtol=1e-3, atol=1e-2)
        assert torch.allclose(norms[n], alone.norms.double())
        assert torch.equal(largest[n], alone.largest.double())


def test_a_tensor_without_a_row_for_each_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="no rows for 3 samples"):
        ManyRows(3).add(torch.zeros(4, 2))


def test_sometimes_is_powers_of_two_then_thousands() -> None:
    steps = range(1, 4001)
    assert [n for n in steps if is_checked("sometimes", n)] == [2**k for k in range(11)] + [2000, 3000, 4000]
    assert [n for n in steps if is_explained("sometimes", n)] == [1, 8, 64, 512, 2000, 3000, 4000]
    checked = [n for n in steps if is_checked("sometimes", n) and has_sums_checked("sometimes", n)]
    assert checked == [4, 16, 256, 1024]


@pytest.mark.parametrize("step", [1, 2, 3, 64, 1000])
def test_always_checks_everything_in_each_step(step: int) -> None:
    assert is_checked("always", step)
    assert is_explained("always", step)
    assert has_sums_checked("always", step)


@pytest.mark.parametrize(("dtype", "is_far"), [(torch.float32, False), (torch.float64, True)])
def test_relu_may_change_sign_in_a_batch_of_another_size(dtype: torch.dtype, is_far: bool) -> None:
    whole = torch.randn(64, 2048, dtype=dtype, generator=torch.Generator().manual_seed(0))
    whole[3, 7] = 1  # of a norm of 45
    alone = whole.clone()
    alone[3, 7] = 0
    kept = torch.ones(64, dtype=torch.bool)
    assert far_apart(Rows.of(whole), Rows.of(alone), kept)
    assert far_apart(Rows.of(whole), Rows.of(alone), kept, may_jump=True) is is_far
    assert far_apart(Rows.of(whole), Rows.of(whole * 1.01), kept, may_jump=True)


@pytest.mark.parametrize("by_name", [False, True])
def test_flags_and_words_make_other_kinds_of_calls(by_name: bool) -> None:
    arguments, x = Arguments(), torch.zeros(4, 3)
    values = [True, False, None, "mean", "sum"]
    calls: list[tuple[tuple[object, ...], dict[str, object]]] = [
        ((x,), {"reduce": each}) if by_name else ((x, each), {}) for each in values
    ]
    kinds = [arguments.signature(args, kwargs, 4) for args, kwargs in (*calls, *calls)]
    assert len(set(kinds)) == len(values)
    assert kinds[: len(values)] == kinds[len(values) :]
