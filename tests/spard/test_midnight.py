"""Templates that write the day: a job that goes on after midnight, and its proof, have the tokens of the day before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any, Self

import pytest
from transformers import AutoTokenizer

from spard.data.chat import encode, encode_to_train, get_renderer, render_prompt
from spard.models.base import load_base
from spard.pipeline import run
from tests.spard.parts import write_model
from tests.spard.test_run import write_run
from tools.chat_templates import CONVERSATIONS, make_tokenizer, trl_templates

TEMPLATES = trl_templates()
WRITE_THE_DAY = [
    name for name, source in TEMPLATES.items() if "strftime_now" in source and not name.endswith("_training")
]
EVENING, MORNING, LATER = datetime(2026, 11, 30, 23, 59), datetime(2026, 12, 1, 0, 1), datetime(2027, 2, 3)
ASK = [{"role": "user", "content": "Hi"}]
# What our templates' clock and that of transformers would read.
CLOCKS = ("spard.data.chat_template.datetime", "transformers.utils.chat_template_utils.datetime")


@contextmanager
def set_clock(moment: datetime) -> Iterator[None]:
    """A block in which it is this moment for chat templates."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return cls(*moment.timetuple()[:6])

    with pytest.MonkeyPatch.context() as patch:
        for clock in CLOCKS:
            patch.setattr(clock, Clock)
        yield


def test_the_clock_is_the_one_that_templates_read() -> None:
    """Else the tests below would show nothing: a template that is left alone writes another day after midnight."""
    tokenizer = make_tokenizer("llama3_2", TEMPLATES["llama3_2"])
    for moment, day in ((EVENING, "30 Nov 2026"), (MORNING, "01 Dec 2026")):
        with set_clock(moment):
            assert f"Today Date: {day}" in tokenizer.apply_chat_template(ASK, tokenize=False)


@pytest.mark.parametrize("name", WRITE_THE_DAY)
def test_rows_and_prompts_have_the_same_tokens_on_every_day(name: str) -> None:
    found = []
    for moment in (EVENING, MORNING, LATER):
        with set_clock(moment):
            tokenizer = make_tokenizer(name, TEMPLATES[name])  # as a process that starts then
            found.append((encode(tokenizer, CONVERSATIONS["one turn"], 10_000).ids, render_prompt(tokenizer, ASK)))
    assert found[0] == found[1] == found[2]


def test_a_job_that_goes_on_after_midnight_and_its_proof_have_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clean process of the proof has this machine's own clock: a third day."""
    own = make_tokenizer("llama3_2", TEMPLATES["llama3_2"])
    ends = {"vocab_size": len(own), "eos_token_id": own.stated_ends, "pad_token_id": own.pad_token_id}
    folder = write_model(tmp_path / "model", **ends, max_position_embeddings=1024)
    own.save_pretrained(folder)
    spec = write_run(folder, tmp_path)
    spec = replace(spec, recipe=replace(spec.recipe, max_seq_length=512, checkpoint_every_s=1e-6))
    encoded, asked, steps = list[Any](), list[list[int]](), list[int]()
    monkeypatch.setattr("spard.pipeline.rows.encode_to_train", _recording(encode_to_train, encoded))
    monkeypatch.setattr("spard.release.proof.render_prompt", _recording(render_prompt, asked))

    def interrupt(message: dict[str, Any]) -> None:
        if message["kind"] == "metrics" and message["step"] == 2:
            raise KeyboardInterrupt

    with set_clock(EVENING), pytest.raises(KeyboardInterrupt):
        run(spec, tmp_path / "out", interrupt)
    before = [row.ids for rows in encoded for row in rows]
    encoded.clear()
    with set_clock(MORNING):
        run(spec, tmp_path / "out", lambda m: steps.append(m["step"]) if m["kind"] == "metrics" else None)
    assert steps[0] == 2  # it went on
    assert [row.ids for rows in encoded for row in rows] == before

    tokenizer = load_base(folder).tokenizer
    assert get_renderer(tokenizer).rendering.arguments == {"date_string": "26 Jul 2024"}
    date = "".join(map(str, tokenizer("Today Date: 26 Jul 2024", add_special_tokens=False)["input_ids"]))
    assert all(date in "".join(map(str, ids)) for ids in [*before, *asked])
    with set_clock(LATER):
        archived: Any = AutoTokenizer.from_pretrained(tmp_path / "out" / "adapter")
        ids = archived.apply_chat_template(ASK, add_generation_prompt=True)["input_ids"]
        assert list(ids) == render_prompt(tokenizer, ASK)


def _recording(function: Callable[..., Any], found: list[Any]) -> Callable[..., Any]:
    def record(*given: Any, **named: Any) -> Any:
        found.append(function(*given, **named))
        return found[-1]

    return record
