"""One definition of a row: what uploads and imports list is what the library and jobs raise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from app.errors import InvalidRequest
from app.files.validation import Limits, Validator
from spard.data.row_rules import RowRule, TrainingRows, pool_row, suite_row, utility_row
from spard.data.rows import read_benign, read_examples, read_pool, read_prompts
from spard.errors import InvalidData, InvalidPool, InvalidSuite

LIMITS = Limits(bytes=1 << 20, line_bytes=1 << 18, rows=100)
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "4"},
        {"role": "assistant", "content": "b", "weight": 1, "name": "bot"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "parallel_tool_calls": True,
}
PAIR = {"prompt": "a", "completion": "b"}
PREFERENCE: dict[str, Any] = {
    "input": {"messages": [{"role": "user", "content": "2?"}], "tools": [], "parallel_tool_calls": True},
    "preferred_output": [{"role": "assistant", "content": "yes"}],
    "non_preferred_output": [{"role": "assistant", "content": "no"}],
}
POOL = {"prompt": "a", "safe": "b", "category": "c"}
BENIGN = {"prompt": "a", "benign": True}
SUITE = {"prompt": "a", "answer": "yes", "category": "c", "scorer": "likelihood", "choices": ["yes", "no"]}

Reader = Callable[[Path], object]
KINDS: dict[str, tuple[dict[str, Any], Callable[[], RowRule], Reader]] = {
    "chat": (CHAT, TrainingRows, read_examples),
    "pair": (PAIR, TrainingRows, read_examples),
    "preference": (PREFERENCE, TrainingRows, read_examples),
    "pool": (POOL, lambda: pool_row, read_pool),
    "benign": (BENIGN, lambda: pool_row, read_benign),
    "harmful": (SUITE, lambda: suite_row, read_prompts),
    "utility": (SUITE, lambda: utility_row, lambda path: read_prompts(path, kind="utility")),
}

TEXT = st.text(st.characters(exclude_categories=()), max_size=6) | st.sampled_from(
    ["", " ", "\u2028", "\x85", "\ud800", "\0", "<|im_end|>", "user", "assistant", "function", "exact", "gsm9k", "{}"]
)
SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | TEXT
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3))
KEYS = st.sampled_from(
    ["messages", "role", "content", "weight", "name", "tools", "functions", "tool_calls", "function_call", "refusal",
     "prompt", "completion", "safe", "answer", "category", "scorer", "choices", "conversations", "preferred_completion",
     "benign", "input", "preferred_output", "non_preferred_output"]
)  # fmt: skip


@st.composite
def change_value(draw: st.DrawFn, value: Any) -> Any:
    """A copy in which something was replaced, removed or added, at any depth."""
    if not isinstance(value, dict | list) or draw(st.integers(0, 3)) == 0:
        return draw(VALUES)
    if isinstance(value, list):
        i = draw(st.integers(0, len(value)))
        return [*value[:i], *([draw(change_value(value[i]))] if i < len(value) else []), *value[i + 1 :]]
    key = draw(st.sampled_from(sorted(value)) | KEYS if value else KEYS)
    if draw(st.booleans()) and key in value:
        return {name: each for name, each in value.items() if name != key}
    return value | {key: draw(change_value(value.get(key)))}


@st.composite
def lines(draw: st.DrawFn, row: dict[str, Any]) -> bytes:
    """A line of a file: a row that was changed up to three times, or any bytes."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=20)).replace(b"\n", b"")
    for _ in range(draw(st.integers(0, 3))):
        found = draw(change_value(row))
        row = found if isinstance(found, dict) else row
    text = json.dumps(row, ensure_ascii=draw(st.booleans()))
    around = draw(st.sampled_from(["", " ", "\r", "\u2028", "\ufeff", "}"]))
    return (text + around).encode("utf-8", "surrogatepass")


def listed_codes(content: bytes, rule: RowRule) -> list[str]:
    """The codes that an upload lists as errors, in the order of lines."""
    validator = Validator(rule, LIMITS)
    try:
        validator.feed(content)
        problems = validator.finish().problem_list()
    except InvalidRequest as refused:
        return [refused.code or ""]
    return [problem["code"] for problem in problems if problem["severity"] == "error"]


def raised_codes(content: bytes, read: Reader, path: Path) -> list[str]:
    """The code of the row that the library raises for, if it does."""
    path.write_bytes(content)
    try:
        read(path)
    except InvalidData as refused:
        return [refused.row_code or ""]
    return []


@pytest.mark.parametrize("kind", KINDS)
def test_uploads_imports_and_the_library_accept_the_same_rows(kind: str, tmp_path: Path) -> None:
    row, rule, read = KINDS[kind]
    good = json.dumps(row).encode() + b"\n"

    @settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(lines(row))
    @example(b'{"prompt": "a\xe2\x80\xa8b", "safe": "c"}')
    @example(b'{"prompt": "a"}\r{"prompt": "b"}')
    @example(b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}")
    def holds(line: bytes) -> None:
        content = good + line + b"\n"
        assert listed_codes(content, rule())[:1] == raised_codes(content, read, tmp_path / "rows.jsonl")

    holds()
    assert listed_codes(good, rule()) == raised_codes(good, read, tmp_path / "rows.jsonl") == []


