from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.move_in.ledger import open_read_only
from app.move_in.replies import Ask, Prompt, prompt_id, read_prompts, reply_text, row_prompt, sample
from tests.app.move_in.conftest import Run
from tests.app.move_in.openai_stub import Stub, error, once

OLD = "ft:gpt-old:org:a:ftjob-a"
USER = {"role": "user", "content": "2 and 2?"}
ANSWER = {"role": "assistant", "content": "4"}


def golden(folder: Path) -> list[dict[str, object]]:
    with open_read_only(folder) as ledger:
        return [*ledger.all("golden").values()]


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"messages": [USER, {**ANSWER, "weight": 0}]}, [USER]),
        ({"messages": [USER, ANSWER, USER, ANSWER]}, [USER, ANSWER, USER]),
        ({"messages": [USER, {**ANSWER, "weight": 1}, USER]}, [USER, ANSWER, USER]),
        ({"input": {"messages": [USER]}, "preferred_output": [ANSWER], "non_preferred_output": [ANSWER]}, [USER]),
        ({"prompt": "2 and 2?"}, [USER]),
        ({"prompt": "2 and 2?", "completion": "4"}, None),
        ({"messages": [ANSWER]}, None),
        ({"messages": "hello"}, None),
        ({}, None),
    ],
)
def test_the_prompt_of_a_row_is_all_before_its_last_answer(
    row: dict[str, object], asked: list[dict[str, str]] | None
) -> None:
    found = row_prompt(row, "f:1")
    assert (found and found["messages"]) == asked


def test_tools_ride_along_and_make_another_prompt() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    plain, with_tools = (row_prompt({"messages": [USER, ANSWER], "tools": each}, "f:1") for each in ([], tools))
    assert plain
    assert with_tools
    assert prompt_id(plain) != prompt_id(with_tools)
    ask = Ask("m", "p", {"temperature": 0, "seed": 5}, 2)
    assert ask.body(with_tools)["tools"] == tools
    assert ask.body(plain) == {"model": "m", "messages": [USER], "temperature": 0, "seed": 7}


def test_a_sample_is_the_same_each_time_and_grows_from_itself(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i % 30}?"}) + "\n" for i in range(40)))
    prompts: dict[str, Prompt] = read_prompts(path, "p.jsonl")
    assert len(prompts) == 30
    assert [*sample(prompts, 5)] == [*sample(prompts, 9)][:5]
    assert sample(prompts, 5).keys() != set([*prompts][:5])


def test_calls_of_tools_are_text_whatever_the_order_of_arguments() -> None:
    def call_text(arguments: str) -> str | None:
        call = {"id": "x", "function": {"name": "add", "arguments": arguments}}
        return reply_text({"choices": [{"message": {"content": None, "tool_calls": [call]}}]})

    assert call_text('{"a": 1, "b": 2}') == call_text('{"b":2,"a":1}') != call_text('{"a": 1, "b": 3}')
    assert call_text("no json") == '{"arguments": "no json", "call": "add"}'
    assert reply_text({"choices": []}) is None


def test_replies_are_kept_with_how_they_were_asked(account: Stub, run: Run, folder: Path) -> None:
    account.say = lambda body, n: f"{body['messages'][-1]['content']} {n}"
    run("read")
    code, printed = run("golden", "--replies", "2", "--temperature", "0.5", "--seed", "3", "--max-tokens", "64")
    assert code == 0, printed
    kept = golden(folder)
    assert len(kept) == 8  # 4 prompts of the validation file
    sent = [body for body in account.bodies if body["model"] == OLD]
    assert all((body["temperature"], body["max_completion_tokens"]) == (0.5, 64) for body in sent)
    assert sorted(body["seed"] for body in sent) == [3] * 4 + [4] * 4
    assert {str(each["number"]) for each in kept} == {"0", "1"}
    assert json.loads(run("status", "--json")[1])["moves"][0]["golden"] == "8 of 8"


def test_only_what_is_missing_is_asked(account: Stub, run: Run, folder: Path) -> None:
    run("read")
    account.faults["POST /chat/completions"] = once(*[(500, error("Sorry"), {})] * 2, (429, error("Slow down"), {}))
    assert run("golden", "--replies", "2")[0] == 0
    account.requests.clear()
    assert run("golden", "--replies", "3")[0] == 0
    assert account.count("POST /chat/completions") == 4
    assert run("golden", "--replies", "3")[0] == 0
    assert account.count("POST /chat/completions") == 4


def test_a_user_s_own_prompts(account: Stub, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "Who?"}\n\n{"messages": [{"role": "user", "content": "Why?"}]}\n')
    run("read")
    code, printed = run("golden", "--prompts", str(path), "--model", OLD, "--replies", "1", "--dry-run")
    assert (code, account.count("POST .*")) == (0, 0)
    assert "2 requests" in printed
    assert "at most 1024 tokens out" in printed
    assert run("golden", "--prompts", str(path), "--model", OLD, "--replies", "1")[0] == 0
    assert account.count("POST .*") == 2
    path.write_text('{"prompt": "Who?"}\nWhy?\n')
    assert (
        run("golden", "--prompts", str(path))[1]
        == "spard: own.jsonl, line 2 is no chat: nothing can be asked with it.\n"
    )


def test_a_model_that_is_gone_and_a_prompt_that_is_refused(account: Stub, run: Run, folder: Path) -> None:
    account.add_job("ftjob-d", "file-000")
    account.models.remove(OLD)
    account.faults["POST /chat/completions"] = once((400, error("Flagged"), {}))
    run("read")
    code, printed = run("golden", "--replies", "1", "--at-once", "1", "--model", "ft:gpt-old:org:d:ftjob-d")
    assert (code, "1 requests were refused" in printed) == (1, True)
    code, printed = run("golden", "--replies", "1", "--again")
    assert code == 1
    assert f"{OLD} does not answer: No such chat" in printed
    kept = golden(folder)
    assert len(kept) == 12
    assert not any("refused" in each for each in kept)


def test_a_quota_that_is_used_up_is_not_waited_for(account: Stub, run: Run, waits: list[float]) -> None:
    run("read")
    account.faults["POST /chat/completions"] = lambda: (429, error("No money", "insufficient_quota"), {})
    code, printed = run("golden")
    assert (code, waits) == (1, [])
    assert printed.splitlines()[-1].endswith("the account has no quota left; nothing that was done is lost.")
