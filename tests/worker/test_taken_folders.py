"""Every kind of base folder that is taken answers a message, and a job on it comes to its end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from app.inference.protocol import EngineMessage
from spard.config import Hyperparameters
from spard.models.base import load_base
from spard.pipeline.library import run
from tests.spard.base_folders import KINDS, Kind, write_kind
from tests.spard.test_run import write_run
from tests.worker.engine_in_process import line
from worker.engine.serve import Engine

TAKEN = [kind for kind in KINDS if not kind.refusal]
TRAINED = [kind for kind in TAKEN if "past the embeddings" in kind.name or "stored in" in kind.note]
WORDS = "Say wombat, [PAD], <|image|>, <|last|> and <|end|>."


@pytest.mark.parametrize("kind", TAKEN, ids=lambda kind: kind.name)
def test_a_folder_that_is_taken_answers_a_message(kind: Kind, tmp_path: Path) -> None:
    said = list[EngineMessage]()
    engine = Engine(load_base(write_kind(kind, tmp_path), device="cpu"), said.append, 2, 1 << 20)
    for number, words in enumerate((WORDS, "Hello"), 1):
        engine.take(line(number, words, None, max_tokens=4))
    while engine.is_busy:
        engine.step()
    assert sorted(each["id"] for each in said if each["kind"] == "done") == [1, 2]


@pytest.mark.parametrize("kind", TRAINED, ids=lambda kind: kind.name)
def test_a_job_on_a_folder_that_is_taken_comes_to_its_end(kind: Kind, tmp_path: Path) -> None:
    spec = write_run(write_kind(kind, tmp_path), tmp_path)
    rows = spec.training_file.read_text().replace("Add 1 and 1.", "Say wombat and [PAD].")
    spec.training_file.write_text(rows)
    few = replace(spec.recipe, hyperparameters=Hyperparameters(n_epochs=1, batch_size=12))
    outcome = run(replace(spec, recipe=few), tmp_path / "out", lambda message: None)
    assert outcome.report.gate.decision
    assert (tmp_path / "out" / "adapter.tar.gz").is_file()
