"""`make house`: counts of the code's layout that anybody can repeat.

Reads the sources with `ast`; nothing is imported. What is counted:

module      a `.py` file under app/, worker/ or spard/, including `__init__` and `__main__`
folder      a folder with modules below another one; for arrows, nested folders belong to the one at the top
room        a direct child of a package: a module, or a folder with everything in it. A package's own `__init__`
            is no room: it re-exports the others
arrow       one room imports another one of its package, however often
upward      an arrow against the layers that pyproject.toml declares for import-linter: to a higher layer, or between
            two rooms that one line separates with `|`
circle      rooms that import one another in a ring: each can be reached from each
defense     files of app/, worker/ and spard/ that name one defense as a word of the code (`safegrad` or `SafeGrad`),
            comments and docstrings aside. Its two homes are counted; a third file is a decision with two homes
loose       untyped mappings in the code: `dict[str, Any]` and `Mapping[str, Any]`
cupboard    a module of 1 to 39 lines that is neither `__init__` nor `__main__`
longest     lines of a file; lines of a function from its `def` to its last statement
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("app", "worker", "spard")
DEFENSE = "safegrad"
_SHORT = 40
_LOOSE = {"dict[str, Any]", "Mapping[str, Any]"}

Arrows = dict[tuple[str, str], set[str]]  # (from room, to room) -> each import as `importer -> imported`


@dataclass(frozen=True)
class Module:
    """One file of a package."""

    path: Path  # relative to the repository

    @cached_property
    def text(self) -> str:
        """The source, read once."""
        return (ROOT / self.path).read_text()

    @cached_property
    def tree(self) -> ast.Module:
        """The source as a syntax tree, parsed once."""
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree, walked once: the counts look at them again and again."""
        return tuple(ast.walk(self.tree))

    @property
    def name(self) -> str:
        """The name in imports; a package's `__init__` has the package's name."""
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def room(self) -> str:
        """`app.jobs` for everything in that folder, `app.main` for a module at the top."""
        return ".".join(self.name.split(".")[:2])

    @property
    def lines(self) -> int:
        """The number of lines, including blank ones and comments."""
        return self.text.count("\n")

    @property
    def is_cupboard(self) -> bool:
        """True if the module is short enough to be a part of another one."""
        return 0 < self.lines < _SHORT and self.path.stem not in ("__init__", "__main__")


@dataclass(frozen=True)
class Package:
    """The counts of one package."""

    name: str
    modules: list[Module]
    arrows: Arrows

    @property
    def top_modules(self) -> list[str]:
        """The modules directly in the package, including `__init__` and `__main__`."""
        return sorted(each.path.stem for each in self.modules if len(each.path.parts) == 2)

    @property
    def top_folders(self) -> list[str]:
        """The folders directly in the package."""
        return sorted({each.path.parts[1] for each in self.modules if len(each.path.parts) > 2})

    @cached_property
    def circles(self) -> list[list[str]]:
        """The rings of rooms, each sorted."""
        return circles(set(self.arrows))

    @cached_property
    def upward(self) -> list[str]:
        """The imports against the layers, as `importer -> imported`."""
        return upward(self.arrows, declared_layers(self.name))

    @property
    def loose(self) -> int:
        """The number of untyped mappings."""
        return sum(_loose(each.nodes) for each in self.modules)

    @property
    def cupboards(self) -> list[str]:
        """The paths of the cupboards."""
        return sorted(str(each.path) for each in self.modules if each.is_cupboard)

    @property
    def longest_file(self) -> tuple[int, str]:
        """(lines, path) of the longest file."""
        return max((each.lines, str(each.path)) for each in self.modules)

    @cached_property
    def longest_function(self) -> tuple[int, str]:
        """(lines, `path:name`) of the longest function."""
        return max((size, where) for each in self.modules for size, where in _functions(each))


def read_package(name: str) -> Package:
    """Read every module of a package and the imports among its rooms."""
    modules = [Module(path.relative_to(ROOT)) for path in sorted((ROOT / name).rglob("*.py"))]
    known = {each.name: each for each in modules}
    arrows: Arrows = defaultdict(set)
    for module in modules:
        for imported in _imports(module.nodes, known):
            rooms = module.room, known[imported].room
            if rooms[0] != rooms[1] and name not in rooms:
                arrows[rooms].add(f"{module.name} -> {imported}")
    return Package(name, modules, dict(arrows))


def circles(arrows: set[tuple[str, str]]) -> list[list[str]]:
    """Return the groups of rooms that can be reached from one another; rooms on no circle are left out."""
    reached: dict[str, set[str]] = defaultdict(set)
    for source, target in arrows:
        reached[source].add(target)
    rooms = set(reached) | {target for _, target in arrows}
    for middle in rooms:  # Warshall's transitive closure
        for source in rooms:
            if middle in reached[source]:
                reached[source] |= reached[middle]
    found = {frozenset(b for b in rooms if b in reached[a] and a in reached[b]) for a in rooms if a in reached[a]}
    return sorted(sorted(each) for each in found)


