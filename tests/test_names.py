"""Functions have names of the field, and `python -m tools.rename` changes a name everywhere or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tools import names, rename
from tools.rename import plan, rewrite
from tools.rename_definitions import Sources, find_entries
from tools.rename_references import build_trees


@pytest.mark.parametrize("name", ["said", "_held", "asked_again", "key_of", "_until", "looked_at", "own", "unlabeled"])
def test_a_participle_a_preposition_or_a_private_word_is_no_name(name: str) -> None:
    assert names.fault(name)


@pytest.mark.parametrize(
    "name", ["broadcast_object", "prompt_tokens", "_held_rows", "embed", "seed", "sign_in", "__exit__", "test_x_of"]
)
def test_verbs_and_nouns_are_names(name: str) -> None:
    assert names.fault(name) is None


def test_every_function_of_the_repository_has_a_name() -> None:
    assert [str(each) for each in names.find_faults()] == []


def test_methods_and_nested_functions_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "a.py").write_text("class A:\n    def told(self):\n        def of(): ...\n")
    assert [(each.line, each.name) for each in names.find_faults(tmp_path)] == [(2, "told"), (3, "of")]


def test_the_table_gives_good_names() -> None:
    table = rename.read_table()
    new = {each for module, words in table.items() if not module.startswith(rename.LITERAL) for each in words.values()}
    assert {name for name in new if names.fault(name)} == set()


A = '''"""`told` speaks; `Base.seen` looks."""


def told() -> int:
    """Return 1, as `told` does."""
    return 1


class Base:
    """A base."""

    def seen(self) -> int:
        """Return what is seen."""
        return told()

    def twice(self) -> int:
        """Return it twice."""

        def given() -> int:
            return self.seen()

        return given() + given()
'''
B = '''"""Others."""

from typing import Annotated

import app.a
from app import a
from app.a import Base, told


class Derived(Base):
    """One that overrides."""

    def seen(self) -> int:
        """Return more."""
        return super().seen() + told()


class Other:
    """One with the same word."""

    def seen(self) -> int:
        """Return nothing."""
        return 0


def test_it(monkeypatch: object, told_by: Annotated[int, told, a.told]) -> None:
    """Refer to everything."""
    setattr(a, "told", told)
    each = Derived().seen() + app.a.told() + Other().seen()
    print(f"{told()} {each}", "app.a.told", "told")
'''
TABLE = {"app.a": {"told": "speak", "Base.seen": "look", "Base.twice.given": "look_once"}}


@pytest.fixture
def project(tmp_path: Path) -> Callable[[], Sources]:
    (tmp_path / "app").mkdir()
    (tmp_path / "pyproject.toml").write_text('[tool.mypy]\npackages = ["app"]\n')
    (tmp_path / "page.md").write_text("| x | `app/a.py` | `told` |\n\n`told` alone\n\n`app.a.told`\n")
    for name, text in {"__init__": "", "a": A, "b": B}.items():
        (tmp_path / "app" / f"{name}.py").write_text(text)
    return lambda: Sources.read(tmp_path)


def test_a_name_is_changed_wherever_it_is_that_name_and_nowhere_else(
    project: Callable[[], Sources], tmp_path: Path
) -> None:
    sources = project()
    edits, clashes = plan(find_entries(TABLE, sources)[0], sources, build_trees(sources))
    assert clashes == {}
    for path, each in edits.items():
        path.write_bytes(rewrite(path, each))

    a = A.replace("told", "speak").replace("Base.seen", "Base.look").replace("def seen", "def look")
    assert (tmp_path / "app" / "a.py").read_text() == a.replace("self.seen", "self.look").replace("given", "look_once")
    b = (tmp_path / "app" / "b.py").read_text()
    assert b == (
        B.replace("Base, told", "Base, speak")
        .replace(
            '    def seen(self) -> int:\n        """Return more', '    def look(self) -> int:\n        """Return more'
        )
        .replace("super().seen() + told()", "super().look() + speak()")
        .replace("int, told, a.told", "int, speak, a.speak")
        .replace('(a, "told", told)', '(a, "speak", speak)')
        .replace("Derived().seen() + app.a.told()", "Derived().look() + app.a.speak()")
        .replace('{told()} {each}", "app.a.told"', '{speak()} {each}", "app.a.speak"')
    )
    assert (tmp_path / "page.md").read_text() == "| x | `app/a.py` | `speak` |\n\n`told` alone\n\n`app.a.speak`\n"
    assert find_entries(TABLE, project()) == ([], [])  # a second run finds nothing to do


def test_a_name_that_is_taken_where_it_would_be_seen_is_refused(project: Callable[[], Sources]) -> None:
    sources = project()
    table = {"app.a": {"told": "each", "Base.seen": "twice"}, "app.none": {"old": "new"}}
    entries, gone = find_entries(table, sources)
    assert gone == ["app.none:old -> new"]
    clashes = {entry.new: reasons for entry, reasons in plan(entries, sources, build_trees(sources))[1].items()}
    assert "app.b:30 has a local each" in clashes["each"]
    assert any("twice" in reason for reason in clashes["twice"])
