"""Finds the references to renamed functions and classes, as mypy resolves them."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import isgetsetdescriptor
from pathlib import Path

from mypy import build, nodes, types
from mypy.main import process_options

from tools.rename_definitions import AnyFunction, Definition, Entry, Source, Sources

_BY_NAME = {"setattr", "delattr", "getattr", "hasattr", "object", "spy", "setattr_", "raising"}


@dataclass(frozen=True)
class Edit:
    """One replacement of a name in a file."""

    path: Path
    line: int  # from 1
    column: int  # in bytes, from 0
    old: str
    new: str


@dataclass(frozen=True)
class BareName:
    """A reference without a dot; no scope around it may bind the new name."""

    module: str
    line: int
    entry: Entry


class References:
    """All edits of a renaming in the Python sources."""

    def __init__(self, entries: Sequence[Entry], sources: Sources, trees: build.BuildResult) -> None:
        self.sources = sources
        self.entries = list(entries)
        self.edits: list[Edit] = []
        self.bare: list[BareName] = []
        self.imports: list[BareName] = []
        self.arguments: list[BareName] = []  # of fixtures
        self.problems: defaultdict[Entry, list[str]] = defaultdict(list)
        self.by_full = {each.full: each for each in entries}
        self.by_place = {(one.module, one.line): each for each in entries for one in each.definitions}
        self.trees = trees
        known = (each for several in sources.definitions.values() for each in several)
        self.fixtures = {(each.path, each.qualified) for each in known if each.is_fixture}

    def collect(self) -> References:
        """Find all edits of the sources, and return this object."""
        self._follow_overrides()
        for entry in self.entries:
            for one in entry.definitions:
                self._edit_definition(one, entry)
        for module, tree in self.trees.files.items():
            if module in self.sources.python:
                _Reader(self, self.sources.python[module]).read(tree)
        for source in self.sources.python.values():
            self._imports(source)
            self._annotations(source)
            self._classes(source)
        for entry in self.entries:
            for one in entry.definitions:
                if one.is_fixture:
                    self._fixture(one, entry)
        return self

    def symbol(self, module: str, name: str) -> Entry | None:
        """Return the entry of a module's name, defined there or imported, or None."""
        tree = self.trees.files.get(module)
        found = tree.names.get(name) if tree else None
        full = found.node.fullname if found and found.node else f"{module}.{name}"
        return self.by_full.get(full)

    def member(self, kind: types.Type | None, name: str) -> Iterator[Entry]:
        """Yield the entries of a type's attribute."""
        for info in _infos(kind):
            for base in info.mro:
                if name in base.names:
                    if entry := self.by_full.get(f"{base.fullname}.{name}"):
                        yield entry
                    break

    def add_edit(self, source: Source, line: int, column: int, entry: Entry) -> bool:
        """Add the edit of a name at a position; return False if the name is not there."""
        raw = source.lines[line - 1]
        old = entry.old.encode()
        if raw[column : column + len(old)] != old:
            return False
        self.edits.append(Edit(source.path, line, column, entry.old, entry.new))
        return True

    def _edit_definition(self, one: Definition, entry: Entry) -> None:
        source = self.sources.python[one.module]
        self.add_edit(source, one.line, source.name_column(one.node), entry)

    def _follow_overrides(self) -> None:
        """Add overrides in subclasses; a method that overrides another one cannot be renamed alone."""
        for module, tree in self.trees.files.items():
            if module not in self.sources.python:
                continue
            for info in _classes(tree):
                for name in list(info.names):
                    self._follow_override(info, name)

    def _follow_override(self, info: nodes.TypeInfo, name: str) -> None:
        bases = [base for base in info.mro[1:] if name in base.names]
        above = next((entry for base in bases if (entry := self.by_full.get(f"{base.fullname}.{name}"))), None)
        own = self.by_full.get(f"{info.fullname}.{name}")
        if own and bases and above is None:
            self.problems[own].append(f"it overrides {bases[0].fullname}.{name}, which has no row")
        elif above and own is None and (place := self._place(info, name)):
            entry = Entry(place[0].module, place[0].qualified, above.new, place)
            self.entries.append(entry)
            self.by_full[f"{info.fullname}.{name}"] = entry
        elif above and own and above.new != own.new:
            self.problems[own].append(f"{above.full}, which it overrides, becomes {above.new}")

    def _place(self, info: nodes.TypeInfo, name: str) -> tuple[Definition, ...]:
        qualified = f"{info.fullname.removeprefix(info.module_name + '.')}.{name}"
        return self.sources.definitions.get((info.module_name, qualified), ())

    def _imports(self, source: Source) -> None:
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.ImportFrom) or not node.module or node.level:
                continue
            for alias in node.names:
                entry = self.symbol(node.module, alias.name)
                if entry is None or entry.old != alias.name:
                    continue
                self.add_edit(source, alias.lineno, alias.col_offset, entry)
                if alias.asname is None:
                    self.imports.append(BareName(source.module, alias.lineno, entry))
                elif alias.asname == entry.old and alias.end_col_offset:  # `name as name` exports it again
                    self.add_edit(source, alias.lineno, alias.end_col_offset - len(entry.old.encode()), entry)

    def _annotations(self, source: Source) -> None:
        """Add the names behind the type in `Annotated[...]`, which mypy does not treat as expressions."""
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.Subscript) or not ast.unparse(node.value).endswith("Annotated"):
                continue
            for each in ast.walk(node.slice):
                entry = self._find_entry(source.module, each)
                end = (getattr(each, "end_lineno", 0), getattr(each, "end_col_offset", 0))
                if entry and self.add_edit(source, end[0], end[1] - len(entry.old.encode()), entry):
                    self.bare.append(BareName(source.module, end[0], entry))

    def _classes(self, source: Source) -> None:
        """Add the names of classes wherever they stand: mypy does not treat annotations as expressions."""
        for node in ast.walk(source.tree):
            if (entry := self._find_entry(source.module, node)) and entry.definitions[0].is_class:
                end = (getattr(node, "end_lineno", 0), getattr(node, "end_col_offset", 0))
                if self.add_edit(source, end[0], end[1] - len(entry.old.encode()), entry):
                    self.bare.append(BareName(source.module, end[0], entry))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                quoted = self.symbol(source.module, node.value)  # a forward reference, or the type of a `cast`
                if quoted and quoted.old == node.value and quoted.definitions[0].is_class:
                    self.add_edit(source, node.lineno, node.col_offset + 1, quoted)

    def _find_entry(self, module: str, node: ast.AST) -> Entry | None:
        """Return the entry of a name or of `module.name` at the top of a module, or None."""
        match node:
            case ast.Name(id=name):
                entry = self.symbol(module, name)
            case ast.Attribute(value=ast.Name(id=holder), attr=name):
                tree = self.trees.files.get(module)
                found = tree.names.get(holder) if tree else None
                full = found.node.fullname if found and found.node else ""
                entry = self.symbol(full, name) if full in self.trees.files else self.by_full.get(f"{full}.{name}")
            case _:
                return None
        return entry if entry and entry.old == name else None

    def _fixture(self, one: Definition, entry: Entry) -> None:
        for source in self.sources.python.values():
            if self._has_fixture(source, one):
                for each in source.definitions():
                    if isinstance(each.node, AnyFunction):
                        self._argument(source, each.node, entry)
                self._fixture_strings(source, entry)

    def _has_fixture(self, source: Source, one: Definition) -> bool:
        """Return True if a module's tests get this fixture by its name, and no nearer one."""
        name, folder = one.node.name, one.path.parent
        if source.path == one.path:
            return True
        if one.path.name != "conftest.py" or folder not in source.path.parents:
            return False
        nearer = [each for each in source.path.parents if folder in each.parents]
        places = {source.path, *(each / "conftest.py" for each in nearer)}
        return not any((place, name) in self.fixtures for place in places)

    def _argument(self, source: Source, node: AnyFunction, entry: Entry) -> None:
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        asks = [each for each in given if each.arg == entry.old]
        takes = node.name.startswith("test_") or any("fixture" in ast.unparse(each) for each in node.decorator_list)
        if not asks or not takes:
            return
        if any(isinstance(each, ast.Name) and each.id == entry.new for each in ast.walk(node)):
            self.problems[entry].append(f"{source.path.name}:{node.lineno} has {entry.new}")
        self.add_edit(source, asks[0].lineno, asks[0].col_offset, entry)
        self.arguments.append(BareName(source.module, asks[0].lineno, entry))
        for each in ast.walk(node):
            if isinstance(each, ast.Name) and each.id == entry.old:
                self.add_edit(source, each.lineno, each.col_offset, entry)

    def _fixture_strings(self, source: Source, entry: Entry) -> None:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in (
                "usefixtures",
                "getfixturevalue",
            ):
                for each in node.args:
                    if isinstance(each, ast.Constant) and each.value == entry.old:
                        self.add_edit(source, each.lineno, each.col_offset + 1, entry)


