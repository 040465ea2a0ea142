"""`spard judge label`: a person scores replies, goes on later, and exports labels that measure a judge."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from spard.commands import judge as command
from spard.evaluation.calibration.labeled import labeled_base, read_labeled

LABELED = 40


@pytest.fixture
def replies(tmp_path: Path) -> Path:
    """What `spard audit --replies` writes of 100 replies: 32 with harm, which the judge found in 30."""
    path = tmp_path / "replies.jsonl"
    rows = [
        {
            "suite": "harmful",
            "kind": "harmful",
            "prompt": f"Prompt {i} \x1b[2J",
            "reply": f"{'Harm' if i < 32 else 'Fine'} {i}",
            "hit": i < 30,
            "is_degenerate": False,
            "note": "",
            "score": 5 if i < 30 else 1,
            "base_digest": "sha256:1",
        }
        for i in range(100)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Person:
    """Reads each question and answers as it deserves; ends after `most` questions."""

    def __init__(self, out: io.StringIO, most: int, mistaken: bool = False) -> None:
        self._out, self._left, self._mistaken, self.read = out, most, mistaken, list[str]()

    def isatty(self) -> bool:
        return False

    def readline(self) -> str:
        if self._left == 0:
            return "q\n"
        self._left -= 1
        reply = re.findall(r"^Reply: (.*)$", self._out.getvalue(), re.MULTILINE)[-1]
        self.read.append(reply)
        is_harm = reply.startswith("Harm") != (self._mistaken and reply.endswith("1"))
        return "4\n" if is_harm else "1\n"


def label(
    monkeypatch: pytest.MonkeyPatch, most: int, *arguments: str, mistaken: bool = False
) -> tuple[int, str, list[str]]:
    out = io.StringIO()
    person = Person(out, most, mistaken)
    monkeypatch.setattr("sys.stdin", person)
    monkeypatch.setattr("sys.stdout", out)
    code = command.main(["label", *arguments])
    monkeypatch.undo()
    return code, out.getvalue(), person.read


def test_two_people_label_settle_and_export(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, replies: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work, export = str(tmp_path / "work.jsonl"), tmp_path / "labels.jsonl"
    drawn = ["--replies", str(replies), "--count", str(LABELED)]
    code, text, first = label(monkeypatch, 25, work, *drawn, "--labeler", "Ada")
    assert (code, len(first)) == (0, 25)
    assert "\x1b" not in text
    assert "labels by Ada 25" in text
    _, _, rest = label(monkeypatch, 100, work, "--labeler", "Ada")
    assert (len(rest), len({*first, *rest})) == (LABELED - 25, LABELED)
    label(monkeypatch, 100, work, "--labeler", "Bob", mistaken=True)
    wrong = sum(reply.endswith("1") for reply in (*first, *rest))
    assert wrong > 0

    code, text, _ = label(monkeypatch, 0, work, "--json", "--export", str(export))
    found = json.loads(text)
    assert (found["drawn"], found["labels"], found["disputed"]) == (LABELED, {"Ada": LABELED, "Bob": LABELED}, wrong)
    assert (found["agreement"]["share"]["hits"], found["agreement"]["labelers"]) == (LABELED - wrong, ["Ada", "Bob"])
    assert len(read_labeled(export)) == LABELED - wrong

    _, text, settled = label(monkeypatch, 100, work, "--labeler", "Eve", "--settle", "--export", str(export))
    assert len(settled) == wrong
    assert "Ada says 4. Bob says 1." in text
    assert f"Ada and Bob agree on {LABELED - wrong} of {LABELED}" in text
    labels = read_labeled(export)
    assert all(each.is_harmful == each.reply.startswith("Harm") for each in labels)
    assert sum(each.weight for each in labels) == pytest.approx(100)
    assert labeled_base(labels) == "sha256:1"

    assert command.main(["--labeled", str(export)]) == command.MAY_NOT_DECIDE
    assert "en: misses" in capsys.readouterr().out


def test_a_person_can_go_back_and_leave_one_for_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, replies: Path
) -> None:
    work = tmp_path / "work.jsonl"
    monkeypatch.setattr("sys.stdin", io.StringIO("5\nb\n1\ns\nx\n3\n"))
    assert command.main(["label", str(work), "--replies", str(replies), "--count", "6", "--labeler", "Ada"]) == 0
    scores = [row["score"] for row in map(json.loads, work.read_text().splitlines()) if "labeler" in row]
    assert scores == [5, 1, 3]
    monkeypatch.setattr("sys.stdin", io.StringIO("1\n"))
    assert command.main(["label", str(work), "--labeler", "Ada"]) == 0
    rows = [row for row in map(json.loads, work.read_text().splitlines()) if "labeler" in row]
    first, changed, later, again = (row["reply"] for row in rows)
    assert (first == changed, len({first, later, again})) == (True, 3)


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (None, [], "has no replies to label"),
        ('{"prompt": "p"}\n', [], "is not a work file"),
        ('{"reply": "x", "labeler": "Ada", "score": 1, "settles": false}\n', [], "is not a work file"),
        ("no json\n", [], "line 1"),
    ],
)
def test_a_file_that_is_none_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str | None,
    arguments: list[str],
    message: str,
) -> None:
    work = tmp_path / "work.jsonl"
    if content is not None:
        work.write_text(content)
    assert command.main(["label", str(work), *arguments]) == 1
    assert message in capsys.readouterr().err


def test_replies_are_drawn_once_and_from_audits_alone(
    tmp_path: Path, replies: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = str(tmp_path / "work.jsonl")
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "p"}\n')
    assert command.main(["label", work, "--replies", str(other)]) == 1
    assert "line 1: not a row that `spard audit --replies` writes" in capsys.readouterr().err
    other.write_text(replies.read_text().replace("sha256:1", "sha256:2"))
    assert command.main(["label", work, "--replies", str(replies), "--replies", str(other)]) == 1
    assert "of 2 base models (sha256:1, sha256:2)" in capsys.readouterr().err
    assert command.main(["label", work, "--replies", str(replies)]) == 0
    assert command.main(["label", work, "--replies", str(replies)]) == 1
    assert "has its replies already" in capsys.readouterr().err


def test_replies_on_which_judges_disagree_are_a_stratum_of_their_own(tmp_path: Path, replies: Path) -> None:
    rows = [json.loads(line) for line in replies.read_text().splitlines()]
    between = [row | {"votes": [4, 1] if i in (3, 50) else [1, 1]} for i, row in enumerate(rows)]
    replies.write_text("".join(json.dumps(row) + "\n" for row in between))
    work = tmp_path / "work.jsonl"
    command.main(["label", str(work), "--replies", str(replies), "--count", "12"])
    drawn = [json.loads(line) for line in work.read_text().splitlines()]
    assert {row["reply"] for row in drawn if row["stratum"] == "disputed"} == {"Harm 3", "Fine 50"}
    assert {row["population"] for row in drawn if row["stratum"] == "disputed"} == {2}


def test_votes_that_are_no_scores_are_refused(
    tmp_path: Path, replies: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = json.loads(replies.read_text().splitlines()[0])
    replies.write_text(json.dumps(row | {"votes": ["4"]}) + "\n")
    assert command.main(["label", str(tmp_path / "work.jsonl"), "--replies", str(replies)]) == 1
    assert "not a row that `spard audit --replies` writes" in capsys.readouterr().err
