"""What the audit asks stays the provider's: a customer's file of guesses is not sorted for them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from spard.evaluation.suites import HIDDEN
from tests.worker.parts import HARMFUL, PLAIN, TRAINING, job_folder, lines
from worker import pipeline
from worker.protocol import Report, parse
from worker.workdir import Folder

GUESSES = 9


@pytest.fixture(scope="module")
def guessing_job(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Folder, list[str]]:
    """A job whose rows ask nine of the twenty secret prompts, and everything that it said."""
    root = tmp_path_factory.mktemp("guessed")
    folder = job_folder(root / "job", model, recipe=PLAIN)
    answer = {"role": "assistant", "content": "No."}
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": row["prompt"]}, answer]} for row in HARMFUL[:GUESSES]
    ]
    (folder.root / "in" / "training.jsonl").write_bytes(lines([*rows, *TRAINING]))
    path = root / "messages"
    fd = os.open(path, os.O_CREAT | os.O_WRONLY)
    pipeline.run(folder, Report(fd), lambda: False)
    os.close(fd)
    found = [parse(line) for line in path.read_bytes().splitlines()]
    return folder, [str(message.get("message")) for message in found if message]


def test_a_customer_hears_that_the_audit_is_spoiled_and_no_more(guessing_job: tuple[Folder, list[str]]) -> None:
    folder, said = guessing_job
    assert said.count(HIDDEN) == 1
    for text in (*said, folder.safety.read_text()):
        assert "stand in the training file." not in text
        assert f"{GUESSES} of {len(HARMFUL)} prompts" not in text


def test_rows_that_validation_and_training_share_are_told(guessing_job: tuple[Folder, list[str]]) -> None:
    shared = (
        "5 of 5 rows of the validation file stand in the training file too: their loss says little about other data."
    )
    assert shared in guessing_job[1]
