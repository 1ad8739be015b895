# SPDX-License-Identifier: Apache-2.0
"""The batches of a proof: which outputs of a model are differentiable, their gradients, and inputs with other values.

Some samples of a batch get other values: other magnitudes, other ids, other lengths.
"""

import math
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import NormalDist
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from opacus_memprof.clipping.forwards.state import Arrangement
from opacus_memprof.clipping.kernels.sums import default_generator

_DEPTH = 4
VARIANTS = 4
LARGE, SMALL = 3, 4
"""The variants with large and with small numbers."""
GENTLE = (-1, -2)
"""The variants in which samples only get values of other samples: of any sample, and of adjacent ones.

The latter keeps sorted samples sorted.
"""

_LEAVES = {torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, torch.dtype, torch.device}


def is_plain_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether a module is called with tensors by position alone, as most are."""
    return not kwargs and all(type(each) is torch.Tensor for each in args)


def leaves_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Returns the leaves of a call's arguments, as `tree_flatten` does, which takes plain ones ten times as long."""
    leaves = [*args, *kwargs.values()]
    return leaves if _LEAVES.issuperset(map(type, leaves)) else tree_flatten((args, kwargs))[0]


def leaves_of(output: Any) -> list[Any]:
    """Returns the leaves of an output."""
    return [output] if type(output) is torch.Tensor else tree_flatten(output)[0]


def tensors_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Returns the tensors of a call's arguments, as `tensors_in` does."""
    return list(args) if is_plain_call(args, kwargs) else tensors_in((args, kwargs))


def tensors_in(output: Any) -> list[torch.Tensor]:
    """Returns the tensors of an output in a fixed order: leaves of pytrees, and attributes of other objects."""
    return [output] if type(output) is torch.Tensor else list(_tensors(output, _DEPTH, set()))


def _tensors(value: Any, depth: int, seen: set[int]) -> Iterator[torch.Tensor]:
    for leaf in tree_flatten(value)[0]:
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif depth and hasattr(leaf, "__dict__") and not isinstance(leaf, (type, torch.nn.Module)):
            if id(leaf) not in seen:
                seen.add(id(leaf))
                for attribute in vars(leaf).values():
                    yield from _tensors(attribute, depth - 1, seen)
        elif depth and isinstance(leaf, Mapping) and id(leaf) not in seen:
            seen.add(id(leaf))
            for item in leaf.values():
                yield from _tensors(item, depth - 1, seen)


def cached_tensors(output: Any) -> list[torch.Tensor]:
    """Returns the tensors in an output's caches of keys and values (of transformers)."""
    return [x for leaf in tree_flatten(output)[0] if hasattr(leaf, "get_seq_length") for x in tensors_in(leaf)]


class _Alias(torch.autograd.Function):
    """The identity. Unlike a view, its result keeps its hooks when a program writes to it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g


ALIAS = "_AliasBackward"
"""The name of an alias in autograd's graph: an output of a private model."""
OUTPUT = "opacus_memprof_output"
"""A key in the metadata of a node of autograd's graph: it is an output of a private model, without an alias."""


def is_output(node: Any) -> bool:
    """Returns whether a node of autograd's graph is an output of a private model whose loss is followed."""
    return node.name() == ALIAS or OUTPUT in node.metadata


Root = torch.Tensor | GradientEdge
"""What a backward may begin at."""


def edge_of(root: Root) -> tuple[Any, int]:
    """Returns the node of autograd's graph that has computed a tensor, or None, and the number of its output."""
    return (root.grad_fn, root.output_nr) if isinstance(root, torch.Tensor) else (root.node, root.output_nr)


def graph_nodes(tensors: Iterable[Root], stop_at_outputs: bool = False) -> list[Any]:
    """Returns the nodes of autograd's graph that a backward from these tensors reaches.

    Args:
        tensors: the tensors.
        stop_at_outputs: whether what is behind outputs of private models is left out.
    """
    waiting, seen = [edge_of(x)[0] for x in tensors], dict[Any, None]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or (stop_at_outputs and is_output(node)):
            continue
        seen[node] = None
        waiting += [each for each, _ in node.next_functions]
    return list(seen)


