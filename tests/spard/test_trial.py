"""The speed that the trial of a base model measures, and how long it measures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spard.training import trial


class SlowModel:
    """A stand-in for a model whose tokens take time by a clock of its own, so that no machine's speed matters."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, row_s: float, words: int = trial._WHOLE_REPLY) -> None:
        self.now = 0.0
        self.limits: list[int] = []
        self.stalls = 0  # runs that take 100 times as long, from now on
        self._row_s, self._words = row_s, words
        monkeypatch.setattr(trial, "complete", self.complete)
        monkeypatch.setattr(trial, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def complete(self, _model: Any, _tokenizer: Any, rows: list[list[int]], limit: int) -> list[str]:
        words = min(limit, self._words)
        self.limits.append(limit)
        self.now += self._row_s * words * len(rows) * (100 if self.stalls > 0 else 1)
        self.stalls -= 1
        return [" ".join(["word"] * words)] * len(rows)

    def measure(self, rows: int) -> list[float]:
        tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: text.split())
        base: Any = SimpleNamespace(model=None, tokenizer=tokenizer)
        return [*trial._generation_rate(base, [1], rows)]


def test_whole_replies_are_measured_only_where_they_fit_the_seconds_of_the_probe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = 4
    affordable_s = trial.PROBE_S / (rows * trial._WHOLE_REPLY)

    slow = SlowModel(monkeypatch, row_s=2 * affordable_s)
    assert slow.measure(rows) == pytest.approx([1 / (2 * affordable_s), trial._WHOLE_REPLY], rel=1e-3)
    assert set(slow.limits) == {trial._SHORT_REPLY}
    assert slow.now < trial.PROBE_S

    fast = SlowModel(monkeypatch, row_s=affordable_s / 2)
    assert fast.measure(rows) == pytest.approx([2 / affordable_s, trial._WHOLE_REPLY], rel=1e-3)
    assert set(fast.limits) == {trial._SHORT_REPLY, trial._WHOLE_REPLY}
    assert fast.now < 2 * trial.PROBE_S


def test_replies_that_end_by_themselves_are_as_long_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    brief = SlowModel(monkeypatch, row_s=1e-6, words=3)
    assert brief.measure(4)[1] == 3
    assert set(brief.limits) == {trial._SHORT_REPLY}


def test_a_run_that_other_work_slows_down_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 4
    model = SlowModel(monkeypatch, row_s=1e-5)
    model.stalls = 1
    assert model.measure(rows) == pytest.approx([1e5, trial._WHOLE_REPLY], rel=1e-3)

    model.stalls = 1
    base: Any = SimpleNamespace(model=None, tokenizer=None)
    monkeypatch.setattr("spard.models.budget.generated_rows", lambda *_: 1000)
    assert trial._rows_at_once(base, [1]) == trial._REPLIES
