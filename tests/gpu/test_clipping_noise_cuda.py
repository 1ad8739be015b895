# SPDX-License-Identifier: Apache-2.0
"""flash_clip's noise on a GPU: the numbers that torch draws there, without memory for them."""

import pytest
import torch

from opacus_memprof.clipping.kernels import noise as noise_triton
from opacus_memprof.clipping.kernels.sums import add_noise

# Below and above the threads that torch draws with on a large GPU (270 336), and above four times as many.
SHAPES = [(), (3,), (0, 4), (17, 5), (256,), (1000, 257), (300000,), (1200, 1200), (3000, 1501)]


def both_generators() -> tuple[torch.Generator, torch.Generator]:
    return torch.Generator("cuda").manual_seed(2**40 + 3), torch.Generator("cuda").manual_seed(2**40 + 3)


def assert_added(total: torch.Tensor, old: torch.Tensor, std: float, generator: torch.Generator) -> None:
    """``total`` is ``old`` and the noise that torch draws next.

    torch draws numbers of a narrower type in float32 and then rounds them. The kernel's logarithm, sine and cosine may
    differ from torch's by 1e-5 before that and hence, for a number between two of the type's, by a whole step after it.
    """
    state = generator.get_state()
    wide = torch.float64 if total.dtype == torch.float64 else torch.float32
    drawn = torch.normal(0, std, total.shape, generator=generator, device="cuda", dtype=wide)
    generator.set_state(state)
    own = torch.normal(0, std, total.shape, generator=generator, device="cuda", dtype=total.dtype)
    slack = 0 if wide == torch.float64 else 1e-5
    low, high = (drawn - slack).to(total.dtype), (drawn + slack).to(total.dtype)
    assert ((low <= own) & (own <= high)).all()
    assert ((old + low <= total) & (total <= old + high)).all()


@pytest.mark.true_numbers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_numbers_are_those_of_torch(dtype: torch.dtype) -> None:
    mine, theirs = both_generators()
    sums = [torch.zeros(shape, dtype=dtype, device="cuda") for shape in SHAPES]
    add_noise(sums, std=1.7, generator=mine, secure_mode=False)
    for total in sums:
        assert_added(total, torch.zeros_like(total), 1.7, theirs)


@pytest.mark.true_numbers
def test_sums_that_differ_and_are_not_contiguous() -> None:
    mine, theirs = both_generators()
    sums = [
        torch.rand(300, 40, device="cuda"),
        torch.rand(40, 30, device="cuda").t(),
        torch.rand(500, device="cuda", dtype=torch.bfloat16),
        torch.rand(70, device="cuda", dtype=torch.float64),
        torch.rand(70, device="cuda"),
    ]
    before = [total.clone() for total in sums]
    add_noise(sums, std=0.5, generator=mine, secure_mode=False)
    for total, old in zip(sums, before, strict=True):
        assert_added(total, old, 0.5, theirs)
    assert torch.equal(mine.get_state(), theirs.get_state())


@pytest.mark.true_numbers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_sums_with_noise_are_divided(dtype: torch.dtype) -> None:
    mine, theirs = both_generators()
    sums = [torch.rand(shape, dtype=dtype, device="cuda") for shape in SHAPES]
    undivided = [total.clone() for total in sums]
    add_noise(undivided, std=1.0, generator=theirs, secure_mode=False)
    add_noise(sums, std=1.0, generator=mine, secure_mode=False, divisor=37)
    for total, own in zip(sums, undivided, strict=True):
        # torch may multiply by the reciprocal, which is rounded as well.
        torch.testing.assert_close(total, own / 37, rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.true_numbers
def test_a_kernel_that_draws_other_numbers_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    compare = noise_triton.draws_as_torch.__wrapped__
    assert compare(device)
    reserve = noise_triton.reserve_normal
    monkeypatch.setattr(
        noise_triton, "reserve_normal", lambda sums, generator, most, block: reserve(sums, generator, 128, block)
    )
    assert not compare(device)  # 128 threads draw the second half of 256 numbers from other words
    monkeypatch.setattr(noise_triton, "draws_as_torch", compare)
    mine, theirs = both_generators()
    total = torch.zeros(1000, device="cuda")
    add_noise([total], std=1.0, generator=mine, secure_mode=False)
    assert torch.equal(total, torch.normal(0, 1.0, (1000,), generator=theirs, device="cuda"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_generator_goes_on_as_if_torch_had_drawn(dtype: torch.dtype) -> None:
    mine, theirs = both_generators()
    sums = [torch.zeros(shape, dtype=dtype, device="cuda") for shape in SHAPES]
    add_noise(sums, std=1.0, generator=mine, secure_mode=False)
    for total in sums:
        torch.normal(0, 1.0, total.shape, generator=theirs, device="cuda", dtype=dtype)
    assert torch.equal(mine.get_state(), theirs.get_state())
    torch.cuda.manual_seed(5)
    add_noise(sums, std=1.0, generator=None, secure_mode=False)
    own = torch.cuda.get_rng_state()
    torch.cuda.manual_seed(5)
    for total in sums:
        torch.normal(0, 1.0, total.shape, device="cuda", dtype=dtype)
    assert torch.equal(own, torch.cuda.get_rng_state())


def test_a_generator_of_the_cpu_is_refused_by_torch() -> None:
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"):
        add_noise([torch.zeros(5, device="cuda")], std=1.0, generator=torch.Generator(), secure_mode=False)


def test_noise_takes_no_memory_but_for_its_table() -> None:
    sums = [torch.zeros(1 << 20, device="cuda"), torch.zeros(5, device="cuda")]
    generator, _ = both_generators()
    add_noise(sums, std=1.0, generator=generator, secure_mode=False)  # compiles
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    add_noise(sums, std=1.0, generator=generator, secure_mode=False)
    assert torch.cuda.max_memory_allocated() - before == 512  # a table of two rows
    assert torch.cuda.memory_allocated() == before


@pytest.mark.true_numbers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_noisy_sums_that_are_rounded(dtype: torch.dtype) -> None:
    """Into other tensors, in one pass over memory: as rounded afterwards, and the norms are those before noise."""
    sums = [torch.randn(size, device="cuda") for size in [(5,), (), (300, 700), (0, 3), (1_000_003,)]]
    mine, theirs = (torch.Generator("cuda").manual_seed(5) for _ in range(2))
    targets = [torch.empty_like(total, dtype=dtype) for total in sums]
    norms = torch.full((len(sums),), -1.0, dtype=torch.float64, device="cuda")
    add_noise(sums, std=1.7, generator=mine, secure_mode=False, divisor=37, targets=targets, norms=norms)
    torch.testing.assert_close(norms, torch.stack([total.double().norm() for total in sums]), rtol=1e-6, atol=0)
    add_noise(sums, std=1.7, generator=theirs, secure_mode=False, divisor=37)
    for target, total in zip(targets, sums, strict=True):
        assert torch.equal(target, total.to(dtype))
    assert torch.equal(mine.get_state(), theirs.get_state())
