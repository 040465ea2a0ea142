"""Makes small changes to a source file, each of which a good test suite notices.

A mutant replaces one node of the syntax tree and leaves the rest of the file unchanged. Excluded, because no test
should notice them, are strings (docstrings and messages), annotations, decorators, arguments of raised exceptions,
logger calls, imports and `__all__`.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import unified_diff

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any"}
_LOGGERS = {"log", "logger", "logging"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: the bytes from `start` to `end` of the file at `path` become `text`."""

    path: str
    line: int
    operator: str
    start: int
    end: int
    text: str

    def apply(self, source: bytes) -> bytes:
        """Return the changed file."""
        return source[: self.start] + self.text.encode() + source[self.end :]

    def diff(self, source: bytes) -> str:
        """Return the change as a unified diff without context."""
        before, after = (text.decode().splitlines(keepends=True) for text in (source, self.apply(source)))
        return "".join(unified_diff(before, after, self.path, self.path, n=0))


def mutants(path: str, source: bytes) -> list[Mutant]:
    """Return every mutant of a file, ordered by position."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: dict[Mutant, None] = {}
    for node in _nodes(ast.parse(source)):
        for operator, place, text in _changes(node):
            start = starts[place.lineno - 1] + place.col_offset
            end = starts[(place.end_lineno or 0) - 1] + (place.end_col_offset or 0)  # parsed nodes have both
            found[Mutant(path, place.lineno, operator, start, end, text)] = None
    return sorted(found, key=lambda mutant: (mutant.start, mutant.end, mutant.operator, mutant.text))


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below `node` that may be changed."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _is_left_alone(child):
                continue
            yield child
            if not isinstance(child, ast.Raise):
                yield from _nodes(child)


def _is_left_alone(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or _is_logging(node.value)
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"
    return isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom)


def _is_logging(node: ast.expr) -> bool:
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id in _LOGGERS


Change = tuple[str, ast.expr | ast.stmt, str]  # (operator, replaced node, new text)


def _changes(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.stmt):
        yield from _of_statement(node)
    elif isinstance(node, ast.expr):
        yield from _of_expression(node)
    elif isinstance(node, ast.comprehension):
        for test in node.ifs:
            yield from _negate_condition(test)


def _of_statement(node: ast.stmt) -> Iterator[Change]:
    if isinstance(node, ast.Expr | ast.Raise | ast.Continue | ast.Break | ast.AugAssign):
        yield "drop statement", node, "pass"
    if isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name | ast.Tuple):
        yield "drop statement", node, "pass"
    if isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield "return None", node, "return None"
    if isinstance(node, ast.If | ast.While):
        yield from _negate_condition(node.test)
    if isinstance(node, ast.AugAssign) and type(node.op) in _ARITHMETIC:
        changed = ast.AugAssign(node.target, _ARITHMETIC[type(node.op)](), node.value)
        yield "arithmetic", node, ast.unparse(changed)


def _of_expression(node: ast.expr) -> Iterator[Change]:
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            for other in _COMPARISONS[type(op)]:
                changed = copy.deepcopy(node)
                changed.ops[i] = other()
                yield "comparison", node, _text(changed)
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        yield "arithmetic", node, _text(ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right))
    elif isinstance(node, ast.BoolOp):
        yield "boolean", node, _text(ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.Invert):
        yield "drop operator", node, _text(node.operand)
    elif isinstance(node, ast.IfExp):
        yield from _negate_condition(node.test)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _SWAPPED:
        yield "swap", node.func, _SWAPPED[node.func.id]
    elif isinstance(node, ast.Constant):
        yield from _of_constant(node)


def _of_constant(node: ast.Constant) -> Iterator[Change]:
    if isinstance(node.value, bool):
        yield "constant", node, str(not node.value)
    elif isinstance(node.value, int | float):
        for change in (1, -1):
            yield "constant", node, _text(ast.Constant(node.value + change))


def _negate_condition(test: ast.expr) -> Iterator[Change]:
    """Yield the negated condition, unless changing the condition's own operator has the same effect."""
    is_not = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    if not is_not and not (isinstance(test, ast.Compare) and len(test.ops) == 1):
        yield "negate condition", test, _text(ast.UnaryOp(ast.Not(), test))


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _text(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"
