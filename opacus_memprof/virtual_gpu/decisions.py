# SPDX-License-Identifier: Apache-2.0
"""Finds out whether a value that the host has read decides anything in the program: a branch, an index or a shape.

A loss that is printed, logged or kept in a list decides nothing. The source is followed from the line that reads:
through the names that it assigns, in other functions of the file too where they mean the same there, and through
`return` to the line that called. Where the source does not tell, as in calls of unknown functions, the value counts as
deciding.
"""

import ast
import linecache
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache

# Functions and methods that hand on a value, or show or keep it, and decide nothing by it.
_HARMLESS = {
    *("print", "str", "repr", "format", "round", "float", "int", "abs", "sum", "max", "min", "mean", "dict", "list"),
    *("append", "extend", "add", "write", "update", "dumps", "dump", "join", "set_postfix", "set_postfix_str"),
    *("writerow", "writerows", "array", "asarray", "savez", "savez_compressed", "savetxt"),
    *("log", "debug", "info", "warning", "error", "critical", "add_scalar", "add_scalars", "log_metrics", "report"),
    *("set_description", "item", "tolist", "cpu", "numpy", "detach", "double", "half", "bool", "to", "clone", "len"),
    *("tensor", "exp", "sqrt", "square", "pow", "norm", "stack", "cat", "full", "size", "time", "perf_counter"),
}
_SHOWS = {"print", "log", "write", "save", "report", "metric", "metrics"}  # words in the names of others
_KEEPS = {"append", "extend", "add", "update", "write", "report"}  # methods after which their object has the value
# Functions whose results do not depend on values that are not computed, which are taken for finite.
_SETTLED = {"isnan", "isinf", "isfinite", "len", "keys", "isinstance", "hasattr", "type", "id"}
_METADATA = {"shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad"}
_HANDS_ON = {"any", "all", "item", "bool", "cpu"}
_SIZES = {"range", "zeros", "ones", "empty", "full", "view", "reshape", "expand", "split", "narrow", "islice"}
# Functions that write into one of their arguments, and its position.
_FILLS = {"all_gather_object": 0, "gather_object": 1, "broadcast_object_list": 0, "scatter_object_list": 0}
# Files whose functions print, save or move whole tensors for their callers.
_PASSING = (
    *("torch/_tensor_str.py", "torch/serialization.py", "torch/storage.py", "torch/nn/modules/module.py"),
    "safetensors/torch.py",
)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_ORDER = ("harmless", "returned", "decides")
Has = Callable[[ast.AST], bool]


@dataclass(frozen=True)
class Frame:
    """A line of a Python function that is running.

    Attributes:
        file: its file.
        line: the line.
        function: the function's name, as `<lambda>`; empty where it is not known.
        columns: what is evaluated there: its first column, its last line and its last column, as `ast` counts them.
            Python 3.10 does not tell them.
    """

    file: str
    line: int
    function: str = ""
    columns: tuple[int, int, int] | None = None


@dataclass
class _Scope:
    """A function, a lambda or a module."""

    node: ast.AST
    name: str  # as frames have it
    outer: "_Scope | None"
    statements: list[ast.stmt] = field(default_factory=list)  # without those of functions in it
    names: set[str] = field(default_factory=set)  # its own
    others: set[str] = field(default_factory=set)  # declared as global or nonlocal

    def home(self, name: str) -> "_Scope":
        """The scope that has a name as its own."""
        if self.outer is None or name in self.names - self.others:
            return self
        return self.outer.home(name)


def decides(frames: Iterable[Frame]) -> bool:
    """Returns whether a value decides anything.

    Args:
        frames: where it is read, and then the lines that called, the innermost first.
    """
    frames = list(frames)
    for frame in frames:
        found = _follow(frame)
        if found != "returned":
            return found != "harmless"
    return not frames


