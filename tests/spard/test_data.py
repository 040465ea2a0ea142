from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from spard.data.batches import batches, collate, order, to_device
from spard.data.chat import NO_LOSS, PLAIN_TEMPLATE, EncodedSample, encode, render_prompt, render_question
from spard.data.rows import Example, prompt_text, read_examples, read_pool, read_prompts
from spard.errors import ExampleTooLong, InvalidData
from tests.spard.parts import byte_tokenizer, chat

# A template like Qwen3's: earlier answers are rewritten once another question follows.
REWRITING = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' and loop.last %}[thought]{% endif %}{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>[thought]{% endif %}"
)


def learned_text(encoded: EncodedSample) -> str:
    text = byte_tokenizer().decode([label for label in encoded.labels if label != NO_LOSS])
    assert isinstance(text, str)
    return text


def turns(*contents: str, **last: Any) -> Example:
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    messages[-1] |= last
    return Example(tuple(messages), 7)


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("template", [None, PLAIN_TEMPLATE, REWRITING])
def test_only_the_answer_and_its_end_token_carry_loss(template: str | None) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template

    encoded = encode(tokenizer, chat("A question?", "An answer, caf\u00e9."), 256)

    assert learned_text(encoded) == "An answer, caf\u00e9.<|end|>"


@pytest.mark.parametrize("template", [None, PLAIN_TEMPLATE, REWRITING])
def test_every_assistant_turn_carries_loss(template: str | None) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template

    encoded = encode(tokenizer, turns("One?", "First.", "Two?", "Second."), 256)

    assert "".join(map(learned_text, encoded.samples)) == "First.<|end|>Second.<|end|>"


def test_a_turn_of_weight_zero_carries_no_loss() -> None:
    messages = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0})
    example = Example((*messages, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}), 1)

    assert learned_text(encode(byte_tokenizer(), example, 256)) == "d<|end|>"


def test_the_rendered_prompt_is_what_the_training_row_begins_with() -> None:
    tokenizer, example = byte_tokenizer(), chat("A question?", "An answer.")

    encoded = encode(tokenizer, example, 256)

    prompt = render_prompt(tokenizer, example.messages[:1])
    assert list(encoded.ids[: len(prompt)]) == prompt
    assert encoded.labels[len(prompt)] != NO_LOSS
    assert set(encoded.labels[: len(prompt)]) == {NO_LOSS}


def test_a_row_is_the_same_tokens_on_every_day() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ date_string if date_string is defined else strftime_now('%d %b %Y') }}<|end|>"
    assert tokenizer.decode(render_prompt(tokenizer, [{"role": "user", "content": "hi"}])) == "26 Jul 2024<|end|>"


def test_a_row_that_is_too_long_is_named_with_its_tokens_and_the_limit() -> None:
    with pytest.raises(ExampleTooLong, match=r"line 7 has \d+ tokens; the limit is 16"):
        encode(byte_tokenizer(), turns("A question?", "An answer."), 16)


def test_a_conversation_that_the_template_refuses_is_invalid_data() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system turns') }}"

    with pytest.raises(InvalidData, match=r"line 7: .*no system turns"):
        encode(tokenizer, turns("a", "b"), 256)


REFUSES_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
DROPS_SYSTEM = "{% for m in messages if m['role'] != 'system' %}<|user|>{{ m['content'] }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (None, "<|system|>\nBe kind.<|end|>\n<|user|>\nHello<|end|>\n<|assistant|>\n"),
        (REFUSES_SYSTEM + DROPS_SYSTEM, "<|user|>Be kind.\n\nHello"),
        (DROPS_SYSTEM, "<|user|>Be kind.\n\nHello"),
    ],
)
def test_a_system_prompt_reaches_the_model_whatever_its_template_knows(template: str | None, text: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    assert tokenizer.decode(render_question(tokenizer, "Hello", "Be kind.")) == text


def test_a_system_prompt_keeps_its_role_where_a_template_trims_it() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}{% endfor %}"
    assert tokenizer.decode(render_question(tokenizer, "Hello", "Be kind.\n")) == "<|system|>Be kind.<|user|>Hello"


def test_an_answer_to_nothing_is_invalid_data() -> None:
    greeting = Example(({"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Hi."}), 7)
    with pytest.raises(InvalidData, match="line 7 begins with the assistant"):
        encode(byte_tokenizer(), greeting, 256)


