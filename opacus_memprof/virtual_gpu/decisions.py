# SPDX-License-Identifier: Apache-2.0
"""Finds out whether a value that the host has read decides anything in the program: a branch, an index or a shape.

A loss that is printed, logged or kept in a list decides nothing. The source is followed from the line that reads:
through the names that it assigns, and through `return` to the line that called. Where the source does not tell, as in
calls of unknown functions, the value counts as deciding.
"""

import ast
import linecache
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache

# Functions and methods that hand on a value, or show or keep it, and decide nothing by it.
_HARMLESS = {
    *("print", "str", "repr", "format", "round", "float", "int", "abs", "sum", "max", "min", "mean", "dict", "list"),
    *("append", "extend", "add", "write", "update", "dumps", "dump", "join", "set_postfix", "set_postfix_str"),
    *("log", "debug", "info", "warning", "error", "critical", "add_scalar", "add_scalars", "log_metrics", "report"),
    *("set_description", "item", "tolist", "cpu", "numpy", "detach", "double", "half", "bool", "to", "clone", "len"),
    *("tensor", "exp", "sqrt", "square", "pow", "norm", "stack", "cat", "full", "size", "time", "perf_counter"),
}
_KEEPS = {"append", "extend", "add", "update", "write"}  # methods after which their object has the value
# Functions that write into one of their arguments, and its position.
_FILLS = {"all_gather_object": 0, "gather_object": 1, "broadcast_object_list": 0, "scatter_object_list": 0}
_SIZES = {"range", "zeros", "ones", "empty", "view", "reshape", "expand", "split", "narrow", "islice"}


@dataclass(frozen=True)
class Frame:
    """A line of a Python function that is running."""

    file: str
    line: int


def decides(frames: Iterable[Frame]) -> bool:
    """Returns whether a value decides anything.

    Args:
        frames: where it is read, and then the lines that called, the innermost first.
    """
    frames = list(frames)
    for frame in frames:
        found = _follow(frame.file, frame.line)
        if found != "returned":
            return found != "harmless"
    return not frames


@cache
def _functions(file: str) -> list[ast.AST]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return []
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    functions = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    return [tree, *functions] if tree.body else []


@cache
def _follow(file: str, line: int) -> str:
    """Returns what the program does with a value that it reads at a line.

    "decides" if a branch or loop may depend on it, "returned" if the function returns it, otherwise "harmless".
    """
    around = [each for each in _functions(file) if isinstance(each, ast.Module) or _covers(each, line)]
    if not around:
        return "decides"  # there is no source
    function = around[-1]
    if isinstance(function, ast.Lambda):
        return "returned"
    statements = [node for node in ast.walk(function) if isinstance(node, ast.stmt) and _covers(node, line)]
    if not statements:
        return "decides"
    statement = min(statements, key=lambda node: (node.end_lineno or 0) - node.lineno)
    if isinstance(statement, ast.If | ast.While | ast.Assert) and _covers(statement.test, line):
        return "decides"
    names = set(_filled(statement))
    found = (
        "harmless"
        if names
        else _take(statement, names, lambda node: _covers(node, line) and (_reads(node) or not _reads(statement)))
    )
    body = [node for node in ast.walk(function) if isinstance(node, ast.stmt)]
    before = -1
    while found != "decides" and len(names) > before:  # assignments may stand in a loop
        before = len(names)
        for node in body:
            each = _take(node, names, lambda part: _mentions(part, names))
            found = max(found, each, key=["harmless", "returned", "decides"].index)
    return found


def _filled(statement: ast.stmt) -> Iterator[str]:
    """The names that a collective of objects in the statement writes into."""
    for call in ast.walk(statement):
        position = _FILLS.get(_name(call.func).removeprefix("."), -1) if isinstance(call, ast.Call) else -1
        if isinstance(call, ast.Call) and 0 <= position < len(call.args):
            yield _name(call.args[position])


def _covers(node: ast.AST, line: int) -> bool:
    return getattr(node, "lineno", 0) <= line <= (getattr(node, "end_lineno", 0) or 0)


def _reads(node: ast.AST) -> bool:
    """Returns whether an expression can read a tensor by itself: `x.item()`, float(x) or an f-string with x."""
    return any(isinstance(each, ast.Call | ast.FormattedValue) for each in ast.walk(node))


def _mentions(node: ast.AST, names: set[str]) -> bool:
    return any(_name(each) in names for each in ast.walk(node) if isinstance(each, ast.Name | ast.Attribute))


def _name(node: ast.AST) -> str:
    """The name that stands for a place where a value can be: `x` of x, x[0] and x.append, `.x` of self.x."""
    while isinstance(node, ast.Subscript | ast.Starred):
        node = node.value
    if isinstance(node, ast.Attribute):
        return f".{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _take(statement: ast.stmt, names: set[str], has: Callable[[ast.AST], bool]) -> str:
    """Says what a statement does with a value that some nodes have (`has`), and adds the names that get it."""
    if isinstance(statement, ast.If | ast.While | ast.Assert):  # of these only the condition is the statement's own
        return "decides" if has(statement.test) else "harmless"
    if isinstance(statement, ast.For | ast.AsyncFor):
        if not has(statement.iter):
            return "harmless"
        names |= {_name(node) for node in ast.walk(statement.target)} - {""}
        return _use(statement.iter, has)
    if isinstance(statement, ast.With | ast.AsyncWith | ast.Try | ast.FunctionDef | ast.AsyncFunctionDef):
        return "harmless"  # its own statements come by themselves
    if isinstance(statement, ast.Return):
        if statement.value is None or not has(statement.value):
            return "harmless"
        return "decides" if _use(statement.value, has) == "decides" else "returned"
    value = getattr(statement, "value", None)
    if not isinstance(value, ast.AST) or not has(value):
        return "harmless"
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            elements = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
            names |= {_name(element) for element in elements} - {""}
    for call in ast.walk(value):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _KEEPS:
            names |= {_name(call.func.value)} - {""}
    return _use(value, has)


def _use(expression: ast.AST, has: Callable[[ast.AST], bool]) -> str:
    """Says whether an expression decides by a value: conditions, indices, and calls of functions that are not known."""
    for node in ast.walk(expression):
        if isinstance(node, ast.IfExp) and has(node.test):
            return "decides"
        if isinstance(node, ast.Yield | ast.YieldFrom) and node.value is not None and has(node.value):
            return "decides"
        if isinstance(node, ast.comprehension) and any(map(has, node.ifs)):
            return "decides"
        if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant) and has(node.slice):
            return "decides"
        if isinstance(node, ast.Call) and any(map(has, [*node.args, *(keyword.value for keyword in node.keywords)])):
            name = _name(node.func).removeprefix(".")
            if name in _SIZES or name not in _HARMLESS:
                return "decides"
    return "harmless"