def upward(arrows: Arrows, layers: list[str]) -> list[str]:
    """Return the imports against the layers (highest first); rooms separated by `|` may not import one another."""
    floor = {room.strip(" ()"): depth for depth, layer in enumerate(layers) for room in layer.split("|")}
    wrong = []
    for (source, target), imports in arrows.items():
        above, below = floor.get(source.split(".")[1]), floor.get(target.split(".")[1])
        if above is not None and below is not None and above >= below:
            wrong += sorted(imports)
    return wrong


def declared_layers(package: str) -> list[str]:
    """Return the layers that pyproject.toml declares for a package, highest first; [] without any."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for contract in settings["tool"]["importlinter"]["contracts"]:
        if contract["type"] == "layers" and contract.get("containers") == [package]:
            return list(contract["layers"])
    return []


def files_of_defense(defense: str, packages: list[Package]) -> list[str]:
    """Return the files whose code, without comments and docstrings, contains a defense's name."""
    modules = [each for package in packages for each in package.modules if defense in each.text.lower()]
    return sorted(str(each.path) for each in modules if _names(each.tree, defense))


def _imports(nodes: Iterable[ast.AST], known: dict[str, Module]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for each in node.names:
                module = f"{node.module}.{each.name}"
                yield module if module in known else node.module


def _loose(nodes: Iterable[ast.AST]) -> int:
    return sum(isinstance(node, ast.Subscript) and ast.unparse(node) in _LOOSE for node in nodes)


def _functions(module: Module) -> Iterator[tuple[int, str]]:
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1, f"{module.path}:{node.name}"


def _names(tree: ast.Module, word: str) -> bool:
    """Return True if a name, an import or a string other than a docstring contains `word`, ignoring case."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in docstrings:
            continue
        said = [getattr(node, field, None) for field in ("id", "attr", "name", "module", "value", "arg")]
        if any(isinstance(each, str) and word in each.lower() for each in said):
            return True
    return False


def report(packages: list[Package]) -> dict[str, object]:
    """Return all counts, as `--json` prints them."""
    found: dict[str, object] = {
        package.name: {
            "modules": len(package.modules),
            "top_modules": package.top_modules,
            "top_folders": package.top_folders,
            "arrows": len(package.arrows),
            "upward": package.upward,
            "circles": package.circles,
            "loose_mappings": package.loose,
            "cupboards": package.cupboards,
            "longest_file": package.longest_file,
            "longest_function": package.longest_function,
        }
        for package in packages
    }
    return found | {"files_of_a_defense": files_of_defense(DEFENSE, packages)}


def faults(packages: list[Package]) -> list[str]:
    """Return the violations: imports against the layers, and circles."""
    wrong = [f"upward: {each}" for package in packages for each in package.upward]
    return wrong + [f"circle: {', '.join(each)}" for package in packages for each in package.circles]


def main(argv: list[str] | None = None) -> int:
    """Print the counts; the exit status is 1 if there are violations."""
    parser = argparse.ArgumentParser(
        prog="make house", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args(argv)
    packages = [read_package(name) for name in PACKAGES]
    if asked.json:
        print(json.dumps(report(packages), indent=2))
    else:
        _print(packages)
    wrong = faults(packages)
    for each in wrong:
        print(each, file=sys.stderr)
    return 1 if wrong else 0


def _print(packages: list[Package]) -> None:
    print((__doc__ or "").partition("What is counted:\n")[2])
    print(f"{'':20}" + "".join(f"{package.name:>10}" for package in packages))
    rows: dict[str, list[object]] = {
        "modules": [len(each.modules) for each in packages],
        "modules at the top": [len(each.top_modules) for each in packages],
        "folders at the top": [len(each.top_folders) for each in packages],
        "arrows": [len(each.arrows) for each in packages],
        "upward": [len(each.upward) for each in packages],
        "circles": [len(each.circles) for each in packages],
        "loose mappings": [each.loose for each in packages],
        "cupboards": [len(each.cupboards) for each in packages],
        "longest file": [each.longest_file[0] for each in packages],
        "longest function": [each.longest_function[0] for each in packages],
    }
    for name, counts in rows.items():
        print(f"{name:20}" + "".join(f"{count!s:>10}" for count in counts))
    for package in packages:
        print(f"\n{package.name}/: {' '.join(f'{each}/' for each in package.top_folders)}")
        print(f"    {' '.join(package.top_modules)}")
        print(f"    longest: {package.longest_file[1]}, {package.longest_function[1]}")
        print(f"    cupboards: {' '.join(package.cupboards) or 'none'}")
    print(f"\na defense ({DEFENSE}): {' '.join(files_of_defense(DEFENSE, packages))}")


if __name__ == "__main__":
    sys.exit(main())