def test_both_row_forms_are_read(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chats = read_examples(write_lines(tmp_path / "chats.jsonl", "", {"messages": messages}))
    pairs = read_examples(write_lines(tmp_path / "pairs.jsonl", {"prompt": "a", "completion": "b"}))

    assert [(row.messages, row.line) for row in (*chats, *pairs)] == [(tuple(messages), 2), (tuple(messages), 1)]


def test_openai_words_become_those_of_templates(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]

    (example,) = read_examples(write_lines(tmp_path / "rows.jsonl", {"messages": messages}))

    assert [message["role"] for message in example.messages] == ["system", "user", "assistant"]
    assert [message["content"] for message in example.messages] == ["be brief", "hi", ""]
    assert example.messages[2]["tool_calls"][0]["function"]["arguments"] == {"x": 1}


@pytest.mark.parametrize(
    ("row", "code", "reason"),
    [
        ("{", "invalid_json", "line 1: "),
        ("[1]", "data_type", "line 1: the line is an array, expected a JSON object"),
        ({"prompt": "a"}, "message_missing_key", 'line 1, /completion: "completion" is missing'),
        ({"messages": []}, "missing_messages_list", "line 1, /messages: "),
        ({"messages": [{"role": "robot", "content": "a"}]}, "unrecognized_role", "line 1, /messages/0/role: "),
        ({"messages": [{"role": "user", "content": 1}]}, "data_type", "line 1, /messages/0/content: "),
        ({"messages": [{"role": "user", "content": "a"}]}, "example_missing_assistant_message", "line 1, /messages: "),
        ('{"prompt": "a", "completion": "b", "completion": "c"}', "duplicate_key", 'line 1: key "completion" stands'),
    ],
)
def test_a_row_that_cannot_be_read_is_named(tmp_path: Path, row: Any, code: str, reason: str) -> None:
    with pytest.raises(InvalidData, match=reason) as raised:
        read_examples(write_lines(tmp_path / "rows.jsonl", row))
    assert raised.value.row_code == code


def test_a_file_that_is_not_utf_8_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'\n{"prompt": "a", "completion": "caf\xe9"}\n')
    with pytest.raises(InvalidData, match="line 2: the line is not UTF-8: it has byte 0xe9"):
        read_examples(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("head", [b"PAR1", b"ARROW1\0\0", b"\xff\xff\xff\xff"])
def test_a_table_of_columns_is_told_from_broken_text(tmp_path: Path, head: bytes) -> None:
    (tmp_path / "rows.parquet").write_bytes(head + b"\x15\0")
    for read in (read_examples, read_pool, read_prompts):
        with pytest.raises(InvalidData, match="the file is Parquet or Arrow; write it as JSON lines"):
            read(tmp_path / "rows.parquet")


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85", "\x7f"])
def test_lines_end_at_the_newline_alone(tmp_path: Path, character: str) -> None:
    text = json.dumps({"prompt": f"a {character} b", "safe": "No."}, ensure_ascii=False)
    (example,) = read_pool(write_lines(tmp_path / "pool.jsonl", text))
    assert prompt_text(example) == f"a {character} b"


def test_pool_rows_are_a_question_and_its_safe_answer(tmp_path: Path) -> None:
    (example,) = read_pool(write_lines(tmp_path / "pool.jsonl", {"prompt": "a", "safe": "b", "unsafe": "c"}))

    assert [message["content"] for message in example.messages] == ["a", "b"]


def test_prompts_are_read_up_to_the_limit(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "suite.jsonl", {"prompt": "a", "answer": 4}, {"prompt": "b"})

    assert [prompt.answer for prompt in read_prompts(path)] == ["4", None]
    assert len(read_prompts(path, limit=1)) == 1


def test_what_is_embedded_is_what_the_user_says() -> None:
    assert prompt_text(turns("a", "b", "c", "d")) == "a\nc"


def test_rows_are_padded_on_the_right() -> None:
    rows = [EncodedSample((1, 2, 4), (NO_LOSS, 2, 4)), EncodedSample((3,), (3,)), EncodedSample((5, 6), (NO_LOSS, 6))]

    batch = collate(rows, 9, "cpu")

    assert batch.ids_BT.tolist() == [[1, 2, 4], [3, 9, 9], [5, 6, 9]]
    assert (batch.lengths, batch.labels) == ((3, 1, 2), (2, 0, 1))


def test_the_state_before_each_labeled_token_is_known_by_its_place() -> None:
    batch = collate(
        [EncodedSample((1, 2, 4), (NO_LOSS, 2, 4)), EncodedSample((3,), (3,)), EncodedSample((5, 6), (NO_LOSS, 6))],
        9,
        "cpu",
    )

    assert (batch.at_S.tolist(), batch.label_S.tolist(), batch.place_S.tolist()) == ([0, 1, 6], [2, 4, 6], [1, 2, 1])
    assert batch.on_grid(torch.tensor([1.0, 2.0, 3.0])).tolist() == [[1, 2], [0, 0], [3, 0]]


def test_a_gpu_is_sent_pinned_memory_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []

    def note_pinning(tensor: torch.Tensor) -> torch.Tensor:
        told.append("pinned")
        return tensor

    def note_move(tensor: torch.Tensor, *asked: object, **more: object) -> torch.Tensor:
        told.append((str(asked[0]), more))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", note_pinning)
    monkeypatch.setattr(torch.Tensor, "to", note_move)

    to_device([1, 2], "cuda")
    assert told == ["pinned", ("cuda", {"non_blocking": True})]
    told.clear()
    assert to_device([1, 2], "cpu").tolist() == [1, 2]
    assert told == [("cpu", {})]


def test_an_order_is_a_permutation_that_depends_on_seed_and_epoch() -> None:
    assert sorted(order(1, 0, 50)) == list(range(50))
    assert order(1, 0, 50) == order(1, 0, 50)
    assert len({tuple(order(seed, epoch, 50)) for seed in (1, 2) for epoch in (0, 1)}) == 4


def test_drawing_an_order_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    order(1, 0, 50)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_epoch_of_batches_holds_every_row_once() -> None:
    cut = batches(3, 1, [5] * 21, 4)

    assert sorted(row for batch in cut for row in batch) == list(range(21))
    assert sorted(len(batch) for batch in cut) == [1, 4, 4, 4, 4, 4]


def test_batches_are_grouped_by_length() -> None:
    lengths = [10, 100] * 16
    mixed = sum(len({lengths[row] for row in batch}) > 1 for batch in batches(0, 0, lengths, 4))
    assert mixed <= 2