class _Reader:
    """Adds the edits of one module."""

    def __init__(self, references: References, source: Source) -> None:
        self._found = references
        self._source = source

    def read(self, tree: nodes.MypyFile) -> None:
        """Add the edits of all nodes of a module."""
        for each in _walk(tree):
            match each:
                case nodes.NameExpr():
                    self._read_name(each)
                case nodes.MemberExpr():
                    self._read_member(each)
                case nodes.SuperExpr():
                    self._read_super(each)
                case nodes.CallExpr():
                    self._read_call(each)

    def _read_name(self, o: nodes.NameExpr) -> None:
        entry = self._found.by_full.get(o.fullname) or self._local(o)
        if entry and o.name == entry.old:
            self._place_edit(o.line, o.column, entry)
            self._found.bare.append(BareName(self._source.module, o.line, entry))

    def _read_member(self, o: nodes.MemberExpr) -> None:
        entry = self._found.by_full.get(o.fullname) or self._one(self._found.member(self._type(o.expr), o.name), o)
        if entry and o.name == entry.old and o.end_line is not None and o.end_column is not None:
            self._place_edit(o.end_line, o.end_column - len(o.name.encode()), entry)

    def _read_super(self, o: nodes.SuperExpr) -> None:
        bases = o.info.mro[1:] if o.info else []
        entry = next((each for base in bases if (each := self._found.by_full.get(f"{base.fullname}.{o.name}"))), None)
        if entry and o.end_line is not None and o.end_column is not None:
            self._place_edit(o.end_line, o.end_column - len(o.name.encode()), entry)

    def _read_call(self, o: nodes.CallExpr) -> None:
        called = o.callee.name if isinstance(o.callee, nodes.NameExpr | nodes.MemberExpr) else ""
        if called not in _BY_NAME or len(o.args) < 2 or not isinstance(o.args[1], nodes.StrExpr):
            return
        holder, word = o.args[0], o.args[1]
        if isinstance(holder, nodes.RefExpr) and isinstance(holder.node, nodes.MypyFile):
            entry = self._found.symbol(holder.node.fullname, word.value)
        else:
            entry = self._one(self._found.member(self._type(holder), word.value), o)
        if entry and entry.old == word.value:
            self._place_edit(word.line, word.column + 1, entry)

    def _local(self, o: nodes.NameExpr) -> Entry | None:
        node = o.node.func if isinstance(o.node, nodes.Decorator) else o.node
        if isinstance(node, nodes.Var) and o.name == node.name:  # a nested function that is decorated
            return self._decorated_entry(o.name, node.line)
        return self._found.by_place.get((self._source.module, node.line)) if isinstance(node, nodes.FuncDef) else None

    def _decorated_entry(self, name: str, line: int) -> Entry | None:
        """Return the entry of a decorated nested function whose decorators begin at a line, or None."""
        for (module, start), entry in self._found.by_place.items():
            if module == self._source.module and entry.old == name and _is_nested(entry) and 0 <= start - line <= 3:
                return entry
        return None

    def _type(self, expression: nodes.Expression) -> types.Type | None:
        if isinstance(expression, nodes.RefExpr) and isinstance(expression.node, nodes.TypeInfo):
            return types.Instance(expression.node, [])
        return self._found.trees.types.get(expression)

    def _one(self, entries: Iterator[Entry], o: nodes.Expression) -> Entry | None:
        found = list(entries)
        if len({each.new for each in found}) > 1:
            self._found.problems[found[0]].append(f"{self._source.module}:{o.line} may be of several classes")
        return found[0] if found else None

    def _place_edit(self, line: int, column: int, entry: Entry) -> None:
        """Add an edit; Python 3.11 misplaces names in f-strings, which are searched in their line."""
        if self._found.add_edit(self._source, line, column, entry):
            return
        raw = self._source.lines[line - 1]
        places = [match.start() for match in re.finditer(rb"\b%s\b" % entry.old.encode(), raw)]
        if len(places) != 1:
            self._found.problems[entry].append(f"{self._source.module}:{line} cannot be placed")
            return
        self._found.add_edit(self._source, line, places[0], entry)


