"""`make sample` draws what a reader is to judge, by its seed alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools import sample

PAGE = """# A heading is no sentence

One sentence that runs
over two lines. See [the guide](guide.md) for more, e.g. This one is whole! And then `code` follows here.

- A point is a sentence
- Another point has two. The second follows right here.

| a table | is no prose at all |
|---|---|

```python
print("code is no prose. It never is.")
```

<!-- A comment is no prose either. -->
The last line has no end
"""

MODULE = '''"""A module.

More."""


class A:
    """A class
    of two lines."""
'''


def test_prose_is_split_into_sentences() -> None:
    assert list(sample.split_prose(PAGE)) == [
        (3, "One sentence that runs over two lines."),
        (3, "See the guide for more, e.g. This one is whole!"),
        (3, "And then `code` follows here."),
        (6, "A point is a sentence"),
        (7, "Another point has two."),
        (7, "The second follows right here."),
        (17, "The last line has no end"),
    ]


def test_a_short_part_belongs_to_the_sentence_after_it() -> None:
    assert [words for _, words in sample.split_prose("**Files.** A file is kept for ever.")] == [
        "**Files.** A file is kept for ever."
    ]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "docs" / "a.md").write_text(PAGE)
    (tmp_path / "docs" / "b.md").write_text(f"# B\n\n{sample.GENERATED}`a tool` -->\n\nNobody wrote this sentence.\n")
    (tmp_path / "docs" / "results" / "c.md").write_text("A result is a sentence.\n")
    (tmp_path / "CHANGELOG.md").write_text("A list of changes is no prose.\n")
    for package in sample.PACKAGES:
        (tmp_path / package).mkdir()
    (tmp_path / "app" / "a.py").write_text(
        '"""A module.\n\nMore."""\n\n\nclass A:\n    """A class\n    of two lines."""\n'
    )
    return tmp_path


def test_generated_pages_and_pages_that_are_left_out_have_no_sentences(repository: Path) -> None:
    places = {text.place.partition(":")[0] for text in sample.sentences(repository)}
    assert places == {"docs/a.md", "docs/results/c.md"}
    places = {text.place.partition(":")[0] for text in sample.sentences(repository, without=["docs/results"])}
    assert places == {"docs/a.md"}


def test_a_docstring_s_first_paragraph_is_drawn_with_its_place(repository: Path) -> None:
    assert [str(text) for text in sample.docstrings(repository)] == [
        "app/a.py:1: A module.",
        "app/a.py:6: A class of two lines.",
    ]


def test_subjects_are_those_of_the_commits(repository: Path) -> None:
    git = ["git", "-C", str(repository), "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "Part: what changes", "-m", "Why."], check=True)
    assert [text.words for text in sample.subjects(repository)] == ["Part: what changes"]


def test_a_seed_draws_the_same_texts_and_another_seed_others() -> None:
    texts = [sample.Text(str(number), "w") for number in range(1000)]
    assert sample.draw(texts, 60, 1) == sample.draw(texts, 60, 1)
    assert sample.draw(texts, 60, 1) != sample.draw(texts, 60, 2)
    assert len(set(sample.draw(texts, 60, 1))) == 60
    assert set(sample.draw(texts[:3], 60, 1)) == set(texts[:3])
