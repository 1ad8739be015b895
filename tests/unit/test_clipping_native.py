# SPDX-License-Identifier: Apache-2.0
"""What flash_clip does in C++: the node on a layer's output, and the step's small tensors."""

import copy
import gc
import importlib
import inspect
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from opacus_memprof import _build_info
from opacus_memprof.clipping.kernels import native


class Received:
    """What a node has passed on."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, torch.Tensor | None, torch.Tensor]] = []

    def __call__(self, call: Any, x: torch.Tensor | None, g: torch.Tensor) -> None:
        assert not torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
        self.calls.append((call, x, g))


@pytest.fixture
def received() -> Received:
    return Received()


def test_the_node_is_the_identity_and_passes_on(received: Received) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    hidden = 2 * x
    tapped = native.tap_gradient(hidden, None, hidden, received, "layer")
    assert tapped.grad_fn is not None
    assert "GradientTap" in tapped.grad_fn.name()
    assert torch.equal(tapped, hidden)
    tapped.square().sum().backward()
    ((call, kept, g),) = received.calls
    assert call == "layer"
    assert kept is not None
    assert torch.equal(kept, 2 * x)
    assert not kept.requires_grad
    assert torch.equal(g, 4 * x)
    assert x.grad is not None
    assert torch.equal(x.grad, 8 * x)


STACKS = [(4, 1), (4, 7), (4, 8), (4, 3, 5), (4, 1031)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_of_small_stacks(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    stacks = [torch.randn(shape, dtype=dtype) for shape in STACKS]
    found = native.squared_norms_cpu(stacks)
    assert found.dtype == dtype
    expected = torch.stack([stack.double().flatten(1).square().sum(1) for stack in stacks])
    torch.testing.assert_close(found, expected.to(dtype), rtol=4 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("target", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_of_small_stacks(dtype: torch.dtype, target: torch.dtype) -> None:
    torch.manual_seed(0)
    stacks, factors = [torch.randn(shape, dtype=dtype) for shape in STACKS], torch.rand(4, dtype=dtype)
    for stack, total in zip(stacks, native.weighted_sums_cpu(stacks, factors, target), strict=True):
        expected = torch.einsum("n,n...->...", factors.double(), stack.double()).to(dtype)
        torch.testing.assert_close(total, expected.to(target), rtol=2 * torch.finfo(target).eps, atol=1e-15)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("shape", [(1, 1, 3), (2, 5, 8), (3, 4, 13)])
def test_gradients_of_a_layer_norm(shape: tuple[int, int, int], dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    x, g = 3 + torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    for n, found in enumerate(zip(*native.layer_norm_gradients_cpu(x, g, 1e-3), strict=True)):
        norm = nn.LayerNorm(shape[2], eps=1e-3, dtype=torch.float64)
        norm(x[n].double()).backward(g[n].double())
        for own, parameter in zip(found, (norm.weight, norm.bias), strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(own, parameter.grad.to(dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("has_bias", [True, False])
def test_gradients_of_a_small_linear_layer(dtype: torch.dtype, has_bias: bool) -> None:
    torch.manual_seed(0)
    x, g = torch.randn(3, 7, 5, dtype=dtype), torch.randn(3, 7, 4, dtype=dtype)
    of_weight, of_bias = native.linear_gradients_cpu(g, x, g if has_bias else None)
    assert (of_bias is not None) == has_bias
    for n in range(3):
        linear = nn.Linear(5, 4, dtype=torch.float64)
        linear(x[n].double()).backward(g[n].double())
        for own, parameter in zip((of_weight, of_bias), (linear.weight, linear.bias), strict=True):
            if own is not None:
                assert parameter.grad is not None
                torch.testing.assert_close(own[n], parameter.grad.to(dtype), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_of_a_small_embedding(dtype: torch.dtype, padding: int | None) -> None:
    torch.manual_seed(0)
    ids, g = torch.randint(0, 4, (5, 9)), torch.randn(5, 9, 3, dtype=dtype)
    found = native.embedding_squared_norms_cpu(ids, g, padding)
    for n in range(5):
        table = nn.Embedding(4, 3, padding_idx=padding, dtype=torch.float64)
        table(ids[n]).backward(g[n].double())
        assert table.weight.grad is not None
        torch.testing.assert_close(found[n], table.weight.grad.square().sum().to(dtype))


def test_norms_of_sums_of_all_sizes() -> None:
    torch.manual_seed(0)
    sums = [torch.randn(3), torch.randn(2, 40000, dtype=torch.float64), torch.empty(0), torch.tensor(-2.0)]
    expected = torch.stack([total.double().square().sum().sqrt() for total in sums])
    torch.testing.assert_close(native.norms_cpu(sums), expected)


@pytest.mark.parametrize("divisor", [1.0, 3.0])
def test_sums_become_those_of_torch(divisor: float) -> None:
    """To the bit, for short sums, long ones, and those that are neither contiguous nor float32."""
    torch.manual_seed(0)
    sums = [torch.randn(5), torch.randn(70000), torch.randn(4, 3).t(), torch.randn(7).bfloat16()]
    sums.append(torch.randn(6).double())
    noise = [torch.randn_like(total) for total in sums]
    expected = [(total + drawn) / divisor for total, drawn in zip(sums, noise, strict=True)]
    native.add_and_divide(sums, noise, divisor)
    assert all(map(torch.equal, sums, expected))


class Owner:
    """The attributes of FlashClipHooks that a hook reads outside of layers, and one of its methods."""

    def __init__(self) -> None:
        self._call: SimpleNamespace | None = None
        self.calls: list[tuple[Any, ...]] = []

    def _before_entry(self, *args: Any) -> str:
        self.calls.append(args)
        return "the method's"


def test_a_module_inside_the_running_call_needs_no_python() -> None:
    owner, inner, entry = Owner(), nn.Identity(), nn.Identity()
    hook = native.ModuleHook(owner._before_entry)
    assert hook(inner, (1,), {}) == "the method's"  # no call runs
    owner._call = SimpleNamespace(entry=entry)
    assert hook(inner, (2,), {}) is None
    assert hook(entry, (3,), {}) == "the method's"
    assert owner.calls == [(inner, (1,), {}), (entry, (3,), {})]


def test_hooks_are_copied_with_their_owner_and_freed_with_it() -> None:
    owner = Owner()
    owner.__dict__["hook"] = hook = native.ModuleHook(owner._before_entry)
    copied = copy.deepcopy(owner)
    copied.__dict__["hook"](nn.Identity(), (), {})
    assert (len(owner.calls), len(copied.calls)) == (0, 1)
    freed = weakref.ref(owner)
    del owner, hook
    gc.collect()
    assert freed() is None


def _before_entry(*args: Any) -> None:
    """Has the name of a method with a hook, but no owner."""


@pytest.mark.parametrize("callable_", [[].append, Owner().__init__, _before_entry])
def test_callables_without_a_hook_are_refused(callable_: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError, match="no ModuleHook"):
        native.ModuleHook(callable_)


def test_the_extension_knows_a_hook_and_its_method() -> None:
    hook = native.ModuleHook(Owner()._before_entry)
    assert type(hook).__module__ == "opacus_memprof._clipping"
    assert inspect.unwrap(hook).__func__ is Owner._before_entry


def test_an_anchor_makes_an_output_require_grad(received: Received) -> None:
    anchor = torch.zeros((), requires_grad=True)
    output = torch.randn(3)
    tapped = native.tap_gradient(output, anchor, None, received, ())
    tapped.square().sum().backward()
    ((_, x, g),) = received.calls
    assert x is None
    assert torch.equal(g, 2 * output)
    assert anchor.grad is None  # it has no part in the loss


def test_an_activation_may_follow_in_place(received: Received) -> None:
    x = torch.randn(5, requires_grad=True)
    tapped = native.tap_gradient(2 * x, None, None, received, ())
    nn.functional.relu(tapped, inplace=True).sum().backward()
    assert torch.equal(received.calls[0][2], (x > 0).float())


def test_an_input_that_changes_in_place_is_an_error(received: Received) -> None:
    x = torch.randn(5, requires_grad=True)
    hidden = 2 * x
    tapped = native.tap_gradient(hidden.exp(), None, hidden, received, ())
    with torch.no_grad():
        hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        tapped.sum().backward()
    assert received.calls == []


def test_the_input_is_saved_as_any_activation(received: Received) -> None:
    x = torch.randn(5, requires_grad=True)
    packed: list[torch.Tensor] = []

    def pack(saved: torch.Tensor) -> int:
        packed.append(saved.clone())
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda place: packed[place] + 1):
        tapped = native.tap_gradient(x.view(5), None, x, received, ())
    tapped.sum().backward()
    kept = received.calls[0][1]
    assert kept is not None
    assert torch.equal(kept, x + 1)


def test_a_second_backward_finds_the_input_freed(received: Received) -> None:
    x = torch.randn(5, requires_grad=True)
    loss = native.tap_gradient(x.view(5), None, x, received, ()).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_no_second_derivative(received: Received) -> None:
    x = torch.randn(5, requires_grad=True)
    tapped = native.tap_gradient(3 * x, None, None, received, ())
    (gradient,) = torch.autograd.grad(tapped.pow(3).sum(), x, create_graph=True)
    torch.testing.assert_close(gradient, 3 * (3 * x).square() * 3)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


def test_an_error_reaches_the_caller() -> None:
    def fail(call: Any, x: torch.Tensor | None, g: torch.Tensor) -> None:
        raise KeyError(call)

    x = torch.randn(5, requires_grad=True)
    with pytest.raises(KeyError, match="layer"):
        native.tap_gradient(2 * x, None, None, fail, "layer").sum().backward()


def test_backward_under_autocast(received: Received) -> None:
    x = torch.randn(5, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        native.tap_gradient(2 * x, None, None, received, ()).sum().backward()
        assert torch.is_autocast_enabled("cpu")
    assert len(received.calls) == 1


def test_what_is_alike() -> None:
    three, four, half = torch.zeros(3, 2), torch.zeros(4, 2), torch.zeros(3, 2, dtype=torch.bfloat16)
    wide = torch.zeros(3, 5)
    assert native.group_alike([(three,), (four,), (wide,), (half,), (three, wide)], False) == [[0, 2, 4], [1], [3]]
    turned = torch.zeros(2, 3).T
    lists = [(three, wide), (three, four), (turned, wide), (three.clone(), wide), (three,)]
    assert native.group_alike(lists, True) == [[0, 3], [1], [2], [4]]
    assert native.group_alike([], True) == []


def test_the_table_of_addresses() -> None:
    stack, total = torch.zeros(3, 4, 5), torch.zeros(4, 5)
    assert native.address_table([(stack, total)], True).tolist() == [[stack.data_ptr(), total.data_ptr(), 20]]
    assert native.address_table([(stack,), (total,)], False).tolist() == [[stack.data_ptr()], [total.data_ptr()]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 7), (3, 5, 7), (3, 2, 4, 7)])
def test_sums_of_products(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    factors = torch.rand(3, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    wide = torch.randn(shape, dtype=dtype)
    narrow = torch.randn(*shape[:-1], 4, dtype=dtype)
    for left, right in [(wide, narrow), (narrow, wide)]:
        (total,) = native.sum_outer_products([(left, right)], factors, 1 << 20)
        exact = torch.einsum("n,n...i,n...j->ij", factors.double(), left.double(), right.double())
        assert total.dtype == factors.dtype
        torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_products_of_tokens_that_lie_beside_one_another(dtype: torch.dtype) -> None:
    """Of convolutions: output gradients [N, rows, T], and inputs [N, columns, T] that may be unfolded."""
    factors = torch.rand(3, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    rows, columns = torch.randn(3, 4, 5, dtype=dtype).mT, torch.randn(3, 6, 5, dtype=dtype).mT
    most = 4 * (rows.nbytes + columns.nbytes)  # more than either copies
    for left, right in [(rows, columns), (columns, rows), (rows, columns.contiguous()), (columns, rows.contiguous())]:
        (total,) = native.sum_outer_products([(left, right)], factors, most)
        exact = torch.einsum("n,nti,ntj->ij", factors.double(), left.double(), right.double())
        torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=1e-6)
    # Each of the two is copied, in float32 if it is of low precision.
    copies = (rows.numel() + columns.numel()) * factors.element_size()
    assert native.sum_outer_products([(rows, columns)], factors, copies - 1) == []
    assert len(native.sum_outer_products([(rows, columns)], factors, copies)) == 1


def test_products_end_where_one_cannot_be_formed() -> None:
    pair, factors = (torch.ones(2, 3, 4), torch.ones(2, 3, 4)), torch.ones(2)
    single = (torch.ones(1, 3, 4), torch.ones(1, 3, 4))
    double = (pair[0].double(), pair[1].double())
    empty = (torch.ones(2, 0, 4), torch.ones(2, 0, 4))
    for other in (single, double, empty, (pair[0], double[1])):
        assert len(native.sum_outer_products([pair, pair, other, pair], factors, 1 << 20)) == 2
    assert native.sum_outer_products([pair], factors, 2 * 3 * 4 * 4 - 1) == []
    assert native.sum_outer_products([], factors, 0) == []


@pytest.mark.parametrize("layout", ["contiguous", "channels last", "a part"])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("pad", [0, 1, 2])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [1, 2, 3])
def test_unfolded_images(kernel: int, stride: int, pad: int, dilation: int, layout: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 7, 11, 10)[1:3, 2:5, 1:10, 1:9] if layout == "a part" else torch.randn(2, 3, 9, 8)
    if layout == "channels last":
        x = x.to(memory_format=torch.channels_last)
    expected = nn.functional.unfold(x, kernel, dilation, pad, stride)
    unfolded = native.unfold(x, (pad,) * 4, (kernel,) * 2, (stride,) * 2, (dilation,) * 2)
    assert torch.equal(unfolded, expected)


def test_unfolded_sequences() -> None:
    x = torch.randn(2, 3, 9)
    expected = nn.functional.pad(x, (1, 2)).unfold(2, 4, 2).permute(0, 1, 3, 2).reshape(2, 12, 5)
    assert torch.equal(native.unfold(x, (1, 2), (4,), (2,), (1,)), expected)


@pytest.mark.parametrize("kernel", [(1, 1), (9, 8)], ids=["one tap", "one place"])
def test_what_unfolding_does_not_copy(kernel: tuple[int, int]) -> None:
    x = torch.randn(2, 3, 9, 8)
    unfolded = native.unfold(x, (0, 0, 0, 0), kernel, (1, 1), (1, 1))
    assert unfolded.data_ptr() == x.data_ptr()
    assert torch.equal(unfolded, nn.functional.unfold(x, kernel))


def test_an_extension_for_another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build_info, "TORCH_VERSION", "1.2.3")
    with pytest.raises(ImportError, match=r"flash_clip's extension .*built for torch 1\.2\.3.*pip install"):
        importlib.reload(native)
    monkeypatch.undo()
    importlib.reload(native)


def test_no_samples() -> None:
    stacks = [torch.empty(0, 3), torch.empty(0, 2, 4)]
    assert native.squared_norms_cpu(stacks).shape == (2, 0)
    sums = native.weighted_sums_cpu(stacks, torch.empty(0), torch.float32)
    assert [total.tolist() for total in sums] == [[0.0] * 3, [[0.0] * 4] * 2]
    assert native.address_table([stacks], True)[0, -1] == 3
    left, right = torch.empty(0, 5, 3), torch.empty(0, 5, 2)
    assert native.product_table([(left, right)], [torch.empty(3, 2)])[0, 3] == 5
    of_weight, of_bias = native.layer_norm_gradients_cpu(left, left, 1e-5)
    assert of_weight.shape == of_bias.shape == (0, 3)


def test_wrong_arguments_are_refused() -> None:
    stack = torch.ones(4, 3)
    for stacks in ([], [stack, torch.ones(2, 3)], [stack, stack.double()], [torch.ones(3, 4).t()], [torch.tensor(1.0)]):
        with pytest.raises(RuntimeError, match="stacks must"):
            native.squared_norms_cpu(stacks)
    for factors in (torch.ones(3), torch.ones(4, dtype=torch.float64), torch.ones(8)[::2]):
        with pytest.raises(RuntimeError, match="factors must be"):
            native.weighted_sums_cpu([stack], factors, torch.float32)
    with pytest.raises(RuntimeError, match="input and gradient must be"):
        native.layer_norm_gradients_cpu(torch.ones(2, 3, 4), torch.ones(2, 3, 5), 1e-5)
    with pytest.raises(RuntimeError, match="must have the same length"):
        native.address_table([[stack], [stack, stack]], False)
    for kernel, stride in (([0], [1]), ([2], [0]), ([4], [1]), ([1, 1], [1, 1])):
        with pytest.raises(RuntimeError, match="kernel"):
            native.unfold(torch.ones(1, 1, 3), [0, 0], kernel, stride, [1] * len(kernel))
