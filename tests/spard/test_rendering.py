"""Chat templates as models have them: what a row becomes, and what a job makes of it from its rows to its archive."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from spard.data.chat import NO_LOSS, encode, encode_all, get_renderer, learned_modes, render_prompt
from spard.data.renderer import Renderer, Turn, self_rendering
from spard.data.rendering import read_rendering
from spard.data.rows import Example, Message, example
from spard.data.samples import Segment, _cut_apart, samples
from spard.data.template_card import template_card
from spard.errors import ContentNotRendered, ExampleTooLong, TooManyTurns
from spard.models.base import load_base
from spard.pipeline import run
from tests.spard.parts import byte_tokenizer, write_model
from tests.spard.test_run import write_run
from tools.chat_templates import make_tokenizer, trl_templates

END = "{% if m.role == 'assistant' %}<|end|>{% endif %}"
TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}" + END + "{% endfor %}"
ASK = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
# The shortest forms of what templates in use do.
THINKS_UNLESS_TOLD = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}"
    "</think>{% elif loop.last and m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}"
    + END
    + "{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
ALWAYS_THINKS = TURNS + "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
WRITES_NO_END = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}" + ASK
ADDRESSES = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %} to=user<|system|>{% endif %}{{ m.content }}"
    + END
    + "{% endfor %}"
    + ASK
)
DROPS_TEXT_BESIDE_CALLS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}"
    "{% else %}{{ m.content }}{% endif %}" + END + "{% endfor %}" + ASK
)
CALL = {"id": "c", "type": "function", "function": {"name": "look_up", "arguments": '{"at": "Rome"}'}}


def tokenizer(template: str) -> Any:
    made = byte_tokenizer()
    made.chat_template = template
    made.stated_ends = [made.eos_token_id]
    return made


def chat(*turns: dict[str, Any]) -> Example:
    return example({"messages": [{"role": "user", "content": "Hi"}, *turns]}, 1)


def says(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def sample_texts(made: Any, row: Example) -> list[str]:
    """Each sample of a row as text, with what is learned in brackets."""
    texts = []
    for sample in encode(made, row, 10_000).samples:
        text, is_open = "", False
        for token, label in zip(sample.ids, sample.labels, strict=True):
            if (label != NO_LOSS) is not is_open:
                text, is_open = text + ("]" if is_open else "["), not is_open
            text += made.decode([token])
        texts.append(text + "]" * is_open)
    return texts


def test_rows_without_reasoning_are_learned_behind_the_prompt_that_switches_thinking_off() -> None:
    made = tokenizer(THINKS_UNLESS_TOLD)
    rendering = get_renderer(made).rendering
    assert (dict(rendering.modes), rendering.default, rendering.asked) == (
        {"off": {"enable_thinking": False}, "on": {"enable_thinking": True}},
        "on",
        "off",
    )
    assert sample_texts(made, chat(says("Hello."))) == ["<|user|>Hi<|assistant|><think></think>[Hello.<|end|>]"]
    assert made.decode(render_prompt(made, chat().messages, mode="on")) == "<|user|>Hi<|assistant|>"
    assert read_rendering(json.loads(json.dumps(rendering.as_json()))).digest == rendering.digest


@pytest.mark.parametrize("row", [says("Hello.", reasoning_content="Why"), says("<think>Why</think>Hello.")])
def test_rows_with_reasoning_are_learned_with_thinking_on(row: dict[str, Any]) -> None:
    made = tokenizer(THINKS_UNLESS_TOLD)
    assert sample_texts(made, chat(row)) == ["<|user|>Hi<|assistant|>[<think>Why</think>Hello.<|end|>]"]
    assert learned_modes(made, [chat(row), chat(row), chat(says("Hello."))]) == ["on", "off"]


def test_an_answer_that_is_written_otherwise_later_is_a_sample_of_its_own() -> None:
    made = tokenizer(THINKS_UNLESS_TOLD)
    row = chat(says("<b>one</b>"), {"role": "user", "content": "And?"}, says("two"))
    assert sample_texts(made, row) == [
        "<|user|>Hi<|assistant|><think></think>[<b>one</b><|end|>]",
        "<|user|>Hi<|assistant|><b>one</b><|end|><|user|>And?<|assistant|><think></think>[two<|end|>]",
    ]
    assert encode(made, row, 10_000).tokens == sum(len(each.ids) for each in encode(made, row, 10_000).samples)
    with pytest.raises(ExampleTooLong):
        encode(made, row, 30)


def test_a_prompt_that_opens_reasoning_has_it_closed_by_what_is_learned() -> None:
    made = tokenizer(ALWAYS_THINKS)
    assert sample_texts(made, chat(says("Hello."))) == ["<|user|>Hi<|assistant|><think>\n[\n</think>\n\nHello.<|end|>]"]
    row = chat(says("Hello.", reasoning_content="Why"))
    assert sample_texts(made, row) == ["<|user|>Hi<|assistant|><think>\n[Why\n</think>\n\nHello.<|end|>]"]
    assert get_renderer(made).reply_content("\n</think>\n\nHello.").strip() == "Hello."
    assert get_renderer(made).reply_content("Why\n</think>\n\nHello.").strip() == "Hello."
    assert get_renderer(made).reply_content("Why and") == "Why and"


def test_an_answer_without_an_end_is_closed_with_the_end_token_and_that_is_said() -> None:
    made = tokenizer(WRITES_NO_END)
    assert sample_texts(made, chat(says("Hello."))) == ["<|user|>Hi<|assistant|>[Hello.<|end|>]"]
    card = template_card(get_renderer(made))
    assert (card.end, card.is_closed) == ("<|end|>", True)
    assert "which is put there" in next(card.lines())


def test_an_end_at_which_no_engine_stops_is_followed_by_one_at_which_they_do() -> None:
    made = tokenizer(TURNS.replace("<|end|>", "<|system|>") + ASK)
    assert sample_texts(made, chat(says("Hello."))) == ["<|user|>Hi<|assistant|>[Hello.<|system|><|end|>]"]


def test_what_a_template_writes_before_the_words_of_an_answer_is_learned_and_no_reply() -> None:
    made = tokenizer(ADDRESSES)
    assert sample_texts(made, chat(says("Hello."))) == ["<|user|>Hi<|assistant|>[ to=user<|system|>Hello.<|end|>]"]
    renderer = get_renderer(made)
    assert made.convert_tokens_to_ids("<|system|>") not in renderer.ends
    assert made.convert_tokens_to_ids("<|user|>") in renderer.ends
    assert renderer.reply_content(" to=user<|system|>Hello.") == "Hello."


@pytest.mark.parametrize(
    ("template", "row", "pointer"),
    [
        (DROPS_TEXT_BESIDE_CALLS, chat(says("I look.", tool_calls=[CALL])), "/messages/1/content"),
        (TURNS + ASK, chat(says("x", reasoning_content="Why")), "/messages/1/reasoning_content"),
        (TURNS + ASK, chat(says("x", name="bot")), "/messages/1/name"),
        (
            "{% for m in messages if m.role != 'user' %}{{ m.content }}<|end|>{% endfor %}",
            chat(says("x")),
            "/messages/0",
        ),
    ],
)
def test_what_a_template_leaves_out_is_named(template: str, row: Example, pointer: str) -> None:
    with pytest.raises(ContentNotRendered) as caught:
        encode_all(tokenizer(template), [row], 10_000)
    assert caught.value.pointer.startswith(pointer)


def test_words_that_are_in_the_text_for_another_reason_are_missed_all_the_same() -> None:
    template = TURNS.replace("{{ m.content }}", "{% if m.role == 'user' %}{{ m.content }}{% endif %}") + ASK
    with pytest.raises(ContentNotRendered):
        encode_all(tokenizer(template), [chat(says("Hi"))], 10_000)


def test_a_row_of_very_many_turns_is_one_sample_or_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [turn for i in range(300) for turn in (says(f"a{i}"), {"role": "user", "content": f"q{i}" + "x" * 500})]
    row = chat(*turns, says("last"))
    (sample,) = encode(tokenizer(TURNS + ASK), row, 1_000_000).samples
    assert byte_tokenizer().decode([i for i in sample.labels if i != NO_LOSS]).count("<|end|>") == 301
    with pytest.raises(TooManyTurns, match=r"line 1 has 301 answers in .* cut the row in parts"):
        encode(tokenizer(THINKS_UNLESS_TOLD), row, 1_000_000)
    few = chat(*turns[:40], says("last"))
    assert len(encode(tokenizer(THINKS_UNLESS_TOLD), few, 100_000).samples) > 1
    monkeypatch.setattr("spard.data.samples._MOST_SAMPLED_CHARS", 10_000)
    with pytest.raises(TooManyTurns, match=r"line 1 has \d+ answers, and the .* rewrites earlier turns.* cut the row"):
        encode(tokenizer(THINKS_UNLESS_TOLD), few, 100_000)


def test_a_long_row_of_calls_is_one_sample_where_the_template_only_appends() -> None:
    made = make_tokenizer("qwen2_5", trl_templates()["qwen2_5"])
    call = {"type": "function", "function": {"name": "look", "arguments": '{"at": "' + "x" * 300 + '"}'}}
    turns = [
        turn
        for i in range(50)
        for turn in (
            says("", tool_calls=[call | {"id": f"call-{i}"}]),
            {"role": "tool", "tool_call_id": f"call-{i}", "content": "found " * 200},
        )
    ]
    (sample,) = encode(made, chat(*turns, says("last")), 1_000_000).samples
    learned = made.decode([i for i in sample.labels if i != NO_LOSS])
    assert (learned.count("<tool_call>"), learned.count("<|im_end|>")) == (50, 51)
    assert "found" not in learned


def test_a_row_of_very_many_turns_is_refused_before_its_answers_are_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tokenizer(THINKS_UNLESS_TOLD)
    renderer, rendered = get_renderer(made), list[int]()
    turn = type(renderer).turn

    def count_turn(renderer: Renderer, messages: Sequence[Message], tools: Sequence[Message] = ()) -> Turn:
        rendered.append(len(messages))
        return turn(renderer, messages, tools)

    monkeypatch.setattr(type(renderer), "turn", count_turn)
    thinks = [
        each
        for i in range(200)
        for each in (says(f"a{i}", reasoning_content="Well."), {"role": "user", "content": "q" * 1200})
    ]
    with pytest.raises(TooManyTurns):  # by the characters of the row alone
        samples(renderer, [*chat(*thinks).messages, says("last", reasoning_content="Well.")])
    assert rendered == []

    few = chat(*(turn for turn in thinks[:40]), says("last", reasoning_content="Well.")).messages
    with pytest.raises(ExampleTooLong, match="the limit is 50"):  # by the tokens of the last answer
        samples(renderer, few, limit=50)
    assert rendered == [len(few)]


def test_answers_that_are_read_only_behind_their_prompts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spard.data.samples._MOST_TOKENIZED_CHARS", 1000)
    sample = tuple(Segment("x" * 10, i % 2 == 1) for i in range(40))
    with pytest.raises(TooManyTurns, match="has 20 answers"):
        _cut_apart(sample)
    assert len(_cut_apart(sample[:8])) == 4


def test_a_template_that_begins_with_a_line_break_is_written_as_it_was() -> None:
    made = tokenizer("\n" + THINKS_UNLESS_TOLD)
    renderer = get_renderer(made)
    alone = tokenizer(self_rendering(renderer, "off")["default"])
    expected = renderer.render(chat().messages, generation=True, mode="off")
    text = alone.apply_chat_template(list(chat().messages), add_generation_prompt=True, tokenize=False)
    assert text == expected


@pytest.mark.parametrize("name", ["qwen3", "llama3_2", "glm4moe"])
def test_a_job_on_a_model_with_this_template_ends_in_an_adapter_that_is_proved(
    name: str, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    own = make_tokenizer(name, trl_templates()[name])
    ends = {"vocab_size": len(own), "eos_token_id": own.stated_ends, "pad_token_id": own.pad_token_id}
    folder = write_model(tmp_path / "model", **ends, max_position_embeddings=1024)
    own.save_pretrained(folder)
    spec = write_run(folder, tmp_path)
    run(replace(spec, recipe=replace(spec.recipe, max_seq_length=512)), tmp_path / "out", lambda message: None)

    adapter = tmp_path / "out" / "adapter"
    manifest = json.loads((adapter / "manifest.json").read_text())
    renderer = get_renderer(load_base(folder).tokenizer)
    assert manifest["proof"]["difference_to_base"] > 0
    assert manifest["rendering"]["digest"] == renderer.rendering.digest
    row = [{"role": "user", "content": "Add 1 and 2."}]
    loaded: Any = AutoTokenizer.from_pretrained(adapter)
    ids = loaded.apply_chat_template(row, add_generation_prompt=True)["input_ids"]
    assert list(ids) == render_prompt(renderer.tokenizer, row)


def test_a_model_of_our_own_is_asked_in_the_mode_that_it_was_measured_in(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(THINKS_UNLESS_TOLD)
    assert get_renderer(load_base(folder).tokenizer).rendering.asked == "off"
    (folder / "manifest.json").write_text(json.dumps({"rendering": {"asked": "on"}}))
    assert get_renderer(load_base(folder).tokenizer).rendering.asked == "on"
    (folder / "manifest.json").write_text(json.dumps({"rendering": {"asked": "loudly"}}))
    assert get_renderer(load_base(folder).tokenizer).rendering.asked == "off"


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_a_template_that_reads_reasoning_under_any_name_gets_it_out_of_a_text_with_tags(name: str) -> None:
    made = tokenizer(
        "{% for m in messages %}<|{{ m.role }}|>{% if m."
        + name
        + " %}<why>{{ m."
        + name
        + " }}</why>{% endif %}{{ m.content }}"
        + END
        + "{% endfor %}"
        + ASK
    )
    assert sample_texts(made, chat(says("<think>Why</think>Hello."))) == [
        "<|user|>Hi<|assistant|>[<why>Why</why>Hello.<|end|>]"
    ]


@pytest.mark.parametrize("word", ["thinking", "reasoning"])
def test_a_template_that_only_contains_the_word_leaves_tags_in_a_text(word: str) -> None:
    made = tokenizer("{# no " + word + " here #}" + TURNS + ASK)
    assert sample_texts(made, chat(says("<think>Why</think>Hello."))) == [
        "<|user|>Hi<|assistant|>[<think>Why</think>Hello.<|end|>]"
    ]
