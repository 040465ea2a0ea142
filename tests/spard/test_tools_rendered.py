"""Tools, calls and their answers are in the text that is trained, or the row is refused: whatever the template."""

from __future__ import annotations

from typing import Any

import pytest

from spard.data.chat import NO_LOSS, PLAIN_TEMPLATE, encode_all, encode_to_train, tool_support
from spard.data.rows import Example, example
from spard.data.tools import used_parts
from spard.errors import ContentNotRendered, InvalidData, ToolsNotRendered
from tests.spard.parts import TEMPLATE, byte_tokenizer

_BEGIN, _END = "<|{{ m.role }}|>", "<|end|>\n"
_ASK = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
_LIST = "{% if tools %}<|system|>{% for t in tools %}{{ t | tojson }}{% endfor %}<|end|>\n{% endif %}"
_ALL = "{% for m in messages %}" + _BEGIN + "{{ m.content }}"
# In the manner of models that are in use: what they write around a call differs, and what they leave out.
JSON_CALLS = (
    _LIST + _ALL + "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    f"{_END}{{% endfor %}}{_ASK}"
)
TAGGED = (
    _LIST + _ALL + "{% for c in m.tool_calls or [] %}<function={{ c.function.name }}>"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>{{ v }}</parameter>{% endfor %}{% endfor %}"
    f"{_END}{{% endfor %}}{_ASK}"
)
ONE_CALL = (
    _LIST + _ALL + "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% endif %}"
    f"{_END}{{% endfor %}}{_ASK}"
)
WORDS_FIRST = (
    _LIST + "{% for m in messages %}" + _BEGIN + "{% if m.content %}{{ m.content }}{% else %}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endif %}"
    f"{_END}{{% endfor %}}{_ASK}"
)
NAMES_ALONE = (
    _LIST
    + _ALL
    + "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    + (f"{_END}{{% endfor %}}{_ASK}")
)
NO_LIST = JSON_CALLS.removeprefix(_LIST)
REFUSES = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + (
    f"{_BEGIN}{{{{ m.content }}}}{_END}{{% endfor %}}{_ASK}"
)
TEXT_ONLY = (
    _ALL
    + "{% for c in m.tool_calls or [] %}{{ 'call ' + c.function.arguments }}{% endfor %}"
    + (f"{_END}{{% endfor %}}{_ASK}")
)


def call(name: str, arguments: str = '{"city": "Żory"}') -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


def row(*turns: dict[str, Any], tools: bool = True) -> dict[str, Any]:
    offered = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("weather", "time")]
    return {"messages": [{"role": "user", "content": "w0?"}, *turns], "tools": offered if tools else []}


SAYS = {"role": "assistant", "content": "It rains."}
CALLS = {"role": "assistant", "content": None, "tool_calls": [call("weather")]}
ANSWERS = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
ROWS = {
    "call": row(CALLS),
    "call without a list": row(CALLS, tools=False),
    "call, answer": row(CALLS, ANSWERS, SAYS),
    "two calls": row(CALLS | {"tool_calls": [call("weather"), call("time", "{}")]}),
    "call with words": row(CALLS | {"content": "Let me look."}),
    "list alone": row(SAYS),
}
ALL, NONE = frozenset(ROWS), frozenset[str]()
TAKES = {
    "json": (JSON_CALLS, ALL),
    "tagged": (TAGGED, ALL),
    "one call": (ONE_CALL, ALL - {"two calls"}),
    "words first": (WORDS_FIRST, ALL - {"call with words"}),
    "names alone": (NAMES_ALONE, frozenset({"list alone"})),
    "no list": (NO_LIST, frozenset({"call without a list"})),
    "refuses": (REFUSES, NONE),
    "arguments as text": (TEXT_ONLY, NONE),
    "no tools": (TEMPLATE, NONE),
    "plain": (PLAIN_TEMPLATE, NONE),
}


def tokenizer(template: str) -> Any:
    made = byte_tokenizer()
    made.chat_template = template
    return made


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("name", TAKES)
def test_what_a_row_calls_is_in_what_is_trained_or_the_row_is_refused(name: str, kind: str) -> None:
    template, taken = TAKES[name]
    asked = example(ROWS[kind], 7)
    if kind not in taken:
        with pytest.raises(InvalidData, match=r"^line 7: the model's chat template"):
            encode_all(tokenizer(template), [asked], 10_000)
        return
    (encoded,) = encode_to_train(tokenizer(template), [asked], 10_000)
    learned = byte_tokenizer().decode([label for label in encoded.labels if label != NO_LOSS])
    for turn in asked.messages:
        for each in turn.get("tool_calls", []):
            assert each["function"]["name"] in learned
            assert all(str(value) in learned for value in each["function"]["arguments"].values())


def test_a_row_that_is_refused_says_which_part_is_left_out() -> None:
    with pytest.raises(ToolsNotRendered, match=r"^line 7: .* leaves out /messages/1/tool_calls/1$") as caught:
        encode_all(tokenizer(ONE_CALL), [example(ROWS["two calls"], 7)], 10_000)
    assert (caught.value.code, caught.value.pointer) == ("tools_not_rendered", "/messages/1/tool_calls/1")


def test_a_call_whose_name_the_question_holds_is_not_taken_for_rendered() -> None:
    asked = example(row(CALLS, tools=False) | {"messages": [{"role": "user", "content": "weather Żory?"}, CALLS]}, 1)
    with pytest.raises(ToolsNotRendered):
        encode_all(tokenizer(TEMPLATE), [asked], 10_000)


@pytest.mark.parametrize(
    ("template", "tools", "tool_calls", "tool"),
    [
        (JSON_CALLS, True, True, True),
        (TAGGED, True, True, True),
        (NAMES_ALONE, True, False, False),
        (NO_LIST, False, True, True),
        (REFUSES, False, False, False),
        (TEXT_ONLY, False, False, False),
        (PLAIN_TEMPLATE, False, False, False),
    ],
)
def test_a_template_is_asked_once_what_it_renders(template: str, tools: bool, tool_calls: bool, tool: bool) -> None:
    assert tool_support(tokenizer(template)) == {"tools": tools, "tool_calls": tool_calls, "tool": tool}


def test_the_parts_that_a_row_has_are_told_in_present_and_former_words() -> None:
    former = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    messages = [former, {"role": "function", "name": "f", "content": "1"}]
    assert used_parts(ROWS["call, answer"]) == used_parts({"messages": messages, "functions": [{}]})
    assert used_parts(ROWS["call, answer"]) == {"tools", "tool_calls", "tool"}
    assert used_parts({"messages": [SAYS]}) == used_parts({"messages": "x", "tools": None}) == set()


BLANKS = {
    "the end alone": "{% if m.content != 'lost' %}{{ m.content }}{% endif %}<|end|>",
    "a line break and the end": "\n{% if m.content != 'lost' %}{{ m.content }}{% endif %}<|end|>",
}


@pytest.mark.parametrize("turn", BLANKS.values(), ids=BLANKS)
def test_a_row_of_which_the_template_leaves_the_end_alone_is_refused(turn: str) -> None:
    template = "{% for m in messages %}" + _BEGIN + turn + "{% endfor %}" + _ASK
    lost = Example(({"role": "user", "content": "?"}, {"role": "assistant", "content": "lost"}), 2)
    with pytest.raises(ContentNotRendered, match=r"^line 2: .* leaves out /messages/1/content$"):
        encode_to_train(tokenizer(template), [lost], 1000)
