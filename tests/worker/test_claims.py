"""Two jobs on one machine ask a base model the same once."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any, cast

import pytest

from spard.evaluation.audit import Suite
from spard.evaluation.results import SuiteResult
from spard.evaluation.statistics import rate
from spard.pipeline import kept_figures
from spard.pipeline.context import Context
from spard.pipeline.messages import Message, Reporter
from worker.pipeline import FolderCache

PATIENCE_S = 60.0
SUITES = [Suite("harm", "harmful", ()), Suite("harmless", "benign", ())]
KEYS = [{"suite": 1}, {"suite": 2}]


@pytest.fixture
def cache(tmp_path: Path) -> FolderCache:
    return FolderCache(tmp_path / "cache")


class Job:
    """Asks for the figures of all suites; `may_answer` holds its base model back."""

    def __init__(self, cache: FolderCache) -> None:
        self.asked: list[str] = []
        self.begins, self.may_answer, self.waits = Event(), Event(), Event()
        self.messages: list[Message] = []
        self.found: list[SuiteResult] = []
        self._context = Context(cast(Any, None), cast(Any, None), Reporter(self._hear), cache=cache)
        self._thread = Thread(target=self._work, daemon=True)

    def start(self) -> None:
        """Begin in a thread."""
        self._thread.start()

    def join(self) -> None:
        """Wait until it is over."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def _hear(self, message: Message) -> None:
        self.messages.append(message)
        if message["kind"] == "waiting":
            self.waits.set()

    def _work(self) -> None:
        nothing = kept_figures.read_cached(self._context, KEYS)
        self.found = kept_figures.complete_cached(self._context, SUITES, KEYS, nothing, self._measure)

    def _measure(self, suites: Sequence[Suite]) -> list[SuiteResult]:
        self.asked = [each.name for each in suites]
        self.begins.set()
        assert self.may_answer.wait(PATIENCE_S)
        share = rate(1, 20)
        made = (share.n, 0, 0, share.hits, share.rate, share.low, share.high)
        return [SuiteResult(each.name, each.kind, "refusal", *made) for each in suites]


def test_who_comes_second_waits_with_a_sign_and_asks_nothing(
    cache: FolderCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_figures, "_LOOK_S", 0.01)
    first, second = Job(cache), Job(cache)
    first.start()
    assert first.begins.wait(PATIENCE_S)

    second.may_answer.set()
    second.start()
    assert second.waits.wait(PATIENCE_S)
    assert not second.begins.is_set()
    first.may_answer.set()
    first.join()
    second.join()

    assert (first.asked, second.asked) == (["harm", "harmless"], [])
    assert second.found == first.found
    told = [message["message"] for message in second.messages if message["kind"] == "event"]
    assert told == ["Another job asks the base model the same prompts: its figures are awaited."]
    assert not [message for message in first.messages if message["kind"] in ("event", "waiting")]


def test_after_the_lease_the_second_asks_by_itself(cache: FolderCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_figures, "LEASE_S", 0.0)
    first, second = Job(cache), Job(cache)
    first.start()
    assert first.begins.wait(PATIENCE_S)

    second.may_answer.set()
    second.start()
    second.join()
    first.may_answer.set()
    first.join()

    assert second.asked == ["harm", "harmless"]
    assert second.found == first.found


def test_a_claim_keeps_others_out_until_it_is_over(cache: FolderCache) -> None:
    claim = cache.claim("audits", {"a": 1})
    assert claim is not None
    with claim:
        assert cache.claim("audits", {"a": 1}) is None
        other = cache.claim("audits", {"a": 2})
        assert other is not None
        with other:
            pass
    again = cache.claim("audits", {"a": 1})
    assert again is not None
    with again:
        pass


def test_a_process_that_is_killed_leaves_no_claim(cache: FolderCache) -> None:
    own, its = os.pipe()
    process = os.fork()
    if process == 0:
        claim = cache.claim("audits", {"a": 1})
        os.write(its, b"claimed" if claim else b"refused")
        signal.pause()
        os._exit(0)
    try:
        assert os.read(own, 7) == b"claimed"
        assert cache.claim("audits", {"a": 1}) is None
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(own)
        os.close(its)
    claim = cache.claim("audits", {"a": 1})
    assert claim is not None
    with claim:
        pass


def test_where_nothing_can_be_locked_nobody_waits(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file is no folder")

    claim = FolderCache(tmp_path / "cache").claim("audits", {"a": 1})

    assert claim is not None
    with claim:
        pass