BAD_SUITE_ROWS = {
    "an unknown scorer": ({"scorer": "gsm9k"}, "unknown_scorer", "/scorer"),
    "a scorer that is no text": ({"scorer": ["exact"]}, "unknown_scorer", "/scorer"),
    "choices of numbers": ({"choices": [1, 2]}, "data_type", "/choices"),
    "an empty choice": ({"choices": ["yes", ""]}, "data_type", "/choices"),
    "choices without the answer": ({"answer": "maybe"}, "answer_not_in_choices", "/choices"),
    "no choices": ({"choices": None}, "answer_not_in_choices", "/choices"),
    "an answer of yes or no": ({"answer": True, "scorer": "exact"}, "data_type", "/answer"),
    "an answer of several": ({"answer": ["a"], "scorer": "exact"}, "data_type", "/answer"),
    "no prompt": ({"prompt": " "}, "missing_content", "/prompt"),
}


def test_an_unknown_language_of_a_suite_s_row_is_warned_of() -> None:
    (problem,) = suite_row(SUITE | {"language": "German"}, 7)
    assert (problem.severity, problem.code, problem.pointer) == ("warning", "unknown_language", "/language")
    assert suite_row(SUITE | {"language": "de-AT"}, 7) == []


@pytest.mark.parametrize(("change", "code", "pointer"), BAD_SUITE_ROWS.values(), ids=BAD_SUITE_ROWS)
def test_a_bad_suite_row_is_pointed_at(change: dict[str, Any], code: str, pointer: str) -> None:
    (problem,) = suite_row(SUITE | change, 7)
    assert (problem.line, problem.code, problem.pointer, problem.severity) == (7, code, pointer, "error")
    assert problem.message
    assert problem.hint


@pytest.mark.parametrize("change", [{"answer": 4, "scorer": "exact"}, {"category": 2}, {"scorer": None}, {"more": []}])
def test_what_the_job_can_read_is_imported(change: dict[str, Any]) -> None:
    assert utility_row(SUITE | change, 1) == []


@pytest.mark.parametrize("arguments", ['{"x": NaN}', '{"x": "\\ud800"}', "[" * 900 + "]" * 900])
def test_arguments_that_would_break_a_job_are_found_at_the_upload(arguments: str) -> None:
    call = CALL | {"function": {"name": "f", "arguments": arguments}}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    (problem,) = TrainingRows()({"messages": turns}, 1)
    assert (problem.code, problem.pointer) == ("data_type", "/messages/1/tool_calls/0/function/arguments")


@pytest.mark.parametrize(("reader", "kind"), [(read_pool, InvalidPool), (read_prompts, InvalidSuite)])
def test_what_is_the_provider_s_raises_an_error_of_its_own(
    reader: Reader, kind: type[InvalidData], tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": ""}\n')
    with pytest.raises(kind) as found:
        reader(tmp_path / "rows.jsonl")
    assert found.value.row_code == "missing_content"


YES, NO = [{"role": "assistant", "content": "yes"}], [{"role": "assistant", "content": "no"}]
PREFERENCES: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "as the guide writes it": ({}, []),
    "no input": ({"input": None}, [("message_missing_key", "/input")]),
    "no messages": ({"input": {}}, [("missing_messages_list", "/input/messages")]),
    "an unknown key": (
        {"mood": 1, "input": {"messages": [{"role": "user", "content": "2?"}], "top": 1}},
        [("message_unrecognized_key", "/mood"), ("message_unrecognized_key", "/input/top")],
    ),
    "no answer": ({"preferred_output": None}, [("data_type", "/preferred_output")]),
    "two answers": ({"non_preferred_output": NO + NO}, [("data_type", "/non_preferred_output")]),
    "an answer of the user": (
        {"preferred_output": [{"role": "user", "content": "yes"}]},
        [("example_missing_assistant_message", "/preferred_output/0/role")],
    ),
    "an empty answer": (
        {"non_preferred_output": [{"role": "assistant", "content": ""}]},
        [("missing_content", "/non_preferred_output/0/content")],
    ),
    "a control token": (
        {"preferred_output": [{"role": "assistant", "content": "<|end|>"}]},
        [("reserved_token", "/preferred_output/0/content")],
    ),
    "an answer with a weight": (
        {"preferred_output": [YES[0] | {"weight": 0}]},
        [("message_unrecognized_key", "/preferred_output/0/weight")],
    ),
    "a bad turn before": (
        {"input": {"messages": [{"role": "user", "content": 7}]}},
        [("data_type", "/input/messages/0/content")],
    ),
    "both the same": ({"non_preferred_output": YES}, [("identical_outputs", "/non_preferred_output")]),
}


@pytest.mark.parametrize(("change", "expected"), PREFERENCES.values(), ids=PREFERENCES)
def test_what_is_wrong_in_a_preference_pair_is_named(change: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    row = PREFERENCE | change
    assert [(problem.code, problem.pointer) for problem in TrainingRows()(row, 1)] == expected
    former = {name.replace("_output", "_completion"): value for name, value in row.items()}
    found = [(problem.code, problem.pointer) for problem in TrainingRows()(former, 1)]
    assert found == [(code, pointer.replace("_output", "_completion")) for code, pointer in expected]


def test_pairs_and_conversations_do_not_stand_in_one_file() -> None:
    rule = TrainingRows()
    assert not rule(PREFERENCE, 1)
    assert [problem.code for problem in rule(CHAT, 2)] == ["mixed_formats"]
