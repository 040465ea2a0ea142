"""Finds renamed functions in text: dotted names, names in backticks, `__all__`, and code in documents."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tools.rename_definitions import FOLDERS, Entry, Source, Sources
from tools.rename_references import Edit, References

_DOTTED = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})(?:\.[A-Za-z_]\w*)+(?::[A-Za-z_]\w*)?")
_TICKED = re.compile(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`")
_PATH = re.compile(rf"(?<![\w./-])((?:{'|'.join(FOLDERS)})/[\w/]+)\.py")
_HOLDERS = {"context": "Context", "report": "Reporter"}  # names of instances in documents
_IMPORT = re.compile(r"\bfrom ([\w.]+) import ([\w, ()]+)")


def text_edits(found: References, sources: Sources) -> Iterator[Edit]:
    """Yield the edits of strings, comments and documents."""
    for source in sources.python.values():
        yield from _python_edits(source, found)
    for path in sources.texts:
        try:
            lines = path.read_text().split("\n")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(lines, 1):
            yield from _dotted_edits(path, number, line, 0, found)
            if path.suffix == ".md":
                yield from _line_edits(path, number, line, found)
        if path.suffix == ".md":
            yield from _fence_edits(path, lines, found)


def _python_edits(source: Source, found: References) -> Iterator[Edit]:
    """Yield the edits of a module's strings and comments."""
    text = source.raw.decode()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (tokenize.STRING, tokenize.COMMENT):
            continue
        if token.type == tokenize.STRING and _IMPORT.search(token.string):
            yield from _block_edits(source.path, _placed_lines(token), found)
        is_prose = token.type == tokenize.COMMENT or token.string.lstrip("rbfRBF").startswith('"""')
        for number, column, line in _placed_lines(token):
            yield from _dotted_edits(source.path, number, line, column, found)
            if is_prose:
                yield from _backtick_edits(source, number, line, column, found)
    yield from _export_edits(source, found)


def _placed_lines(token: tokenize.TokenInfo) -> list[tuple[int, int, str]]:
    """Return (number, start column in bytes, text) of each line of a token."""
    start = len(token.line.split("\n")[0][: token.start[1]].encode())
    return [(token.start[0] + i, 0 if i else start, line) for i, line in enumerate(token.string.split("\n"))]


def _export_edits(source: Source, found: References) -> Iterator[Edit]:
    for node in source.tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            for each in ast.walk(node.value):
                if isinstance(each, ast.Constant) and (entry := found.symbol(source.module, str(each.value))):
                    yield Edit(source.path, each.lineno, each.col_offset + 1, entry.old, entry.new)


def _dotted_edits(path: Path, number: int, line: str, column: int, found: References) -> Iterator[Edit]:
    """Yield the edits of `package.module.name` and `package.module:name`."""
    for match in _DOTTED.finditer(line):
        parts = re.split(r"[.:]", match.group())
        starts = [match.start() + each.start() for each in re.finditer(r"[A-Za-z_]\w*", match.group())]
        for cut in range(len(parts) - 1, 0, -1):
            module = ".".join(parts[:cut])
            if module in found.trees.files:
                entry = found.symbol(module, parts[cut]) or found.by_full.get(".".join(parts[: cut + 2]))
                if entry and entry.old in parts[cut:]:
                    at = starts[parts.index(entry.old, cut)]
                    yield Edit(path, number, column + len(line[:at].encode()), entry.old, entry.new)
                break


def _backtick_edits(source: Source, number: int, line: str, column: int, found: References) -> Iterator[Edit]:
    """Yield the edits of names in backticks that exist in the module."""
    for match in _TICKED.finditer(line):
        if entry := _resolve(source.module, match.group(1), found):
            at = match.start(1) + len(match.group(1)) - len(entry.old)
            yield Edit(source.path, number, column + len(line[:at].encode()), entry.old, entry.new)


def _resolve(module: str, words: str, found: References) -> Entry | None:
    """Return the entry of `name`, `Class.name` or `module.name` in a module's text, or None."""
    first, _, rest = words.partition(".")
    entry = found.symbol(module, first) if not rest else found.by_full.get(f"{module}.{words}")
    if entry is None and rest and "." not in rest and (tree := found.trees.files.get(module)):
        node = tree.names.get(first)
        if node and node.node:
            entry = found.by_full.get(f"{node.node.fullname}.{rest}") or found.symbol(node.node.fullname, rest)
    return entry if entry and entry.old == words.rpartition(".")[2] else None


def _line_edits(path: Path, number: int, line: str, found: References) -> Iterator[Edit]:
    """Yield the edits of names in backticks on a line that also names their file."""
    modules = [each.replace("/", ".").removesuffix(".__init__") for each in _PATH.findall(line)]
    for match in _TICKED.finditer(line):
        for module in modules:
            if entry := _resolve(module, match.group(1), found):
                at = match.start(1) + len(match.group(1)) - len(entry.old)
                yield Edit(path, number, len(line[:at].encode()), entry.old, entry.new)
                break


def _fence_edits(path: Path, lines: list[str], found: References) -> Iterator[Edit]:
    """Yield the edits of fenced code blocks: names that the block imports."""
    block: list[tuple[int, int, str]] = []
    is_code = False
    for number, line in enumerate(lines, 1):
        if line.startswith("```"):
            if is_code:
                yield from _block_edits(path, block, found)
            is_code, block = line.startswith(("```python", "```diff")) and not is_code, []
        elif is_code:
            block.append((number, 0, line))


def _block_edits(path: Path, block: list[tuple[int, int, str]], found: References) -> Iterator[Edit]:
    renamed: dict[str, Entry] = {}
    modules: dict[str, str] = {}
    for _, _, line in block:
        for match in _IMPORT.finditer(line):
            for name in re.findall(r"\w+", match.group(2)):
                if entry := found.symbol(match.group(1), name):
                    renamed[name] = entry
                elif f"{match.group(1)}.{name}" in found.trees.files:
                    modules[name] = f"{match.group(1)}.{name}"
    for number, column, line in block:
        for match in re.finditer(r"(?:(\w+)\.)?\b([A-Za-z_]\w*)\b", line):
            holder, name = match.groups()
            if holder is None:
                entry = None if line[: match.start()].endswith(".") else renamed.get(name)
            elif holder in modules:
                entry = found.symbol(modules[holder], name)
            else:
                entry = next(
                    (each for each in found.entries if each.qualified == f"{_HOLDERS.get(holder)}.{name}"), None
                )
            if entry and entry.old == name:
                yield Edit(path, number, column + len(line[: match.start(2)].encode()), entry.old, entry.new)
