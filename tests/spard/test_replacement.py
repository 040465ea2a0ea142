"""Files that appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from spard.replacement import replacement


def test_the_old_file_is_read_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with replacement(path) as aside:
        aside.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("is_begun", [False, True])
def test_nothing_is_left_of_a_file_that_was_not_finished(is_begun: bool, tmp_path: Path) -> None:
    def fail() -> None:
        with replacement(tmp_path / "file") as aside:
            if is_begun:
                aside.write_text("a part")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [*tmp_path.iterdir()] == []
