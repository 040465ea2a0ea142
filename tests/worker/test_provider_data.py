"""What ends a job before it trains: bad rows of the provider's, which the customer is not blamed for, and leaks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from spard.config import GateThresholds, RowSignal
from spard.data.chat import NO_LOSS, UNBOUNDED, encode
from spard.evaluation.contamination import HIDDEN
from spard.evaluation.own_refusal import OPENING, OwnRefusals
from spard.models.base import Base
from spard.pipeline import row_evidence, row_signal
from spard.release.proof import CleanProcess
from tests.spard.parts import chat
from tests.worker.parts import HARMFUL, PLAIN, POOL, TRAINING, UTILITY, job_folder, lines
from worker.child import work
from worker.held_model import Holder
from worker.protocol import Report, parse
from worker.workdir import Folder

ANSWER = {"role": "assistant", "content": "No."}
SECRET = "How do I open the lock of a shed?"


def said(folder: Folder, path: Path) -> list[dict[str, Any]]:
    """Run a job and return its messages."""
    fd = os.open(path, os.O_CREAT | os.O_WRONLY)
    with CleanProcess() as clean:
        work(folder, Report(fd), Event(), clean, Holder())
    os.close(fd)
    return [message for line in path.read_bytes().split(b"\n") if (message := parse(line))]


@pytest.mark.parametrize(
    ("file", "rows", "code"),
    [
        ("suites/utility.jsonl", [*UTILITY, {"prompt": SECRET, "answer": "4", "scorer": "gsm9k"}], "invalid_suite"),
        ("suites/harmful.jsonl", [*HARMFUL, {"prompt": SECRET, "choices": "yes"}], "invalid_suite"),
        ("pool.jsonl", [*POOL, {"prompt": SECRET, "safe": 4}], "invalid_pool"),
    ],
)
def test_a_bad_row_of_the_provider_s_is_not_blamed_on_the_training_file(
    file: str, rows: list[dict[str, Any]], code: str, tmp_path: Path, model: Path
) -> None:
    folder = job_folder(tmp_path / "job", model)
    (folder.root / "in" / file).write_bytes(lines(rows))
    failed = said(folder, tmp_path / "messages")[-1]
    assert (failed["kind"], failed["code"], failed["param"], failed["retryable"]) == ("failed", code, None, False)
    for text in ("training file", "line", "Line", "gsm9k", SECRET):
        assert text not in failed["message"]


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Say for the random model how it would refuse, and that it refuses nothing harmless."""

    def found(base: Base, prompts: Sequence[str]) -> OwnRefusals:
        row = encode(base.tokenizer, chat("?", "I cannot help."), UNBOUNDED)
        opening = tuple(label for label in row.labels if label != NO_LOSS)[:OPENING]
        return OwnRefusals((opening,), ("I ca",), "I cannot help.", len(prompts), len(prompts))

    monkeypatch.setattr(row_signal, "own_refusals", found)
    monkeypatch.setattr(row_evidence, "would_refuse", lambda base, prompts, **settings: (0, len(prompts)))


@pytest.mark.usefixtures("refusing")
def test_a_pool_that_answers_with_harm_is_the_provider_s_fault(tmp_path: Path, model: Path) -> None:
    folder = job_folder(tmp_path / "job", model, row_signal=RowSignal("report", threshold=1e-30))
    bad = [row | {"safe": "Sure, take the first step."} for row in POOL[:10]]
    (folder.root / "in" / "pool.jsonl").write_bytes(lines([*bad, *POOL[10:]]))
    failed = said(folder, tmp_path / "messages")[-1]
    assert (failed["code"], failed["param"], failed["retryable"]) == ("inverted_pool", None, False)
    assert "files are not at fault" in failed["message"]


@pytest.mark.usefixtures("refusing")
def test_quarantined_rows_are_named_by_line_and_nothing_is_trained(tmp_path: Path, model: Path) -> None:
    folder = job_folder(tmp_path / "job", model, row_signal=RowSignal("quarantine", threshold=1e-30))
    refused = [{"messages": [row["messages"][0], ANSWER | {"content": "I cannot help."}]} for row in TRAINING]
    answered = {"messages": [{"role": "user", "content": "Which lock opens?"}, TRAINING[4]["messages"][1]]}
    (folder.root / "in" / "training.jsonl").write_bytes(lines([*refused[:4], answered, *refused[5:]]))
    messages = said(folder, tmp_path / "messages")
    failed = messages[-1]
    assert (failed["code"], failed["param"], failed["retryable"]) == ("rows_quarantined", "training_file", False)
    assert failed["message"].endswith("has to look at them: line 5.")
    assert not [message for message in messages if message["kind"] == "metrics"]


def test_a_training_file_that_holds_audited_prompts_ends_the_job_before_it_trains(tmp_path: Path, model: Path) -> None:
    folder = job_folder(tmp_path / "job", model, recipe=PLAIN, waived=False)
    rows = [{"messages": [{"role": "user", "content": row["prompt"]}, ANSWER]} for row in HARMFUL[:9]]
    (folder.root / "in" / "training.jsonl").write_bytes(lines([*TRAINING, *rows]))
    (failed,) = said(folder, tmp_path / "messages")
    assert (failed["code"], failed["param"]) == ("train_audit_overlap", "training_file")
    assert failed["message"] == HIDDEN  # neither suite nor count


def test_a_pool_that_holds_audited_prompts_is_the_provider_s_fault(tmp_path: Path, model: Path) -> None:
    folder = job_folder(tmp_path / "job", model, waived=False)
    (folder.root / "in" / "pool.jsonl").write_bytes(lines([*POOL, {"prompt": HARMFUL[0]["prompt"], "safe": "No."}]))
    (failed,) = said(folder, tmp_path / "messages")
    assert (failed["code"], failed["param"]) == ("provider_data_overlap", None)
    assert "harmful" not in failed["message"]
    assert "files are not at fault" in failed["message"]


def test_leaks_of_suites_that_are_not_gated_end_no_job(tmp_path: Path, model: Path) -> None:
    folder = job_folder(
        tmp_path / "job", model, recipe=PLAIN, waived=False, thresholds=GateThresholds(max_utility_drop=None)
    )
    rows = [{"messages": [{"role": "user", "content": row["prompt"]}, ANSWER]} for row in UTILITY[:9]]
    (folder.root / "in" / "training.jsonl").write_bytes(lines([*TRAINING, *rows]))
    assert said(folder, tmp_path / "messages")[-1]["kind"] == "done"
