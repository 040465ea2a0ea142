"""Finds new names that are already taken in a scope where they become visible."""

from __future__ import annotations

import ast
import builtins
from collections import defaultdict
from collections.abc import Iterator, Sequence

from mypy.nodes import SymbolTable, TypeInfo

from tools.rename_definitions import AnyFunction, Definition, Entry, Source, Sources
from tools.rename_references import BareName, References

_Scope = AnyFunction | ast.Lambda | ast.Module | ast.ClassDef


def find_clashes(found: References, sources: Sources) -> dict[Entry, list[str]]:
    """Return the reasons against each entry that cannot be carried out."""
    clashes: defaultdict[Entry, list[str]] = defaultdict(list)
    for entry, problems in found.problems.items():
        clashes[entry] += problems
    for entry in found.entries:
        for one in entry.definitions:
            clashes[entry] += _at_definition(one, entry, found)
    for each in found.imports:
        source = sources.python[each.module]
        clashes[each.entry] += _in_module(source, each, found)
    for each in found.arguments:
        if each.entry.new in _bound_names(sources.python[each.module].tree):
            clashes[each.entry].append(f"{each.module} has {each.entry.new} already")
        twins = [one for one in found.imports if one.module == each.module and one.entry.new == each.entry.new]
        if any(one.entry != each.entry for one in twins):
            clashes[each.entry].append(f"{each.module} would import {each.entry.new}")
    for each in found.bare:
        source = sources.python[each.module]
        for scope in _scopes(source, each.line):
            if each.entry.new in _bound_names(scope):
                clashes[each.entry].append(f"{each.module}:{each.line} has a local {each.entry.new}")
    return {entry: list(dict.fromkeys(reasons)) for entry, reasons in clashes.items() if reasons}


def _at_definition(one: Definition, entry: Entry, found: References) -> Iterator[str]:
    """Yield the reasons against a new name at its definition."""
    if not isinstance(one.owner, ast.ClassDef) and hasattr(builtins, entry.new):
        yield f"{entry.new} is a builtin"
    source = found.sources.python[one.module]
    if isinstance(one.owner, ast.Module):
        yield from _in_module(source, BareName(one.module, one.line, entry), found)
    elif isinstance(one.owner, ast.ClassDef):
        others = [each for each in found.entries if each.new == entry.new and each.module == entry.module]
        twins = {each.qualified for each in others} - {entry.qualified}
        if entry.new in _bound_names(one.owner) or _sibling(entry) in twins:
            yield f"the class has {entry.new} already"
        tree = found.trees.files.get(one.module)
        info = _info(tree.names, entry.qualified.split(".")[:-1]) if tree else None
        if info and any(entry.new in base.names for base in info.mro):
            yield f"the class has or inherits {entry.new}"
    elif any(isinstance(each, ast.Name) and each.id == entry.new for each in ast.walk(one.owner)):
        yield f"{one.module}:{one.line} uses {entry.new} around it"


def _sibling(entry: Entry) -> str:
    return f"{entry.qualified.rpartition('.')[0]}.{entry.new}"


def _info(names: SymbolTable, path: Sequence[str]) -> TypeInfo | None:
    """Return the class at a path of names, or None."""
    info: TypeInfo | None = None
    for each in path:
        node = found.node if (found := names.get(each)) else None
        if not isinstance(node, TypeInfo):
            return None
        info, names = node, node.names
    return info


def _in_module(source: Source, name: BareName, found: References) -> Iterator[str]:
    """Yield the conflicts of a new name with a module's own names, except names that are renamed too."""
    entry = name.entry
    same = {each for each in found.entries if each.new == entry.new and each.full != entry.full}
    if entry.new in _bound_names(source.tree):
        yield f"{source.module} has {entry.new} already"
    if any(each.module == source.module and "." not in each.qualified for each in same):
        yield f"{source.module} would have two {entry.new}"
    twins = [each for each in found.imports if each.module == source.module and each.entry in same]
    if twins:
        yield f"{source.module} would import two {entry.new}"


def _scopes(source: Source, line: int) -> list[_Scope]:
    """Return the functions that contain a line."""
    return [each for each in _functions(source) if each.lineno <= line <= (each.end_lineno or each.lineno)]


_FUNCTIONS: dict[str, list[AnyFunction | ast.Lambda]] = {}
_BOUND: dict[int, set[str]] = {}


def _functions(source: Source) -> list[AnyFunction | ast.Lambda]:
    if source.module not in _FUNCTIONS:
        _FUNCTIONS[source.module] = [n for n in ast.walk(source.tree) if isinstance(n, AnyFunction | ast.Lambda)]
    return _FUNCTIONS[source.module]


def _bound_names(scope: _Scope) -> set[str]:
    """Return the names that a scope itself binds."""
    if id(scope) not in _BOUND:
        _BOUND[id(scope)] = set(_bindings(scope))
    return _BOUND[id(scope)]


def _bindings(scope: _Scope) -> Iterator[str]:
    if isinstance(scope, AnyFunction | ast.Lambda):
        given = scope.args
        yield from (each.arg for each in [*given.posonlyargs, *given.args, *given.kwonlyargs])
        yield from (each.arg for each in (given.vararg, given.kwarg) if each)
    left: list[ast.AST] = list(scope.body) if isinstance(scope.body, list) else [scope.body]
    while left:
        node = left.pop()
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
                continue
            case ast.Lambda():
                continue
            case ast.Name(ctx=ast.Store()):
                yield node.id
            case ast.alias():
                yield (node.asname or node.name).split(".")[0]
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name
        left.extend(ast.iter_child_nodes(node))
