"""The mutants are programs, each with one change, and what no test should notice is left alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tools.mutants import COPIED, NEAREST, ROOT, draw
from tools.mutation import mutants

SOURCE = b'''"""Docstring 1."""
from x import y
__all__ = ["y"]
@frozen(slots=True)
def f(a: int = 1, *, b: Literal[2]) -> bool:
    """Docstring 2."""
    log.warning("%d", 3)
    if a < b and not c:
        raise ValueError(f"more than {a + 4}", 5)
    while c:
        c = f"{c - 7}"
    return max(a, b) - 6
'''


def changed_lines(operator: str) -> list[str]:
    """The lines that mutants of one kind leave behind."""
    found = [mutant for mutant in mutants("x.py", SOURCE) if mutant.operator == operator]
    return [mutant.apply(SOURCE).decode().splitlines()[mutant.line - 1].strip() for mutant in found]


def test_each_kind_of_change_is_made() -> None:
    assert changed_lines("comparison") == [
        "if (a <= b) and not c:",
        "if (a >= b) and not c:",
    ]
    assert changed_lines("arithmetic") == ["return (max(a, b) + 6)"]
    assert changed_lines("swap") == ["return min(a, b) - 6"]
    assert changed_lines("drop statement") == ["pass"]
    assert changed_lines("return None") == ["return None"]
    assert changed_lines("drop operator") == ["if a < b and (c):"]
    assert changed_lines("boolean") == ["if (a < b or not c):"]
    assert changed_lines("negate condition") == ["if (not (a < b and (not c))):", "while (not c):"]


def test_constants_change_by_one_but_in_messages_annotations_and_decorators() -> None:
    assert changed_lines("constant") == [
        "def f(a: int = (0), *, b: Literal[2]) -> bool:",
        "def f(a: int = (2), *, b: Literal[2]) -> bool:",
        "return max(a, b) - (5)",
        "return max(a, b) - (7)",
    ]


def test_every_mutant_of_the_decisive_files_is_a_program_with_one_change() -> None:
    for path, tests in NEAREST.items():
        source = (ROOT / path).read_bytes()
        original = ast.dump(ast.parse(source))
        for mutant in mutants(path, source):
            assert ast.dump(ast.parse(mutant.apply(source))) != original, mutant
        assert all((ROOT / each).is_file() for each in tests)


def test_a_seed_draws_the_same_mutants_again_and_none_twice() -> None:
    first, again, other = (draw(50, seed, list(NEAREST)) for seed in (1, 1, 2))
    assert first == again != other
    assert len(set(first)) == 50


def test_the_copy_has_every_folder_that_the_nearest_tests_import_from() -> None:
    seen = set[Path]()
    ahead = [ROOT / each for tests in NEAREST.values() for each in tests]
    while ahead:
        path = ahead.pop()
        if path not in seen:
            seen.add(path)
            ahead += [file for name in imported_names(path) for file in module_files(name)]
            ahead += [file for folder in path.parents if (file := folder / "conftest.py").is_file()]
    assert {path.relative_to(ROOT).parts[0] for path in seen} <= set(COPIED)


def imported_names(path: Path) -> Iterator[str]:
    """The modules that a file imports, with what may be a module among the names that it takes from them."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{each.name}" for each in node.names)


def module_files(name: str) -> list[Path]:
    """The file of one of this repository's modules; none for another's."""
    path = ROOT.joinpath(*name.split("."))
    return [each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()]
