"""Names say what they name, in the glossary's words; `python -m tools.rename` changes one everywhere or not at all."""

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


def test_every_name_of_the_repository_says_what_it_names() -> None:
    assert [str(each) for each in names.find_faults()] == []


def test_methods_and_nested_functions_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "a.py").write_text("class A:\n    def told(self):\n        def of(): ...\n")
    assert [(each.line, each.name) for each in names.find_faults(tmp_path)] == [(2, "told"), (3, "of")]


@pytest.mark.parametrize("name", ["Wrapping", "_Seen", "Desk", "AskingAgain", "ToldApart"])
def test_a_class_is_not_named_by_a_bare_participle(name: str) -> None:
    assert names.class_fault(name)


@pytest.mark.parametrize("name", ["RequestDisguise", "Ending", "Finding", "StoredObject", "Recipe"])
def test_a_noun_names_a_class(name: str) -> None:
    assert names.class_fault(name) is None


@pytest.mark.parametrize(
    "name", ["Sweeper", "find_tenant", "TenantRow", "vendors", "tuned_model", "_safe_data", "walls"]
)
def test_a_word_of_the_glossary_s_last_column_is_refused_as_part_of_a_name(name: str) -> None:
    assert names.word_fault(name)


@pytest.mark.parametrize("name", ["fine_tuned_model", "list_jobs", "end_tokens", "hostess", "name_host", "Reaper"])
def test_terms_other_words_and_allowed_names_pass(name: str) -> None:
    assert names.word_fault(name) is None


def test_the_refused_words_are_read_from_the_glossary(tmp_path: Path) -> None:
    page = tmp_path / "glossary.md"
    page.write_text(
        "| word | meaning | not |\n|---|---|---|\n| ship, boat | it swims | Vessel, hull |\n| hull | its side | |\n"
    )
    assert names.refused_words(page) == (frozenset({"vessel"}), frozenset({"ship", "boat", "hull"}))
    assert names.word_fault("VesselName", page)
    assert names.word_fault("hull_name", page) is None


def test_every_exception_to_the_glossary_is_needed() -> None:
    rows = names.refused_words()[0]
    text = names.GLOSSARY.read_text()
    assert [word for word in names.ORDINARY if word in rows or word not in text] == []
    parts = {name: f" {' '.join(names.split_name(name))} " for name in names.ALLOWED_WORDS}
    assert [name for name, text in parts.items() if not any(f" {w} " in text or f" {w}s " in text for w in rows)] == []


@pytest.mark.parametrize(
    ("name", "docstring"),
    [("create_project", "Create a project."), ("_StorageMark", "The mark in the storage."), ("gerund", "The gerund.")],
)
def test_a_docstring_that_repeats_the_name_is_refused(name: str, docstring: str) -> None:
    assert names.docstring_fault(name, docstring)


def test_a_docstring_that_says_more_passes() -> None:
    assert names.docstring_fault("create_project", "Create a project with its first key.") is None
    assert names.docstring_fault("create_project", None) is None


def test_each_rule_reads_the_files_that_it_is_for(tmp_path: Path) -> None:
    for folder in ("app", "tests"):
        (tmp_path / folder).mkdir()
        text = 'class Held: ...\nclass Lost(Exception): ...\ndef tenants():\n    """The tenants."""\n'
        (tmp_path / folder / "sweeper.py").write_text(text)
    found = [(each.path.as_posix(), each.name) for each in names.find_faults(tmp_path)]
    assert found == [
        ("app/sweeper.py", "sweeper"),
        ("app/sweeper.py", "Held"),
        ("app/sweeper.py", "tenants"),
        ("app/sweeper.py", "tenants"),
        ("tests/sweeper.py", "tenants"),
    ]


def test_the_table_gives_good_names() -> None:
    table = rename.read_table()
    new = {each for module, words in table.items() if not module.startswith(rename.LITERAL) for each in words.values()}
    is_class = {each: each.lstrip("_")[:1].isupper() for each in new}
    assert {name for name in new if (names.class_fault if is_class[name] else names.fault)(name)} == set()


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


def test_a_class_is_changed_in_annotations_calls_and_exports_too(tmp_path: Path) -> None:
    home = tmp_path / "lab" / "spard_lab"  # a root of imports of its own
    home.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[tool.mypy]\nmypy_path = "lab"\npackages = ["spard_lab"]\n')
    texts = {
        "__init__": "",
        "a": "class Told:\n    pass\n\n\ndef tell(other: 'Told') -> list[Told]:\n    return [Told()]\n",
        "b": "from spard_lab import a\nfrom spard_lab.a import Told as Told\n\nx: Told = a.Told()\n",
        "c": "from spard_lab.b import Told\n\n\nclass Heard(Told):\n    told: int = 0\n\n\ny: dict[str, Told] = {}\n",
    }
    for name, text in texts.items():
        (home / f"{name}.py").write_text(text)
    sources = Sources.read(tmp_path)
    edits, clashes = plan(find_entries({"spard_lab.a": {"Told": "Facts"}}, sources)[0], sources, build_trees(sources))
    assert clashes == {}
    for path, each in edits.items():
        path.write_bytes(rewrite(path, each))
    expected = {name: text.replace("Told", "Facts") for name, text in texts.items()}
    assert {name: (home / f"{name}.py").read_text() for name in texts} == expected


def test_a_name_that_is_taken_where_it_would_be_seen_is_refused(project: Callable[[], Sources]) -> None:
    sources = project()
    table = {"app.a": {"told": "each", "Base.seen": "twice"}, "app.none": {"old": "new"}}
    entries, gone = find_entries(table, sources)
    assert gone == ["app.none:old -> new"]
    clashes = {entry.new: reasons for entry, reasons in plan(entries, sources, build_trees(sources))[1].items()}
    assert "app.b:30 has a local each" in clashes["each"]
    assert any("twice" in reason for reason in clashes["twice"])
