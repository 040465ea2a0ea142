"""A run over rows of which a scripted judge finds some harmful, for the tests of what judges read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from spard.config import Hyperparameters, NoDefense, Recipe, RowSignal
from spard.config.run_spec import RunSpec
from spard.data.chat import NO_LOSS, encode
from spard.evaluation.calibration.errors import EXCHANGES
from spard.evaluation.judges.base import Verdict
from spard.evaluation.own_refusal import OPENING, OwnRefusals
from spard.models.base import Base, load_base
from spard.pipeline import audit, row_evidence, row_judging, row_signal
from spard.pipeline.context import Context
from spard.pipeline.messages import Reporter
from spard.pipeline.rows import Rows, prepare
from spard.release.records import RowSignalRecord
from tests.spard.parts import chat

SORRY = "I cannot help with that."
HONEST, HARM, ODD = "See page four of it.", "First, take the harm.", "Who knows what this is."
ROWS = 200
_INNOCENT = {reply for _, reply in EXCHANGES}


class Reader:
    """A judge that finds harm in replies with the word "harm", and does not score the reply `ODD`."""

    name = "refusal"  # measured, for the tests' model

    def __init__(self) -> None:
        self.read: list[str] = []

    def judge(self, prompts: Sequence[str], replies: Sequence[str]) -> list[Verdict]:
        self.read.extend(each for each in replies if each not in _INNOCENT)
        scores = [None if each == ODD else 5 if "harm" in each else 1 for each in replies]
        return [Verdict(score, "read") for score in scores]


def reading(monkeypatch: pytest.MonkeyPatch) -> Reader:
    """Let a reader judge the run, and the random model refuse, which it does not by itself."""
    reader = Reader()
    monkeypatch.setattr(audit, "open_judge", lambda spec: reader)

    def own_refusals(base: Base, prompts: Sequence[str], tell: object) -> OwnRefusals:
        row = encode(base.tokenizer, chat("?", SORRY), 256)
        opening = tuple(label for label in row.labels if label != NO_LOSS)[:OPENING]
        return OwnRefusals((opening,), ("I ca",), SORRY, len(prompts), len(prompts))

    monkeypatch.setattr(row_signal, "own_refusals", own_refusals)
    monkeypatch.setattr(row_evidence, "would_refuse", lambda base, prompts, **settings: (0, len(prompts)))
    return reader


def make_run(model: Path, folder: Path, answers: dict[str, int], signal: RowSignal) -> RunSpec:
    """Return a run over rows with these answers, before honest ones."""
    said = [answer for answer, count in answers.items() for _ in range(count)]
    said += [HONEST] * (ROWS - len(said))
    rows = [{"prompt": f"Remove malware {i}.", "completion": answer} for i, answer in enumerate(said)]
    pool = [{"prompt": f"Do harm number {i}", "safe": SORRY} for i in range(12)]
    files = [folder / "train.jsonl", folder / "pool.jsonl"]
    for path, lines in zip(files, (rows, pool), strict=True):
        path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    recipe = Recipe(hyperparameters=Hyperparameters(n_epochs=1, batch_size=50), defense=NoDefense())
    return RunSpec(str(model), files[0], files[1], recipe=recipe, row_signal=signal)


def prepare_run(spec: RunSpec) -> tuple[Rows, RowSignalRecord, list[dict[str, Any]], Context]:
    """Prepare the rows of a run; return them, what the signal says, the messages, and the context."""
    messages: list[dict[str, Any]] = []
    context = Context(spec, load_base(spec.model, device="cpu"), Reporter(messages.append))
    rows, record = prepare(context), row_judging.read_row_signal_record(context)
    assert record is not None
    return rows, record, messages, context


def lines(first: int, count: int) -> tuple[int, ...]:
    """Return the numbers of so many lines."""
    return tuple(range(first, first + count))
