"""The sources that a renaming reads, and the definitions that its table names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

FOLDERS = ("app", "worker", "spard", "lab", "tests", "tools", "benchmarks", "examples", "migrations")
TEXTS = ("docs", "deploy", "requirements", "service", "tools", "tests", "findings")
_TEXT_SUFFIXES = {".md", ".toml", ".yml", ".yaml", ".txt", ".sh", ".jinja", ".html", ".cfg"}

AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef
AnyDefinition = AnyFunction | ast.ClassDef


@dataclass(frozen=True)
class Definition:
    """One `def` or `class`; a qualified name may have several, such as overloads."""

    module: str
    qualified: str  # `Class.method`, `outer.inner`
    path: Path
    node: AnyDefinition = field(hash=False, compare=False)
    owner: ast.Module | ast.ClassDef | AnyFunction = field(hash=False, compare=False)
    line: int = 0

    @property
    def is_class(self) -> bool:
        """True for a class."""
        return isinstance(self.node, ast.ClassDef)

    @property
    def is_fixture(self) -> bool:
        """True for a pytest fixture."""
        return any("fixture" in ast.unparse(each).partition("(")[0] for each in self.node.decorator_list)


@dataclass(frozen=True)
class Entry:
    """A row of the table whose old name exists."""

    module: str
    qualified: str
    new: str
    definitions: tuple[Definition, ...] = field(hash=False, compare=False)

    @property
    def old(self) -> str:
        """The last part of the old name."""
        return self.qualified.rpartition(".")[2]

    @property
    def full(self) -> str:
        """The qualified name with its module."""
        return f"{self.module}.{self.qualified}"


@dataclass(frozen=True)
class Source:
    """One Python file."""

    path: Path
    module: str
    raw: bytes

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.raw)

    @cached_property
    def lines(self) -> list[bytes]:
        """The lines as bytes, because `ast` counts columns in bytes."""
        return self.raw.split(b"\n")

    def definitions(self) -> Iterator[Definition]:
        """Yield every function and class, including those in classes and functions."""
        yield from self._walk(self.tree, self.tree, "")

    def _walk(self, node: ast.AST, owner: ast.Module | ast.ClassDef | AnyFunction, prefix: str) -> Iterator[Definition]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, AnyDefinition):
                yield Definition(self.module, prefix + child.name, self.path, child, owner, child.lineno)
                yield from self._walk(child, child, f"{prefix}{child.name}.")
            else:
                yield from self._walk(child, owner, prefix)

    def name_column(self, node: AnyDefinition) -> int:
        """Return the column of a definition's name in its `def` or `class` line."""
        match = re.compile(rb"(?:async\s+)?(?:def|class)\s+").match(self.lines[node.lineno - 1], node.col_offset)
        if match is None:
            raise ValueError(f"{self.path}:{node.lineno}: there is no definition")
        return match.end()


@dataclass(frozen=True)
class Sources:
    """All files that a renaming may change."""

    root: Path
    python: Mapping[str, Source]  # by module
    texts: tuple[Path, ...]

    @classmethod
    def read(cls, root: Path) -> Sources:
        """Read the folders of a repository."""
        python = {}
        for folder in FOLDERS:
            for path in sorted((root / folder).rglob("*.py")):
                parts = path.relative_to(root).with_suffix("").parts
                parts = parts[1:] if parts[:2] == ("lab", "spard_lab") else parts  # a root of imports of its own
                module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                python[module] = Source(path, module, path.read_bytes())
        texts = [path for path in root.iterdir() if path.suffix in _TEXT_SUFFIXES or path.name == "Makefile"]
        for folder in TEXTS:
            texts += [path for path in sorted((root / folder).rglob("*")) if path.suffix in _TEXT_SUFFIXES]
        keep = {root / "CHANGELOG.md", root / "tools" / "renames.toml"}
        return cls(root, python, tuple(path for path in texts if path not in keep and path.is_file()))

    @cached_property
    def definitions(self) -> dict[tuple[str, str], tuple[Definition, ...]]:
        """All functions and classes by module and qualified name."""
        found: dict[tuple[str, str], tuple[Definition, ...]] = {}
        for source in self.python.values():
            for each in source.definitions():
                key = (each.module, each.qualified)
                found[key] = (*found.get(key, ()), each)
        return found


def find_entries(table: Mapping[str, Mapping[str, str]], sources: Sources) -> tuple[list[Entry], list[str]]:
    """Return the entries to carry out, and those of which neither the old nor the new name exists."""
    entries, gone = [], []
    for module, names in table.items():
        for qualified, new in names.items():
            parts = qualified.split(".")
            renamed = ".".join(names.get(".".join(parts[: i + 1]), part) for i, part in enumerate(parts))
            if definitions := sources.definitions.get((module, qualified)):
                entries.append(Entry(module, qualified, new, definitions))
            elif (module, renamed) not in sources.definitions:
                gone.append(f"{module}:{qualified} -> {new}")
    return entries, gone
