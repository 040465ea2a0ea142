"""The speed that the trial of a base model measures, and how long it measures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spard.data.samples import NO_LOSS, EncodedSample
from spard.training import trial

CPU = torch.device("cpu")


class SlowModel:
    """Replaces a model and the clocks: each token takes the same time, whatever the speed of the machine.

    `slowdowns` are the multiples that other work on the machine makes of the next runs' times on the clock.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, row_s: float, words: int = trial._WHOLE_REPLY) -> None:
        self.now, self.busy = 0.0, 0.0
        self.limits: list[int] = []
        self.slowdowns: list[float] = []
        self._row_s, self._words = row_s, words
        clocks = SimpleNamespace(perf_counter=lambda: self.now, process_time=lambda: self.busy)
        monkeypatch.setattr(trial, "complete", self.complete)
        monkeypatch.setattr(trial, "time", clocks)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)

    def complete(self, _model: Any, _tokenizer: Any, rows: list[list[int]], limit: int) -> list[str]:
        words = min(limit, self._words)
        self.limits.append(limit)
        took_s = self._row_s * words * len(rows)
        self.busy += took_s
        self.now += took_s * (self.slowdowns.pop(0) if self.slowdowns else 1)
        return [" ".join(["word"] * words)] * len(rows)

    def measure(self, rows: int) -> list[float]:
        tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: text.split())
        base: Any = SimpleNamespace(model=None, tokenizer=tokenizer, device=CPU)
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


@pytest.mark.parametrize("slowdowns", [[1, 300, 1], [300, 300, 300, 300, 300, 300]])
def test_other_work_on_the_machine_does_not_change_the_rate(
    monkeypatch: pytest.MonkeyPatch, slowdowns: list[float]
) -> None:
    """One run that waits does not count, and where all wait the CPU time of one thread does."""
    model = SlowModel(monkeypatch, row_s=1e-5)
    model.slowdowns = [*slowdowns]
    assert model.measure(4) == pytest.approx([1e5, trial._WHOLE_REPLY], rel=1e-3)


def test_a_slow_moment_does_not_make_the_probe_write_fewer_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SlowModel(monkeypatch, row_s=1e-5)
    model.slowdowns = [1e6]
    base: Any = SimpleNamespace(model=None, tokenizer=None, device=CPU)
    monkeypatch.setattr("spard.models.budget.generated_rows", lambda *_: 1000)
    assert trial._rows_at_once(base, [1]) == trial._REPLIES


def test_the_rows_of_the_training_probe_begin_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that begin alike go through the model once, which rows of a file do not."""
    row = EncodedSample((20, 21, 22), (NO_LOSS, NO_LOSS, 22))
    first_tokens: list[list[int]] = []

    def note(_: Any, batch: Any) -> None:
        first_tokens.append(batch.ids_BT[:, 0].tolist())
        raise StopIteration

    monkeypatch.setattr(trial, "token_losses", note)
    base: Any = SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=0), device=CPU)
    model: Any = SimpleNamespace(parameters=list)
    with pytest.raises(StopIteration):
        trial._training_rate(base, model, row, 4)
    assert len(set(first_tokens[0])) == 4


def test_the_number_of_threads_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    trial._fastest(lambda: None, 3, CPU)
    trial._fastest(lambda: None, 3, torch.device("cuda"))
    assert used == [1, 2]
