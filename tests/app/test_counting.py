"""Rows are counted in processes of their own: exactly, within an allowance, and only while somebody waits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from app.db.tables import BaseModelEntry
from app.errors import InvalidState, Unavailable
from app.files import counting
from app.files.counting import Allowance, Counters
from app.files.tokenizer import LightTokenizer
from spard.data.chat import NO_LOSS, encode
from spard.data.jsonl import numbered_texts, parse_row
from spard.data.rows import example
from tests.app.http.conftest import chat, jsonl, rows
from tests.spard.parts import byte_tokenizer

REFUSED = {"messages": [{"role": "assistant", "content": "It begins."}, *chat("x")["messages"]]}


@pytest.fixture
def counters() -> Iterator[Counters]:
    found = Counters(1)
    yield found
    found.close()


@pytest.fixture
def entry(tmp_path: Path) -> BaseModelEntry:
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return BaseModelEntry(alias="tiny", source=str(tmp_path / "model"), revision=None)


def patient() -> Allowance:
    return Allowance(1e9, lambda: False)


def test_counts_are_those_of_training(counters: Counters, entry: BaseModelEntry) -> None:
    content = rows(300) + jsonl(REFUSED) + rows(300)  # three batches, one with a row that is refused
    found = counters.ask("count", entry, numbered_texts([content]), patient(), 5000).rows
    tokenizer = LightTokenizer(Path(entry.source))
    for (line, text), row in zip(numbered_texts([content]), found, strict=True):
        if line == 301:
            assert (row["line"], row["code"]) == (301, "template_render_failed")
            continue
        expected = encode(tokenizer, example(parse_row(text, line), line), 10_000)
        n = len(expected.ids)
        assert row == [line, n, sum(label != NO_LOSS for label in expected.labels), n]


def test_a_row_of_too_many_turns_is_told_with_its_place(counters: Counters, entry: BaseModelEntry) -> None:
    ends = "{% if loop.last and m.role == 'assistant' %}<|end|>{% endif %}"
    rewrites = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}" + ends
    template = rewrites + "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    (Path(entry.source) / "chat_template.jinja").write_text(template)
    long = {"messages": [turn for i in range(600) for turn in chat(f"What is {i}?" + "x" * 200)["messages"]]}
    (row,) = counters.ask("count", entry, numbered_texts([jsonl(long)]), patient(), None).rows
    assert (row["code"], row["pointer"]) == ("too_many_turns", "/messages")


def test_an_allowance_ends_the_counting_and_says_how_far_it_came(counters: Counters, entry: BaseModelEntry) -> None:
    allowance = Allowance(1e-9, lambda: False)
    found = counters.ask("count", entry, numbered_texts([rows(1000)]), allowance, None)
    assert len(found.rows) == counting._BATCH_ROWS
    assert allowance.used_s > 0


def test_nothing_is_counted_for_a_client_that_has_left(counters: Counters, entry: BaseModelEntry) -> None:
    batches = count(1)
    allowance = Allowance(1e9, lambda: next(batches) == 2)
    endless = ((line, jsonl(chat("x")).decode().strip()) for line in count(1))
    assert len(counters.ask("count", entry, endless, allowance, None).rows) == 2 * counting._BATCH_ROWS


def test_a_process_that_died_is_started_again(counters: Counters, entry: BaseModelEntry) -> None:
    lines = list(numbered_texts([rows(1)]))
    counters.ask("count", entry, lines, patient(), None)
    running = counters._all[0]._running
    assert running
    running.kill()
    running.wait()
    with pytest.raises(Unavailable):
        counters.ask("count", entry, lines, patient(), None)
    assert len(counters.ask("count", entry, lines, patient(), None).rows) == 1


def test_a_tokenizer_that_cannot_be_read_is_told(counters: Counters, entry: BaseModelEntry) -> None:
    (Path(entry.source) / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidState, match="not of a kind"):
        counters.ask("count", entry, [], patient(), None)


def test_a_changed_tokenizer_is_read_anew(counters: Counters, entry: BaseModelEntry) -> None:
    lines = list(numbered_texts([rows(1)]))
    first = counters.ask("count", entry, lines, patient(), None).rows
    (Path(entry.source) / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert counters.ask("count", entry, lines, patient(), None).rows != first


def test_the_process_has_none_of_our_keys_and_ends_with_us(
    counters: Counters, entry: BaseModelEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARD_ADMIN_KEY", "sk-spard-secret")
    counters.ask("count", entry, [], patient(), None)
    running = counters._all[0]._running
    assert running
    environ = Path(f"/proc/{running.pid}/environ")
    assert not environ.exists() or b"secret" not in environ.read_bytes()
    assert running.stdin
    running.stdin.close()
    assert running.wait(120) == 0
