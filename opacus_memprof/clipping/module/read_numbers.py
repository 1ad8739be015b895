# SPDX-License-Identifier: Apache-2.0
"""The numbers that a program reads of the samples of a call, and what it may compute from them outside of torch.

Numbers are read by operations, or without one: of that, the modes that follow a program are told here.
"""

import dis
import functools
import math
import statistics
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_float
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opacus_memprof.clipping.forwards.repetition import (
    collecting_later,
    dispatch_modes,
    enter_dispatch_modes,
    leave_dispatch_modes,
    mode_stack,
)
from opacus_memprof.clipping.proof.summary import Tensors
from opacus_memprof.versions import variables_of

_MOST_NUMBERS = 64
_SMALL = [10.0**-i for i in range(3, 13)]
"""What programs add before they divide."""
_WITHOUT_PARTS = {str, bytes, type(None), type, ModuleType, FunctionType, MethodType, BuiltinFunctionType}
"""Types of values in which no numbers are looked for."""
_SHARES = [each for i in range(1, 5) for n in (1, 2, 5) for each in (n * 10.0**-i, 1 - n * 10.0**-i)]
"""The weights that moving averages give a new number."""
_LATEST = 16
"""The numbers that are looked for in moving averages."""
_LENGTHS = {"len", "shape", "size", "numel"}
"""Names by which programs ask for the length of a tensor."""
_DEPTH, _MOST_SEEN = 4, 20_000
"""How far a program's variables are searched for numbers and tensors that it had before."""
_CLIPPING = "opacus_memprof.clipping."
ARITHMETIC = ("add", "sub", "rsub", "mul", "div", "pow", "fill", "fill_", "full", "full_like")
"""Operations whose arguments are numbers that a program may have read."""
_INTEGERS = {"select": (2,), "slice": (2, 3), "narrow": (2, 3), "roll": (1,), "div": (1,), "mul": (1,)}
"""Where operations have indices, and numbers of samples or tokens, among all of their arguments."""