def variables(nodes: Iterable[Any]) -> list[torch.Tensor]:
    """Returns the leaves to which these nodes of autograd's graph add gradients, such as parameters."""
    return [node.variable for node in nodes if hasattr(node, "variable")]


def alias_leaves(output: Any, tensors: list[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
    """Replaces some tensors of an output by aliases of them.

    Args:
        output: a tensor, or a container of tensors.
        tensors: tensors among its leaves.

    Returns:
        The output with the aliases, and a tensor between each of these and the original one. Its hooks run after the
        hooks that the program registers on the alias, and get what they return.
    """
    leaves, structure = tree_flatten(output)
    between: list[torch.Tensor] = [_Alias.apply(x) for x in tensors]
    for x, alias in zip(tensors, between, strict=True):
        leaves[next(i for i, leaf in enumerate(leaves) if leaf is x)] = _Alias.apply(alias)
    return tree_unflatten(leaves, structure), between


def alias_cached_tensors(output: Any) -> list[torch.Tensor]:
    """Replaces the tensors with gradients in an output's caches of keys and values by aliases, and returns these.

    The model has used the tensors themselves; with aliases, only the program's use of a cache counts.
    """
    found: list[torch.Tensor] = []

    def aliased(value: Any, depth: int) -> Any:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            found.append(_Alias.apply(value))
            return found[-1]
        if depth and isinstance(value, list):
            value[:] = [aliased(each, depth - 1) for each in value]
        elif depth and not isinstance(value, (torch.Tensor, torch.nn.Module, type)) and hasattr(value, "__dict__"):
            vars(value).update({name: aliased(each, depth - 1) for name, each in vars(value).items()})
        return value

    for leaf in tree_flatten(output)[0]:
        if hasattr(leaf, "get_seq_length"):
            aliased(leaf, _DEPTH)
    return found


def cotangents(
    outputs: list[torch.Tensor],
    arrangements: list[Arrangement | None],
    drawn: int,
    weights: torch.Tensor,
    with_shared: bool,
    places: list[int] | None = None,
) -> list[torch.Tensor]:
    """Returns random gradients of outputs. Equal shapes get equal gradients.

    Args:
        outputs: differentiable outputs.
        arrangements: the position of samples in each output; None for outputs that all samples share, such as a loss.
        drawn: the number of samples for which numbers are drawn.
        weights: the factors of the samples' gradients, [B].
        with_shared: whether outputs that all samples share get a gradient other than zero.
        places: which of the drawn samples a smaller batch has, in order; None for the first.
    """
    found = []
    for i, (output, where) in enumerate(zip(outputs, arrangements, strict=True)):
        generator = torch.Generator(output.device).manual_seed(1000 + i)
        if where is None and not with_shared:
            found.append(torch.zeros_like(output))
            continue
        if where is None:
            g = _normal(output.shape, generator, output)
        else:
            batch = len(weights)
            shape = drawn, *where.by_sample(output.detach(), batch).shape[1:]
            rows = _normal(shape, generator, output)
            rows = rows[:batch] if places is None else rows[places]
            scale = weights.to(rows.device).view(-1, *[1] * (rows.dim() - 1))
            g = as_output(rows.mul_(scale.to(rows.dtype)), where, output)  # a factor of 1 keeps all bits
        found.append(g)
    return found


def _normal(shape: Sequence[int], generator: torch.Generator, like: torch.Tensor) -> torch.Tensor:
    """Returns normal numbers of a tensor's dtype, also where `FixedDraws` replaces those of the program."""
    with _disable_current_modes():
        return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)


def as_output(rows: torch.Tensor, where: Arrangement, output: torch.Tensor) -> torch.Tensor:
    """Inverts `Arrangement.by_sample`."""
    if where.dim == 1:
        return rows.squeeze(2).movedim(0, 1).reshape(output.shape)
    return (rows if where.sample_major else rows.transpose(0, 1)).reshape(output.shape)


def is_compiled(outputs: Iterable[torch.Tensor]) -> bool:
    """Returns whether the autograd graph of the outputs contains a function made by torch.compile."""
    return any("CompiledFunction" in node.name() for node in graph_nodes(outputs))


def perturbed(leaves: Sequence[Any], batch: int, kept: torch.Tensor, variant: int, seed: int) -> list[Any]:
    """Returns the leaves of a model's arguments, with other values for the samples that are not kept.

    Args:
        leaves: the leaves of the arguments; tensors whose first dimension is `batch` have samples.
        batch: the number of samples.
        kept: which samples keep their values, [B], bool, on the CPU.
        variant: from 0 to `VARIANTS - 1`, `SMALL`, or one of `GENTLE`.
        seed: the seed of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    shift = 1 + seed % max(1, batch - 1)
    return [_other(leaf, kept, variant, shift, generator) if has_samples(leaf, batch) else leaf for leaf in leaves]


class Perturbed:
    """What an output or a label is for other samples: one half of them are others, the other half, and all.

    It is computed where the program uses the tensor after its step, so that no step takes memory for that.

    Args:
        x: the tensor.
        where: its samples.
        kept: the samples that stay in each plan.
        in_range: whether other samples have numbers of the tensor, or only moderate ones.
    """

    def __init__(self, x: torch.Tensor, where: Arrangement, kept: list[torch.Tensor], in_range: bool) -> None:
        self._layout = x.storage_offset(), x.shape, x.stride()
        self._dtype, self._where, self._kept, self._in_range = x.dtype, where, kept, in_range

    def storages(self, storage: torch.UntypedStorage, plans: int) -> list[torch.UntypedStorage]:
        """Returns memory with the values of so many plans, and of the one in which no sample stays."""
        x = torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage, *self._layout)
        batch = len(self._kept[0])
        by_sample = self._where.by_sample(x, batch)
        variants = [GENTLE[0] if self._in_range else i % VARIANTS for i in range(plans)]
        kept = zip(self._kept, variants, strict=False)
        rows = [perturbed([by_sample], batch, k, v, i)[0] for i, (k, v) in enumerate(kept)]
        keep = self._kept[0].to(x.device).view(-1, *[1] * (by_sample.dim() - 1))
        rows.append(torch.where(keep, rows[1], rows[0]))
        return [self._written(each, x) for each in rows]

    def _written(self, rows: torch.Tensor, x: torch.Tensor) -> torch.UntypedStorage:
        storage: torch.UntypedStorage = x.untyped_storage().clone()  # type: ignore[no-untyped-call]
        other = torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, *self._layout)
        value = as_output(rows, self._where, x)
        for d, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
            if size > 1 and stride == 0:  # expanded: one place in memory
                other, value = other.narrow(d, 0, 1), value.narrow(d, 0, 1)
        other.copy_(value)
        return storage


def has_samples(leaf: Any, batch: int) -> bool:
    """Returns whether a leaf of the arguments has one row for each sample."""
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) == batch


@torch.no_grad()
def _other(x: torch.Tensor, kept: torch.Tensor, variant: int, shift: int, generator: torch.Generator) -> torch.Tensor:
    if type(x) is not torch.Tensor and not isinstance(x, torch.nn.Parameter):
        return x
    rolled = x.detach().roll(shift, 0)
    if variant == GENTLE[1]:
        other = x.detach()[_nearest(kept).to(x.device)]
    elif variant == GENTLE[0] or x.numel() == 0:
        other = rolled
    elif x.is_floating_point() or x.is_complex():
        other = _other_numbers(x.detach(), rolled, variant, generator)
    else:
        other = _other_integers(x, rolled, variant, generator)
    keep = kept.to(x.device).view(-1, *[1] * (x.dim() - 1))
    return torch.where(keep, x.detach(), other).requires_grad_(x.requires_grad)


def _nearest(kept: torch.Tensor) -> torch.Tensor:
    """Returns for each sample the index of the nearest kept sample."""
    places = torch.arange(len(kept))
    distances = (places.unsqueeze(1) - places).abs().masked_fill(~kept, 2 * len(kept))
    return distances.argmin(1)


def _other_numbers(x: torch.Tensor, rolled: torch.Tensor, variant: int, generator: torch.Generator) -> torch.Tensor:
    if not x.is_complex():
        if bool(((x == 0) | (x == 1)).all()) and bool(x.any()):  # a mask
            return _other_integers(x.to(torch.int64), rolled.to(torch.int64), variant, generator).to(x.dtype)
        if bool((x <= -1e4).any()):  # a mask that is added to scores
            return rolled
    if not bool(x.any()):
        return torch.randn(x.shape, generator=generator).to(x.device, x.dtype)
    if variant == 0:
        return rolled * 4
    if variant == 1:
        return rolled / -4
    if variant == 2:
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float32).to(x.device, x.dtype)
        return noise * (8 * x.float().std().nan_to_num(1.0).clamp(min=1e-3)).to(x.dtype) if x.numel() > 1 else -x
    if variant == SMALL:
        return rolled / 1024
    return rolled * (16 if x.dtype == torch.float16 else 1024)


def _other_integers(x: torch.Tensor, rolled: torch.Tensor, variant: int, generator: torch.Generator) -> torch.Tensor:
    """Returns integers between the smallest and the largest of the batch, so that indices stay valid."""
    low, high = int(x.min()), int(x.max())
    if x.dim() > 1 and low >= 0 and (variant == 2 or (low == high == 1) or (variant == 1 and high <= 1)):
        values = rolled if variant % 2 else rolled.flip(-1)
        return values * _prefixes(x, generator)
    if low == high == 0 or (x.dim() == 1 and low == high == 1):
        return rolled
    if low < 0 and variant == LARGE:  # labels that the loss ignores
        return torch.full_like(x, low)
    if low < 0 or variant == 0:
        flat = x.flatten()
        return flat[torch.randint(len(flat), (len(flat),), generator=generator).to(x.device)].view(x.shape)
    if variant in (LARGE, SMALL) and x.dim() > 1:
        return torch.full_like(x, high if variant == LARGE else low)
    least = min(low, 1) if x.dim() == 1 else low  # a length is at least 1
    drawn = torch.randint(least, high + 1, x.shape, generator=generator)
    return drawn.to(x.device, x.dtype)


def _prefixes(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Returns rows of ones followed by zeros; the number of ones is random."""
    lengths = torch.randint(1, x.shape[-1] + 1, x.shape[:-1], generator=generator)
    ones = torch.arange(x.shape[-1]) < lengths.unsqueeze(-1)
    return ones.to(x.device, x.dtype)


MIDDLE, LOWEST, HIGHEST = 0.65, 5e-5, 1 - 5e-5
"""The shares of FixedDraws."""


class FixedDraws(TorchDispatchMode):
    """Replaces random numbers by constant ones, so that batches of different sizes can be compared.

    These are torch's, and those of the functions of `random` and `numpy.random` that draw independent numbers. Of
    torch's, the constant is another one in each draw, so that a program that draws until a number fits comes to an end.

    Args:
        share: about the part of all numbers that are smaller than the constants, between 0 and 1.

    Attributes:
        seeds: the seed of the generator of each draw.
    """

    supports_higher_order_operators = True
    _MOST = 100_000

    def __init__(self, share: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seeds: list[int] = []
        self._share = share
        self._is_known = True  # whether all draws of torch were replaced
        self._undo = ExitStack()

    def is_same(self, other: "FixedDraws") -> bool:
        """Returns whether two runs have drawn the same numbers, as far as is known."""
        return self._is_known and other._is_known and len(self.seeds) == len(other.seeds)

    def __enter__(self) -> "FixedDraws":
        python, numpy = _ConstantRandom(self._share, self._MOST), sys.modules.get("numpy.random")
        for name in _PYTHON_DRAWS:
            self._undo.enter_context(_replaced(random, name, getattr(python, name)))
        for name in _NUMPY_DRAWS if numpy is not None else ():
            self._undo.enter_context(_replaced(numpy, name, partial(self._numpy, name)))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._undo.close()

    def _numpy(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Draws NumPy's first number from a seed for all elements, so that no element depends on their number."""
        state = sys.modules["numpy.random"].RandomState(_NUMPY_SEEDS[int(3 * self._share)])
        drawn = getattr(state, name)(*args, **kwargs)
        if getattr(drawn, "size", 0):
            drawn[...] = drawn.flat[0]
        return drawn

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return func(*args, **kwargs)
        given = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}
        if given.get("dropout_p") == 0 or given.get("train") is False:
            return func(*args, **kwargs)
        device = next((x.device for x in args if isinstance(x, torch.Tensor)), given.get("device") or "cpu")
        self.seeds.append((given.get("generator") or default_generator(torch.device(device))).initial_seed())
        if len(self.seeds) > self._MOST:
            raise RuntimeError("the program draws without end")
        name = func._schema.name.removeprefix("aten::")
        keeps = self._share >= 0.5
        if name == "native_dropout":
            x, p = args[:2]
            return x * (0.0 if p == 1 or not keeps else 1 / (1 - p)), torch.full_like(x, keeps, dtype=torch.bool)
        width = min(self._share, 1 - self._share)
        share = self._share + width * (0.618034 * len(self.seeds) % 1 - 0.5)
        constant = float(keeps) if name in ("bernoulli", "bernoulli_") else _constant(name, given, share)
        if constant is None:
            self._is_known = False
            return func(*args, **kwargs)
        return (args[0] if name.endswith("_") else func(*args, **kwargs)).fill_(constant)


def _constant(name: str, given: Mapping[str, Any], share: float) -> float | None:
    """Returns a possible value of a random operation; None for operations of other kinds.

    Args:
        name: the operation.
        given: its arguments by name.
        share: the part of all values that are smaller.
    """
    if name in ("rand", "rand_like"):
        return share
    if name in ("randn", "randn_like"):
        return NormalDist().inv_cdf(share)
    if name == "exponential_":
        return -math.log1p(-share) / float(given.get("lambd", 1.0))
    if name == "uniform_":
        low, high = given.get("from", 0.0), given.get("to", 1.0)
        return float(low + share * (high - low))
    if name == "normal_":
        return float(given.get("mean", 0.0) + NormalDist().inv_cdf(share) * given.get("std", 1.0))
    if name in ("randint", "randint_like", "random_"):
        low, high = given.get("low") or given.get("from") or 0, given.get("high") or given.get("to")
        return float(low if high is None or share < 0.9 else high - 1)
    return None


_PYTHON_DRAWS = (
    *("random", "uniform", "triangular", "gauss", "normalvariate", "lognormvariate", "expovariate"),
    *("betavariate", "gammavariate", "randint", "randrange"),
)
_NUMPY_DRAWS = (
    *("rand", "randn", "random", "random_sample", "ranf", "sample", "uniform", "normal", "standard_normal"),
    *("exponential", "gumbel", "laplace", "beta", "gamma", "poisson", "binomial", "randint"),
)
_NUMPY_SEEDS = (59899, 0, 21159)
"""Seeds from which NumPy's first uniform number is close to 0, between, and close to 1."""


class _ConstantRandom(random.Random):
    """Python's generator, whose uniform numbers are all the same."""

    def __init__(self, share: float, most: int) -> None:
        super().__init__()
        self._share, self._left = share, most

    def random(self) -> float:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("the program draws without end")
        return self._share


@contextmanager
def _replaced(module: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replaces a function of a module inside the context, for the current thread."""
    original, thread = getattr(module, name), threading.get_ident()

    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (function if threading.get_ident() == thread else original)(*args, **kwargs)

    setattr(module, name, chosen)
    try:
        yield
    finally:
        setattr(module, name, original)