@cache
def _scopes(file: str) -> list[_Scope]:
    """The scopes of a file, the module first, and each before those in it."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return []
    found = [_Scope(tree, "<module>", None)]

    def visit(node: ast.AST, scope: _Scope) -> None:
        if isinstance(node, ast.stmt):
            scope.statements.append(node)
        if isinstance(node, ast.Global | ast.Nonlocal):
            scope.others |= set(node.names)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            scope = _Scope(node, getattr(node, "name", "<lambda>"), scope)
            found.append(scope)
            if isinstance(node, ast.Lambda):
                scope.statements.append(ast.copy_location(ast.Return(node.body), node.body))
        if isinstance(node, ast.arg):
            scope.names.add(node.arg)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            scope.names.add(node.id)
        for child in ast.iter_child_nodes(node):
            visit(child, scope)

    visit(tree, found[0])
    return found if tree.body else []


@cache
def _follow(frame: Frame) -> str:
    """Returns what the program does with a value that it reads at a line.

    "decides" if a branch or loop may depend on it, "returned" if the function returns it, otherwise "harmless".
    """
    if frame.file.endswith(_PASSING):
        return "returned"
    line = frame.line
    scopes = _scopes(frame.file)
    around = [each for each in scopes if each.outer is None or _covers(each.node, line)]
    if not around:
        return "decides"  # there is no source
    scope = next((each for each in reversed(around) if each.name == frame.function), around[-1])
    near = not frame.file.startswith(_LIBRARIES)
    here = [each for each in scope.statements if any(_covers(part, line) for part in _expressions(each))]
    here = here or [each for each in scope.statements if each.lineno == line]  # "if (" of a condition of many lines
    if not here:
        return "decides"
    here = _around(here, frame) or here
    reading = [each for each in here if any(_covers(part, line) and _reads(part) for part in _expressions(each))]
    statement = (reading or here[:1])[-1]
    names = set(_filled(statement))
    found = "harmless" if names else _take(statement, names, _reader(statement, frame), near)
    found = max(found, _flow(scope.statements, names, near), key=_ORDER.index)
    for other in scopes:
        plain = {name: name.removesuffix("[]") for name in names}
        same = {each for each, name in plain.items() if name[0] == "." or other.home(name) is scope.home(name)}
        if found != "decides" and other is not scope and _flow(other.statements, same, near=False) == "decides":
            return "decides"
    return found


def _range(node: ast.AST) -> tuple[int, int, int, int]:
    return tuple(getattr(node, name, -1) for name in ("lineno", "col_offset", "end_lineno", "end_col_offset"))  # type: ignore[return-value]


def _around(statements: list[ast.stmt], frame: Frame) -> list[ast.stmt]:
    """The innermost of the statements that has what a frame evaluates, if its columns are known."""
    if frame.columns is None:
        return []
    column, last_line, last_column = frame.columns
    around = [
        each
        for each in statements
        if _range(each)[:2] <= (frame.line, column) and (last_line, last_column) <= _range(each)[2:]
    ]
    return sorted(around, key=lambda each: _range(each)[:2])[-1:]


def _evaluated(statement: ast.stmt, frame: Frame) -> ast.expr | None:
    """The expression of a statement that a frame evaluates, if it is one that hands on what it reads."""
    if frame.columns is None:
        return None
    place = (frame.line, *frame.columns)
    for node in (node for part in _expressions(statement) for node in ast.walk(part)):
        if isinstance(node, ast.Call | ast.Compare | ast.Name | ast.Attribute) and _range(node) == place:
            return node
    return None


def _flow(statements: list[ast.stmt], names: set[str], near: bool) -> str:
    """Says what statements do with the value that some names have, and adds the names that get it.

    Unknown functions count only in the program's own function that has read: libraries move and collect what they log.
    """
    found, before = "harmless", 0
    while found != "decides" and len(names) > before:  # assignments may stand in a loop
        before = len(names)
        for each in statements:
            found = max(found, _take(each, names, lambda node: _mentions(node, names), near), key=_ORDER.index)
    return found


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions of a statement that are not those of statements in it."""
    for child in ast.iter_child_nodes(node):
        if child in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            continue
        if isinstance(child, ast.expr):
            yield child
        elif not isinstance(child, ast.stmt):
            yield from _expressions(child)


def _filled(statement: ast.stmt) -> Iterator[str]:
    """The names that a collective of objects in the statement writes into."""
    for call in (node for part in _expressions(statement) for node in ast.walk(part) if isinstance(node, ast.Call)):
        position = _FILLS.get(_name(call.func).removeprefix("."), -1)
        if 0 <= position < len(call.args):
            given = call.args[position]
            parts = (given.body, given.orelse) if isinstance(given, ast.IfExp) else (given,)  # None on other ranks
            yield from filter(None, map(_name, parts))


def _covers(node: ast.AST, line: int) -> bool:
    return getattr(node, "lineno", 0) <= line <= (getattr(node, "end_lineno", 0) or 0)


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """Yields an expression and its parts, except settled ones (see `_is_settled`)."""
    if _is_settled(node):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _parts(child)


def _is_settled(node: ast.AST) -> bool:
    """Returns whether the result of an expression is known without its tensors' values, as of `x is None` or x.shape.

    Values that the virtual GPU has not computed are taken for finite, so tests for NaN are settled, too.
    """
    if isinstance(node, ast.Attribute):
        return node.attr in _METADATA
    if isinstance(node, ast.Compare):
        is_text = isinstance(node.left, ast.JoinedStr) or isinstance(getattr(node.left, "value", None), str)
        of_key = is_text and isinstance(node.ops[0], ast.In | ast.NotIn)
        return of_key or all(isinstance(operator, ast.Is | ast.IsNot) for operator in node.ops)
    if not isinstance(node, ast.Call):
        return False
    name = _name(node.func).removeprefix(".")
    of = node.args or [getattr(node.func, "value", node.func)]
    return name in _SETTLED or (name in _HANDS_ON and _is_settled(of[0]))


def _reads(node: ast.AST) -> bool:
    """Returns whether an expression can read a tensor by itself: `x.item()`, float(x) or an f-string with x."""
    return any(
        isinstance(each, ast.FormattedValue)
        or (isinstance(each, ast.Call) and (isinstance(each.func, ast.Attribute) or bool(_arguments(each))))
        for each in _parts(node)
    )