class ReadNumbers:
    """The numbers that a program has read of the samples of a call, and what it may compute from them.

    Read by `item()`, `tolist()` and `numpy()`, and by conditions.

    Args:
        batch: the number of samples.

    Attributes:
        read: the numbers, the last ones last.
        used: numbers that the loss was computed with.
        before: the numbers and tensors that the program had when it read the first one; None if it has read none.
    """

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self.read: list[float] = []
        self.used: list[float] = [0.0, 1.0]
        self.before: Existing | None = None
        self._others: dict[float, dict[int, float]] = {}
        self._latest: tuple[float, dict[int, float], CodeType, int] | None = None  # with the place in the program
        self._assigned: dict[CodeType, dict[str, tuple[float, dict[int, float]]]] = {}  # by variable
        self._own: list[torch.Tensor] = []
        self._arrays: list[tuple[torch.Tensor, dict[int, torch.Tensor]]] = []

    def add(self, number: float, others: dict[int, float], is_length: bool = False) -> None:
        """Adds a number that was read, and what it is in the plans with other samples in which that is known.

        A length is that of a tensor, which an operation has returned.
        """
        self.before = self.before or Existing()
        self._note(number, others)
        self.read = [*self.read[1 - _MOST_NUMBERS :], number]
        frame = _program_frame()
        self._latest = None if is_length else (number, others, frame.f_code, frame.f_lasti)
        if (variable := _target(frame)) is not None:
            self._assigned.setdefault(frame.f_code, {})[variable] = number, others

    def _note(self, number: float, others: dict[int, float]) -> None:
        """Of the same number of several samples, it is not known whose it is: it counts as the program's own."""
        self._others[number] = others if self._others.get(number, others) == others else {}

    def add_array(self, x: torch.Tensor, others: dict[int, torch.Tensor | None]) -> None:
        """Adds a tensor whose numbers were read, and what it is in the plans in which it is another one.

        Of one that is the same in all plans, it is known from then on that it is the program's own data.
        """
        known = {plan: other.clone() for plan, other in others.items() if other is not None}
        if all(torch.equal(other, x) for other in known.values()):
            self._own = [*self._own[1 - _LATEST :], x]
            return
        self.before = self.before or Existing()
        self._arrays = [*self._arrays[1 - _LATEST :], (x, known)]
        if x.is_complex():
            return
        lists = {plan: other.flatten().tolist() for plan, other in known.items()}
        numbers = x.flatten().tolist()
        for at, number in enumerate(numbers):
            self._note(number, {i: each[at] for i, each in lists.items()})
        self.read = [*self.read, *numbers][-_MOST_NUMBERS:]
        for function in _OF_LISTS if all(map(math.isfinite, numbers)) else ():
            if function(numbers) not in numbers:
                self.add(function(numbers), {i: function(each) for i, each in lists.items()})

    def gives(self, x: Any, earlier: Tensors | None) -> bool:
        """Returns whether the argument of an operation, or one of a few in a tensor, may come from what was read.

        Args:
            x: the argument.
            earlier: what the program has computed with in earlier steps; None in the first step.
        """
        if is_of_few(x):
            return any(self.gives(each, earlier) for each in x.flatten().tolist())
        if self.before is None or isinstance(x, bool) or not isinstance(x, (int, float)):
            return False
        if self._other(x, -1) is None:
            return self.is_late(x, earlier)
        if _is_long(x):
            return True
        had = self.before.numbers | (set() if earlier is None else earlier.numbers)
        return not (x in (0, 1) or abs(x) in had or _is_in_text(abs(x)))

    def integers(self, name: str, args: Sequence[Any]) -> dict[int, dict[int, float]]:
        """Returns which arguments of an operation are integers that the program has read, and what they are in plans.

        Small integers are equal by chance. One that was read counts if it was read to run this operation, as a tensor
        that is an index is, or if it was read in the expression that is evaluated, or assigned to a variable there, and
        nothing else in that expression has its value.

        Args:
            name: the operation.
            args: all of its arguments.
        """
        own: dict[int, dict[int, float]] = {}
        latest, self._latest = self._latest, None
        if not self._assigned and latest is None:
            return own
        frame = _program_frame()
        assigned = self._assigned.get(frame.f_code, {})
        if name == "_local_scalar_dense":  # the variable gets another number, maybe one that depends on no sample
            assigned.pop(_target(frame) or "", None)
        near = latest if latest is not None and latest[2] is frame.f_code else None
        places = [i for i in _INTEGERS.get(name, ()) if i < len(args) and type(args[i]) is int]
        values = (
            {name: _integer(value) for name, value in _operands(frame).items()} if places and (assigned or near) else {}
        )
        for place in places:
            x = args[place]
            of_x = [name for name, value in values.items() if value == x]
            number, others = assigned.get(of_x[0], (None, {})) if len(of_x) == 1 else (None, {})
            if near is not None and near[0] == x:
                is_inside = not of_x and _is_inside(frame, near[3])
                number, others = (x, near[1]) if is_inside or near[3] == frame.f_lasti else (number, others)
            if number is not None and abs(x - number) in (0, 1):
                own[place] = {i: other + x - number for i, other in others.items()}
        return own

    def is_late(self, x: Any, earlier: Tensors | None) -> bool:
        """Returns whether a number or a tensor is a new one, which the program did not have before it read others.

        In the first step it is not known which ones are the program's own, nor in backward.
        """
        if earlier is None or self.before is None or torch._C._current_graph_task_id() != -1:
            return False
        if isinstance(x, torch.Tensor) and x.numel() == 1 and x.is_floating_point():
            x = float(x)
        if isinstance(x, torch.Tensor):
            own = any(each.shape == x.shape and torch.equal(each.to(x), x) for each in self._own)
            had = own or x.untyped_storage().data_ptr() in self.before.places
            return x.numel() > 0 and not had and not earlier.has(x)
        if not isinstance(x, float) or not math.isfinite(x) or x == 0:
            return False
        is_of_lengths = any(abs(each - round(each)) < 1e-9 for each in (x * self._batch, self._batch / x))
        is_known = abs(x) in earlier.numbers or abs(x) in self.before.numbers
        return not (is_known or is_of_lengths or _is_in_text(abs(x)))

    def other(self, x: Any, plan: int) -> Any:
        """Returns what a number or a tensor that may have been computed from numbers that were read is in a plan."""
        if not isinstance(x, torch.Tensor):
            other = self._other(x, plan)
            return 1.25 * x if other is None else other
        for read, others in self._arrays:
            if read.shape == x.shape and plan in others and torch.equal(read.to(x), x):
                return others[plan].to(x)
        if x.dtype == torch.bool:
            return ~x
        if is_of_few(x) and x.is_floating_point():
            return torch.tensor([self.other(each, plan) for each in x.flatten().tolist()]).to(x).view_as(x)
        return 1.25 * x if x.is_floating_point() or x.is_complex() else x - x.sign()

    def _other(self, x: float, plan: int) -> float | None:
        """Returns what a known function of a number that was read is in a plan; None if it is none."""
        if x in self._others:
            return self._others[x].get(plan, x)
        functions = _TO_INTEGERS if isinstance(x, int) else _FUNCTIONS if _is_long(x) else ()
        for number in reversed(self.read[-_LATEST:]):
            for function in functions:
                try:
                    if abs(function(number) - x) <= 1e-9 * abs(x):
                        return function(self._others[number].get(plan, number))
                except (ArithmeticError, ValueError):
                    continue
        return None

    def note_use(self, x: Any) -> None:
        """Notes an argument of an operation of the loss, which may be a moving average."""
        if _is_long(x):
            self.used = [*self.used[1 - _LATEST :], x]

    def has(self, name: str, x: Any) -> bool:
        """Returns whether an operation's argument is a number that was read, or a simple function of one.

        Other numbers that a program computes from it look like numbers of the program's text.
        """
        if not self.read:
            return False
        if name == "lift_fresh" and is_of_few(x):
            return any(self.has("full", each) for each in x.flatten().tolist())
        if isinstance(x, bool) or not isinstance(x, (int, float)) or name not in ARITHMETIC:
            return False
        if isinstance(x, float) and _is_long(x):
            return any(abs(abs(x) - abs(each)) <= 1e-6 * abs(x) for each in self._derived())
        return abs(x) > 1 and x in self.read and not _is_in_text(x)

    def repeats(self, x: Any, earlier: "ReadNumbers") -> bool:
        """Returns whether a number, or one of a few in a tensor, repeats these or is a moving average of them.

        Args:
            x: the argument of an operation.
            earlier: the numbers of the step before. What its loss was computed with is a constant, or an average then.
        """
        if is_of_few(x):
            return any(self.repeats(each, earlier) for each in x.flatten().tolist())
        if not self.read or not _is_long(x) or x in earlier.used:
            return False
        latest = [float(each) for each in self.read[-_LATEST:] if math.isfinite(each)]
        latest += [sum(latest), sum(latest) / max(1, len(latest))]
        averages = [c + share * (each - c) for each in latest for c in earlier.used for share in _SHARES]
        for each in (*latest, *averages):
            for shifted in (each, each + 1e-8, each + 1e-6, each + 1e-5):
                if abs(x - shifted) <= 2e-7 * abs(x) or (shifted and abs(x - 1 / shifted) <= 2e-7 * abs(x)):
                    return True
        return False

    def sets(self, x: Any, now: float) -> bool:
        """Returns whether a setting would become a number that was read, a multiple, or a moving average with it.

        Args:
            x: the new value.
            now: the value until now.
        """
        if not _is_long(x):
            return False
        read = [each for each in self.read if math.isfinite(each) and each != 0]
        made = [each * float(f"{x / each:.2g}") for each in read]
        made += [now + share * (each - now) for each in read for share in _SHARES]
        return any(abs(x - each) <= 1e-9 * abs(x) for each in made)

    def _derived(self) -> Iterator[float]:
        """Yields the numbers that were read, their sum and mean, and what programs scale and shift by."""
        read = [float(each) for each in self.read if math.isfinite(each)]
        for each in (*read, sum(read), sum(read) / max(1, len(read))):
            for shifted in (each, *(each + small for small in _SMALL)):
                if shifted:
                    yield from (shifted, 1 / shifted)
            yield from (each * each, math.sqrt(abs(each)), each * self._batch, each / self._batch)


