"""Rows in other forms are converted without a loss, or refused by the name of what would be lost."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spard.data.jsonl import parse_row
from spard.data.other_formats import ColumnsLost, NotConvertible, convert_row, foreign_format
from spard.data.row_rules import TrainingRows

USER = {"role": "user", "content": "q"}
YES, NO = {"role": "assistant", "content": "yes"}, {"role": "assistant", "content": "no"}
HUMAN, GPT = {"from": "human", "value": "q"}, {"from": "gpt", "value": "yes"}
FUNCTION = {"name": "add", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
PAIR = {"input": {"messages": [USER]}, "preferred_output": [YES], "non_preferred_output": [NO]}


def call(number: int, arguments: str) -> dict[str, Any]:
    return {"id": f"call{number:05d}", "type": "function", "function": {"name": "add", "arguments": arguments}}


CONVERTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ShareGPT": ({"conversations": [HUMAN, GPT]}, {"messages": [USER, YES]}),
    "ShareGPT with weights, a system prompt and tools as text": (
        {
            "system": "s",
            "conversations": [HUMAN | {"weight": 0}, GPT | {"weight": 0}, HUMAN, GPT | {"weight": 1}],
            "tools": json.dumps([FUNCTION]),
        },
        {
            "messages": [
                {"role": "system", "content": "s"},
                USER,
                YES | {"weight": 0},
                USER,
                YES | {"weight": 1},
            ],
            "tools": [TOOL],
        },
    ),
    "ShareGPT with roles": ({"conversations": [USER, YES]}, {"messages": [USER, YES]}),
    "one conversation with roles, as LMSYS-Chat has it": ({"conversation": [USER, YES]}, {"messages": [USER, YES]}),
    "ShareGPT with calls, as LLaMA-Factory has them": (
        {
            "conversations": [
                HUMAN,
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                {"from": "observation", "value": "2"},
                GPT,
            ],
            "tools": "",
        },
        {
            "messages": [
                USER,
                {"role": "assistant", "tool_calls": [call(1, '{"a": 1}')]},
                {"role": "tool", "tool_call_id": "call00001", "content": "2"},
                YES,
            ]
        },
    ),
    "a pair in ShareGPT's form": (
        {"conversations": [HUMAN], "chosen": GPT, "rejected": GPT | {"value": "no"}},
        PAIR,
    ),
    "Alpaca": ({"instruction": "q", "output": "yes"}, {"messages": [USER, YES]}),
    "Alpaca with all": (
        {"instruction": "q", "input": "i", "output": "yes", "system": "s", "history": [["q", "no"]]},
        {
            "messages": [
                {"role": "system", "content": "s"},
                USER,
                NO,
                {"role": "user", "content": "q\n\ni"},
                YES,
            ]
        },
    ),
    "a pair in Alpaca's form": ({"instruction": "q", "input": "", "chosen": "yes", "rejected": "no"}, PAIR),
    "TRL's prompt and completion": ({"prompt": [USER], "completion": [YES]}, {"messages": [USER, YES]}),
    "TRL's prompt with an answer, which TRL does not learn": (
        {"prompt": [USER, NO, USER], "completion": [YES]},
        {"messages": [USER, NO | {"weight": 0}, USER, YES]},
    ),
    "TRL's pair with a prompt of turns": ({"prompt": [USER], "chosen": [YES], "rejected": [NO]}, PAIR),
    "TRL's pair of texts": ({"prompt": "q", "chosen": "yes", "rejected": "no"}, PAIR),
    "TRL's pair with the prompt in both": ({"chosen": [USER, YES], "rejected": [USER, NO]}, PAIR),
    "a pair as UltraFeedback has it": (
        {
            "prompt": "q",
            "prompt_id": "1",
            "chosen": [USER, YES],
            "rejected": [USER, NO],
            "messages": [USER, YES],
        },
        PAIR,
    ),
    "a pair with tools": (
        {"prompt": [USER], "chosen": [YES], "rejected": [NO], "tools": [TOOL]},
        PAIR | {"input": {"messages": [USER], "tools": [TOOL]}},
    ),
    "TRL's calls with objects and without ids": (
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
                },
                {"role": "tool", "name": "add", "content": "2"},
                YES,
            ],
            "tools": json.dumps([TOOL]),
        },
        {
            "messages": [
                USER,
                {"role": "assistant", "tool_calls": [call(1, '{"a": 1}')]},
                {"role": "tool", "tool_call_id": "call00001", "name": "add", "content": "2"},
                YES,
            ],
            "tools": [TOOL],
        },
    ),
}


@pytest.mark.parametrize(("row", "expected"), CONVERTED.values(), ids=CONVERTED)
def test_nothing_of_a_row_is_lost(row: dict[str, Any], expected: dict[str, Any]) -> None:
    read = parse_row(json.dumps(row), 1)
    assert foreign_format(read)
    assert convert_row(read).row == expected
    (problem,) = TrainingRows()(read, 1)
    assert "the file can be converted" in problem.message
    assert not TrainingRows()(convert_row(read).row, 1)


def test_labels_are_left_out_and_named() -> None:
    made = convert_row({"id": "1", "source": "s", "conversations": [HUMAN, GPT]})
    assert made.row == {"messages": [USER, YES]}
    assert made.left_out == {"id", "source"}


LOST: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a reward": ({"prompt": "q", "chosen": "yes", "rejected": "no", "reward_model": "x"}, ["reward_model"]),
    "the scores of UltraFeedback": (
        {"prompt": "q", "chosen": [USER, YES], "rejected": [USER, NO], "messages": [USER, YES], "score_chosen": 8.5},
        ["score_chosen"],
    ),
    "the label of KTO": ({"prompt": [USER], "completion": [YES], "label": True}, ["label"]),
    "the whole text of Alpaca's own file": ({"instruction": "q", "output": "yes", "text": "q yes"}, ["text"]),
    "images": ({"conversations": [HUMAN, GPT], "images": ["a.png"]}, ["images"]),
    "messages beside another pair": (
        {"chosen": [USER, YES], "rejected": [USER, NO], "messages": [USER, NO]},
        ["messages"],
    ),
    "two columns of ours": ({"messages": [USER, YES], "score": 1, "quality": 2}, ["quality", "score"]),
}


@pytest.mark.parametrize(("row", "columns"), LOST.values(), ids=LOST)
def test_what_would_be_lost_is_named_and_can_be_left_out(row: dict[str, Any], columns: list[str]) -> None:
    with pytest.raises(ColumnsLost, match=f"`{columns[0]}`") as raised:
        convert_row(row)
    assert raised.value.columns == columns
    problem = TrainingRows()(row, 1)[0]
    assert columns[0] in problem.message
    assert f"--leave-out {columns[0]}" in problem.hint
    made = convert_row(row, columns)
    assert made.left_out == set(columns)
    assert not TrainingRows()(made.row, 1)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown speaker": ({"conversations": [HUMAN | {"from": "observer"}, GPT]}, "'observer'"),
    "no speaker": ({"conversations": [{"value": "q"}]}, '"from" and "value"'),
    "a turn of another field": ({"conversations": [HUMAN, GPT | {"train": False}]}, '"train"'),
    "a weight on a question": ({"conversations": [HUMAN | {"weight": 1}, GPT]}, '"weight" of a turn of the user'),
    "a tool's answer without a call": ({"conversations": [HUMAN, {"from": "tool", "value": "2"}, GPT]}, "no call"),
    "tools that are no JSON": ({"conversations": [HUMAN, GPT], "tools": "[{"}, '"tools" is a text that is no JSON'),
    "one side of a pair": ({"conversations": [HUMAN], "chosen": GPT}, "one is missing"),
    "a pair of texts without a prompt": ({"chosen": "yes", "rejected": "no"}, 'no "prompt"'),
    "a pair that goes on": ({"prompt": [USER], "chosen": [YES, USER, YES], "rejected": [NO]}, "one answer"),
    "a pair with another prompt": (
        {"prompt": "other", "chosen": [USER, YES], "rejected": [USER, NO]},
        '"prompt" is not what',
    ),
    "a prompt alone": ({"prompt": [USER]}, '"completion"'),
    "an answer beside a pair": ({"instruction": "q", "output": "a", "chosen": "yes", "rejected": "no"}, '"output"'),
}


@pytest.mark.parametrize(("row", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_would_need_a_guess_is_refused_with_the_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotConvertible, match=reason):
        convert_row(row)
    (problem,) = TrainingRows()(row, 1)
    assert "can be converted" not in problem.message
    assert reason in problem.message


def test_a_fault_that_a_conversion_keeps_is_told_at_once() -> None:
    (problem,) = TrainingRows()({"conversations": [HUMAN, GPT | {"value": " "}]}, 1)
    assert "converted, it has a fault at /messages/1/content: content is empty" in problem.message


def test_calls_without_ids_get_some_when_the_file_is_converted() -> None:
    unnamed = {key: value for key, value in call(1, "{}").items() if key != "id"}
    row = {"messages": [USER, {"role": "assistant", "tool_calls": [unnamed, call(2, "{}")]}]}
    (problem,) = TrainingRows()(row, 1)
    assert (problem.code, problem.pointer) == ("message_missing_key", "/messages/1/tool_calls/0/id")
    assert "spard files convert" in problem.hint
    assert convert_row(row).row["messages"][1]["tool_calls"] == [call(1, "{}"), call(2, "{}")]


def test_what_cannot_be_converted_in_a_chat_row_keeps_its_own_problem() -> None:
    (problem,) = TrainingRows()({"messages": [USER, YES], "tools": "add"}, 1)
    assert (problem.code, problem.pointer) == ("data_type", "/tools")


def test_rows_in_our_forms_are_no_foreign_ones() -> None:
    for row in (
        {"messages": [USER, YES]},
        {"prompt": "q", "completion": "yes"},
        PAIR,
        {"messages": [USER, YES], "tools": [TOOL]},
    ):
        assert foreign_format(row) is None
        assert convert_row(row).row == row
