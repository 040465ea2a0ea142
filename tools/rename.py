"""Rename functions, methods and classes by `tools/renames.toml`, everywhere at once: `python -m tools.rename`.

The table maps, per module, old qualified names to new last names: `"Frame.seen" = "project"`. mypy resolves every name
and attribute in the sources, so equal names of other things are not touched. Rewritten are definitions, overrides in
subclasses, imports, references, fixtures with the arguments that request them, strings of `setattr` and `getattr`,
`__all__`, dotted names in any text, and names in backticks in comments, docstrings and documents.

Entries whose old name does not exist are skipped, so the tool can be run again, also on a newer tree. A new name that
is already taken in a scope is a clash: nothing is written then, unless `--skip-clashes` leaves those entries out.
Finally ruff sorts the imports and formats the changed files.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mypy.build import BuildResult

from tools.rename_clashes import find_clashes
from tools.rename_definitions import Entry, Sources, find_entries
from tools.rename_references import Edit, References, build_trees
from tools.rename_texts import text_edits

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tools" / "renames.toml"
LITERAL = "text:"  # sections of literal replacements

Table = Mapping[str, Mapping[str, str]]  # by module: old qualified name -> new last name


def read_table(path: Path = TABLE) -> Table:
    """Return the table in a file."""
    table: Table = tomllib.loads(path.read_text())
    return table


def rewrite(path: Path, edits: Iterable[Edit]) -> bytes:
    """Return a file's content with the edits applied (columns count bytes); raise `ValueError` if two overlap."""
    lines = path.read_bytes().split(b"\n")
    for edit in sorted(set(edits), key=lambda each: (each.line, each.column), reverse=True):
        line, old = lines[edit.line - 1], edit.old.encode()
        end = edit.column + len(old)
        if line[edit.column : end] != old:
            raise ValueError(f"{path}:{edit.line}: {edit.old!r} is not at column {edit.column}")
        lines[edit.line - 1] = line[: edit.column] + edit.new.encode() + line[end:]
    return b"\n".join(lines)


def replace_words(table: Table, contents: dict[Path, bytes]) -> None:
    """Apply sections `text:PATTERN`: exact words in files that mypy does not read, such as templates."""
    for pattern, words in table.items():
        for path in sorted(ROOT.glob(pattern.removeprefix(LITERAL))) if pattern.startswith(LITERAL) else ():
            content = before = contents.get(path) or path.read_bytes()
            for old, new in words.items():
                content = content.replace(old.encode(), new.encode())
            if content != before:
                contents[path] = content


def plan(
    entries: Sequence[Entry], sources: Sources, trees: BuildResult
) -> tuple[dict[Path, list[Edit]], dict[Entry, list[str]]]:
    """Return the edits per file, and the reasons against entries that cannot be carried out."""
    found = References(entries, sources, trees).collect()
    clashes = find_clashes(found, sources)
    edits: defaultdict[Path, list[Edit]] = defaultdict(list)
    for edit in [*found.edits, *text_edits(found, sources)]:
        edits[edit.path].append(edit)
    return edits, clashes


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out the table; return 1 if clashes prevented some or all of it."""
    parser = argparse.ArgumentParser(prog="python -m tools.rename", description="Rename by tools/renames.toml.")
    parser.add_argument("--dry-run", action="store_true", help="Show what would change, and write nothing.")
    parser.add_argument("--skip-clashes", action="store_true", help="Leave out entries that clash; do all others.")
    parser.add_argument("--only", metavar="PREFIX", help="Only modules whose name begins so.")
    asked = parser.parse_args(arguments)
    table = {name: each for name, each in read_table().items() if name.startswith(asked.only or "")}
    sources = Sources.read(ROOT)
    entries, gone = find_entries({name: each for name, each in table.items() if not name.startswith(LITERAL)}, sources)
    for each in gone:
        print(f"not there: {each}")
    edits: dict[Path, list[Edit]] = {}
    clashes: dict[Entry, list[str]] = {}
    left_out = False
    if entries:  # takes minutes: mypy reads everything without its cache
        trees = build_trees(sources)
        edits, clashes = plan(entries, sources, trees)
    while clashes:
        for entry, reasons in clashes.items():
            print(f"clash: {entry.module}:{entry.qualified} -> {entry.new}: {'; '.join(reasons[:3])}")
        if not asked.skip_clashes:
            return 1
        left_out = True
        entries = [each for each in entries if each not in clashes]
        edits, clashes = plan(entries, sources, trees)
    contents = {path: rewrite(path, some) for path, some in edits.items()}
    replace_words(table, contents)
    print(f"{len(entries)} names, {sum(map(len, edits.values()))} places in {len(contents)} files")
    if not asked.dry_run and contents:
        for path, content in contents.items():
            path.write_bytes(content)
        python = [str(path) for path in contents if path.suffix == ".py"]
        ruff = [sys.executable, "-m", "ruff"]
        subprocess.run([*ruff, "check", "--quiet", "--fix", *python], check=False)  # noqa: S603 - prints what is left
        subprocess.run([*ruff, "format", "--quiet", *python], check=True)  # noqa: S603
    return int(left_out)


if __name__ == "__main__":
    sys.exit(main())