def _reader(statement: ast.stmt, frame: Frame) -> Has:
    """Returns what tells whether a part of the statement may be what has read in the frame."""
    evaluated, line = _evaluated(statement, frame), frame.line
    if evaluated is not None:
        return lambda node: any(part is evaluated for part in _parts(node))
    expressions = list(_expressions(statement))
    by_calls = any(map(_reads, expressions))
    settled = not by_calls and any(_is_settled(node) for part in expressions for node in ast.walk(part))
    first = not any(_covers(part, line) for part in expressions)
    # x[i] = y reads y, if that is a tensor.
    stored = isinstance(statement, ast.Assign) and not isinstance(statement.value, ast.Constant) and statement.value
    places = set(ast.walk(stored)) if stored else None

    def has(node: ast.AST) -> bool:
        if settled or not (first or _covers(node, line)):
            return False
        return _reads(node) if by_calls else places is None or node in places

    return has


def _mentions(node: ast.AST, names: set[str]) -> bool:
    found = (_name(each) for each in _parts(node) if isinstance(each, ast.Name | ast.Attribute))
    return any(name in names or f"{name}[]" in names for name in found)


def _name(node: ast.AST) -> str:
    """Returns the name by which an expression refers to a value: "x" for x and x[0], ".x" for self.x; or ""."""
    while isinstance(node, ast.Subscript | ast.Starred):
        node = node.value
    if isinstance(node, ast.Attribute):
        return f".{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _targets(node: ast.AST | None) -> Iterator[str]:
    """Yields the names that an assignment to this expression sets."""
    if isinstance(node, ast.Tuple | ast.List):
        for element in node.elts:
            yield from _targets(element)
    elif node is not None and (name := _name(node)):
        yield name


def _take(statement: ast.stmt, names: set[str], has: Has, near: bool) -> str:
    """Returns what a statement does with a value ("decides", "returned", "harmless"), of nodes for which `has` holds.

    Names to which the statement assigns this value are added to `names`.
    """
    if isinstance(statement, ast.If | ast.While | ast.Assert):
        return "decides" if has(statement.test) and f"{_name(statement.test)}[]" not in names else "harmless"
    if isinstance(statement, ast.Match):
        return "decides" if any(map(has, _expressions(statement))) else "harmless"
    if isinstance(statement, ast.Raise):
        return "harmless"  # it is raised whatever its text
    value = getattr(statement, "iter", getattr(statement, "value", None))  # a loop's, or what is assigned or returned
    has_value = value is not None and has(value)
    if has_value:
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        if isinstance(value, ast.Call) and _name(value.func) == ".items" and isinstance(targets[0], ast.Tuple):
            targets = targets[0].elts[1:]  # without the keys
        names |= {name for target in targets for name in _targets(target)}
    for node in (node for part in _expressions(statement) for node in ast.walk(part)):
        if isinstance(node, ast.NamedExpr) and has(node.value):
            names.add(node.target.id)
        if isinstance(node, ast.Call) and any(map(has, _arguments(node))):
            names |= _keepers(node)
    if any(_decide(node, has, near) for part in _expressions(statement) for node in ast.walk(part)):
        return "decides"
    return "returned" if isinstance(statement, ast.Return) and has_value else "harmless"


def _keepers(call: ast.Call) -> set[str]:
    """The name of the object that keeps what a call gives it, with brackets: whether it is empty is settled."""
    if isinstance(call.func, ast.Attribute) and call.func.attr in _KEEPS and (name := _name(call.func.value)):
        return {f"{name}[]"}
    return set()


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _decide(node: ast.AST, has: Has, near: bool) -> bool:
    """Returns whether a node decides by a value: conditions, indices, and calls of functions that are not known."""
    if isinstance(node, ast.IfExp):
        return has(node.test)
    if isinstance(node, ast.BoolOp):
        later = [each for value in node.values[1:] for each in ast.walk(value) if isinstance(each, ast.Call)]
        return any(map(has, node.values[:-1])) and any(not _is_harmless(call) for call in later)
    if isinstance(node, ast.Yield | ast.YieldFrom):
        return node.value is not None and has(node.value)
    if isinstance(node, ast.comprehension):
        return any(map(has, node.ifs))
    if isinstance(node, ast.Subscript):
        return not isinstance(node.slice, ast.Constant | ast.JoinedStr) and has(node.slice)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):  # [0] * n
        return any(
            isinstance(one, ast.List | ast.Tuple) and has(two)
            for one, two in ((node.left, node.right), (node.right, node.left))
        )
    if isinstance(node, ast.Call) and not _is_settled(node) and any(map(has, _arguments(node))):
        chooses = any(keyword.arg == "key" and has(keyword.value) for keyword in node.keywords)
        name = _name(node.func).removeprefix(".")
        sized = name in _SIZES and (name != "full" or (bool(node.args) and has(node.args[0])))
        return chooses or sized or (near and not _is_harmless(node))
    return False


def _is_harmless(call: ast.Call) -> bool:
    """Returns whether a function hands on, shows or keeps a value: also a class, and what says so by its name."""
    name = _name(call.func).removeprefix(".")
    return name in _HARMLESS or name in _FILLS or name[:1].isupper() or not _SHOWS.isdisjoint(name.split("_"))