def is_of_few(x: Any) -> bool:
    """Returns whether something is a tensor of few numbers."""
    return isinstance(x, torch.Tensor) and 0 < x.numel() <= _MOST_NUMBERS


def _is_long(x: Any) -> bool:
    """Returns whether a number has too many digits to be there by chance.

    Other than one of four digits, and what float32 or some steps of arithmetic make of that.
    """
    if not isinstance(x, float) or not math.isfinite(x):
        return False
    short = float(f"{x:.4g}")
    return abs(short - x) > 1e-14 * abs(x) and c_float(short).value != x


def _program_frame() -> FrameType:
    """Returns the frame of the program, outside of torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith((_CLIPPING, "torch.")):
        frame = frame.f_back
    return frame


@functools.lru_cache(64)
def _instructions(code: CodeType) -> list[dis.Instruction]:
    return list(dis.get_instructions(code))


def _target(frame: FrameType) -> str | None:
    """Returns the variable to which the running line assigns a value next."""
    is_after = False
    for each in _instructions(frame.f_code):
        if is_after and each.opname.startswith("STORE_"):
            return each.argval if each.opname in ("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF") else None
        is_after = each.offset == frame.f_lasti or (is_after and each.starts_line in (None, False))
    return None


def _operands(frame: FrameType) -> dict[str, Any]:
    """Returns the values of the variables and constants in the expression that is evaluated, by their text."""
    found: dict[str, Any] = {}
    variables = variables_of(frame)
    for each in _instructions(frame.f_code):
        if not each.opname.startswith("LOAD_") or not _is_inside(frame, each.offset):
            continue
        for name in each.argval if isinstance(each.argval, tuple) else (each.argval,):
            if each.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
                found[repr(name)] = name
            elif isinstance(name, str):
                found[name] = variables.get(name)
    if found.keys().isdisjoint(_LENGTHS):
        return {name: value for name, value in found.items() if not isinstance(value, torch.Tensor)}
    return found


def _is_inside(frame: FrameType, offset: int) -> bool:
    """Returns whether an instruction is of a part of the expression that is evaluated. Python 3.10 does not tell."""
    places = _positions(frame.f_code)
    part, whole = places.get(offset), places.get(frame.f_lasti)
    if part is None or whole is None or None in (*part, *whole):
        return False
    start, end = (part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)
    return bool((whole.lineno, whole.col_offset) <= start and end <= (whole.end_lineno, whole.end_col_offset))


@functools.lru_cache(64)
def _positions(code: CodeType) -> dict[int, Any]:
    return {each.offset: getattr(each, "positions", None) for each in _instructions(code)}


def _integer(value: Any) -> int | None:
    """Returns an integer, or the length of a tensor."""
    if isinstance(value, torch.Tensor):
        return len(value) if value.dim() else None
    return value if type(value) is int else None


def _is_in_text(x: float) -> bool:
    """Returns whether a function that is running has this constant."""
    frame = sys._getframe()
    while frame is not None:
        if any(type(each) is type(x) and each == x for each in frame.f_code.co_consts):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class Existing:
    """The numbers and tensors that the functions that are running have in their variables, or in what these hold."""

    def __init__(self) -> None:
        self.numbers: set[float] = set()
        self.places: set[int] = set()
        self._seen: set[int] = set()
        frame = sys._getframe(1)
        while frame is not None:
            if not frame.f_globals.get("__name__", "").startswith(_CLIPPING):  # not where the number is read
                for value in variables_of(frame).values():
                    self._add(value, _DEPTH)
            frame = frame.f_back  # type: ignore[assignment]
        self._seen.clear()

    def _add(self, value: Any, depth: int) -> None:
        if isinstance(value, (int, float)):
            self.numbers.add(abs(value))
        elif isinstance(value, torch.Tensor):
            if value.layout == torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(value):
                self.places.add(value.untyped_storage().data_ptr())
        elif depth and type(value) not in _WITHOUT_PARTS and id(value) not in self._seen:
            if len(self._seen) == _MOST_SEEN:
                return
            self._seen.add(id(value))
            if isinstance(value, (list, tuple)):
                parts: Any = value[:_MOST_NUMBERS]
            elif isinstance(value, type):
                parts = ()
            else:
                own = value if isinstance(value, dict) else getattr(value, "__dict__", {})
                parts = list(own.values())
            for each in parts:
                self._add(each, depth - 1)


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


_FUNCTIONS: list[Callable[[float], float]] = [
    abs,
    lambda x: -x,
    lambda x: 1 / x,
    lambda x: 1 - x,
    lambda x: 1 + x,
    lambda x: 1 / (1 + x),
    lambda x: x * x,
    math.sqrt,
    lambda x: 1 / math.sqrt(x),
    math.exp,
    lambda x: math.exp(-x),
    lambda x: 1 - math.exp(-x),
    lambda x: 1 / (1 + math.exp(-x)),
    lambda x: 1 / (1 + math.exp(x)),
    math.log,
    lambda x: -math.log(x),
    math.log1p,
    math.tanh,
    math.sin,
    math.cos,
]
"""What programs make of a number that they have read."""
_OF_LISTS: tuple[Callable[[list[float]], float], ...] = (sum, _mean, statistics.median, statistics.pstdev)
_TO_INTEGERS: list[Callable[[float], float]] = [int, round, math.ceil, lambda x: int(x) + 1, lambda x: int(x) - 1]


_READERS: dict[str, Callable[..., Any]] = {name: getattr(torch.Tensor, name) for name in ("numpy", "tolist")}
"""Methods by which numbers leave a tensor without an operation."""


class FollowingMode(TorchDispatchMode):
    """A mode that follows what a program computes, in no `with` block: it is entered and left in hooks.

    Several models may each have one on at the same time, and a program may enter and leave modes of its own meanwhile.
    """

    stays_off = True  # also where others are to be entered again, among which it was

    @abstractmethod
    def note_read(self, x: torch.Tensor) -> None:
        """Notes that the program reads all numbers of a tensor, as a list or an array."""

    @property
    def is_entered(self) -> bool:
        """Whether it is on, in this thread."""
        return any(mode is self for mode in mode_stack())

    def enter(self) -> None:
        """Makes it the outermost mode, so that it can stay on where a `with` block of the program ends."""
        for name, read in _READERS.items():
            setattr(torch.Tensor, name, _noted(read))
        self.stays_off = False
        with collecting_later():
            inner = leave_dispatch_modes()
            self.__enter__()  # type: ignore[no-untyped-call]
            enter_dispatch_modes(_those_on(inner))

    def leave(self) -> None:
        """Leaves it, whatever modes were entered since. These stay on."""
        self.stays_off = True
        with collecting_later():
            stack = dispatch_modes()
            if self not in stack:
                return
            inner = leave_dispatch_modes(stack.index(self))
            enter_dispatch_modes(inner[1:])
        if not following_modes():
            for name in _READERS.keys() & vars(torch.Tensor).keys():
                delattr(torch.Tensor, name)


def following_modes() -> list[FollowingMode]:
    """Returns the modes that follow the program in this thread, the innermost one last."""
    return [mode for mode in mode_stack() if isinstance(mode, FollowingMode)]


def makes_no_values() -> bool:
    """Returns whether operations have no values, as those of fake tensors."""
    return any(mode.is_infra_mode() for mode in mode_stack())


def _those_on(modes: Sequence[TorchDispatchMode]) -> list[TorchDispatchMode]:
    """Returns the modes that were not left meanwhile, maybe in another thread."""
    return [mode for mode in modes if not (isinstance(mode, FollowingMode) and mode.stays_off)]


@contextmanager
def unfollowed() -> Iterator[None]:
    """Inside the context no mode follows what is computed, as it is not the program that computes it.

    Nor do functions of the program's own, of modes or classes of tensors, run there.
    """
    with torch._C.DisableTorchFunction(), torch.no_grad():
        if not following_modes():
            yield
            return
        with collecting_later():
            before = leave_dispatch_modes()
            enter_dispatch_modes([mode for mode in before if not isinstance(mode, FollowingMode)])
        try:
            yield
        finally:
            with collecting_later():
                leave_dispatch_modes()
                enter_dispatch_modes(_those_on(before))


def _noted(read: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method that reads a tensor's numbers, and of which the modes that are on learn."""

    @functools.wraps(read)
    def noted(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for mode in following_modes():
            mode.note_read(x)
        return read(x, *args, **kwargs)

    return noted