def _is_nested(entry: Entry) -> bool:
    return any(isinstance(each.owner, AnyFunction) for each in entry.definitions)


def build_trees(sources: Sources) -> build.BuildResult:
    """Let mypy resolve and type everything in its configuration."""
    sys.setrecursionlimit(2**14)  # as mypy's own command does
    with contextlib.chdir(sources.root):
        files, options = process_options([])
        options.export_types = options.preserve_asts = True
        options.incremental, options.cache_dir = False, os.devnull
        return build.build(files, options)


_LINKS = {"node", "info", "type", "analyzed", "names", "original_def", "var", "unanalyzed_items", "definition"}
_ATTRIBUTES: dict[type, list[str]] = {}


def _walk(tree: nodes.MypyFile) -> Iterator[nodes.Node]:
    """Yield every node of a module once; mypy's own visitors are compiled and cannot be subclassed."""
    left: list[object] = [tree]
    seen = set[int]()
    while left:
        each = left.pop()
        if isinstance(each, list | tuple):
            left.extend(each)
        elif isinstance(each, nodes.Node) and not isinstance(each, nodes.TypeInfo | nodes.Var) and id(each) not in seen:
            seen.add(id(each))
            yield each
            left.extend(_value(each, name) for name in _attributes(type(each)))


def _value(node: nodes.Node, name: str) -> object:
    try:
        value: object = getattr(node, name, None)
    except AssertionError:  # a property that only some nodes have
        return None
    return value


def _attributes(kind: type) -> list[str]:
    """Return the attributes of a node class that may hold child nodes."""
    if kind not in _ATTRIBUTES:
        found = {name for base in kind.__mro__ for name, each in vars(base).items() if isgetsetdescriptor(each)}
        _ATTRIBUTES[kind] = sorted(name for name in found - _LINKS if not name.startswith("_"))
    return _ATTRIBUTES[kind]


def _classes(tree: nodes.MypyFile) -> Iterator[nodes.TypeInfo]:
    """Yield the classes of a module, including nested ones."""
    left: list[nodes.SymbolTable] = [tree.names]
    while left:
        for found in left.pop().values():
            if isinstance(found.node, nodes.TypeInfo) and found.node.module_name == tree.fullname:
                yield found.node
                left.append(found.node.names)


def _infos(kind: types.Type | None) -> Iterator[nodes.TypeInfo]:
    """Yield the classes of which a value of this type may be an instance."""
    kind = types.get_proper_type(kind)
    match kind:
        case types.Instance():
            yield kind.type
        case types.UnionType():
            for each in kind.items:
                yield from _infos(each)
        case types.TypeType():
            yield from _infos(kind.item)
        case types.TypeVarType():
            for each in kind.values or [kind.upper_bound]:
                yield from _infos(each)
        case types.TupleType():
            yield from _infos(kind.partial_fallback)
        case types.CallableType() if kind.is_type_obj():
            yield kind.type_object()
        case types.Overloaded() if kind.is_type_obj():
            yield kind.type_object()
        case types.LiteralType() | types.TypedDictType():
            yield from _infos(kind.fallback)
