"""A mistake of many rows is told once, in the words of the mistake, with its cure: in API, CLI and dashboard."""

# ruff: noqa: F811 - fixtures are asked for by the names that they are imported under

from __future__ import annotations

import json
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app import db
from app.db.tables import File
from tests.app.http.conftest import FILES, Service, Upload, chat, jsonl, rows
from tests.app.http.test_dashboard import SignIn, sign_in, token  # noqa: F401 - a fixture

SHAREGPT = [{"conversations": [{"from": "human", "value": f"{i}?"}, {"from": "gpt", "value": "a"}]} for i in range(60)]
CHATS = [chat(f"What is {i}?") for i in range(60)]


def with_role(role: str, *, of: int = 60) -> bytes:
    wrong = [{"messages": [{"role": role, "content": "a"}, row["messages"][1]]} for row in CHATS]
    return jsonl(*wrong[:of], *CHATS[of:])


def lines(*texts: str) -> bytes:
    return "".join(f"{text}\n" for text in texts).encode()


MISTAKES: dict[str, tuple[bytes, str, str]] = {
    "a comma": (
        lines(*(json.dumps(row) + "," for row in CHATS)),
        "all 60 rows: there is a comma at the end of the row",
        "remove it",
    ),
    "single quotes": (lines(*map(str, CHATS)), "all 60 rows: keys and texts are in single quotes", "json.dumps"),
    "curly quotes": (
        lines(*(json.dumps(row).replace('"', "\u201d") for row in CHATS)),
        "all 60 rows: keys and texts are in curly quotes",
        "straight double quotes",
    ),
    "words of Python": (
        lines(*(json.dumps(row)[:-1] + ', "tools": None}' for row in CHATS)),
        "all 60 rows: None is a word of Python",
        "JSON has null",
    ),
    "two rows on a line": (
        lines(*(json.dumps(row) + " " + json.dumps(row) for row in CHATS)),
        "all 60 rows: there is more than one object on the line",
        "begin a new line",
    ),
    "rows over several lines": (
        lines(*(json.dumps(row, indent=1) for row in CHATS)),
        "the line is no whole JSON object",
        "on one line, without indentation",
    ),
    "a role in capitals": (
        with_role("User"),
        "all 60 rows: unknown role 'User'; did you mean \"user\"?",
        'write "user"',
    ),
    "a role in some rows": (
        with_role("human", of=58),
        "58 of 60 rows, the first at line 1: unknown role 'human'; did you mean \"user\"?",
        'write "user"',
    ),
    "a role with a slip": (with_role("usr"), "all 60 rows: unknown role 'usr'; did you mean \"user\"?", 'write "user"'),
    "a key with a slip": (
        jsonl(*({"mesages": row["messages"]} for row in CHATS)),
        'all 60 rows: unknown key "mesages"; did you mean "messages"?',
        'write "messages"',
    ),
    "another form": (
        jsonl(*SHAREGPT),
        "all 60 rows: the row is in ShareGPT's form; the file can be converted",
        "spard files convert",
    ),
    "a column of another kind": (
        jsonl(*(row | {"reward_model": 1} for row in SHAREGPT)),
        "all 60 rows: the row is in ShareGPT's form, and the column `reward_model` would be lost",
        "--leave-out reward_model",
    ),
    "a column too many": (
        jsonl(*(row | {"reward_model": 1} for row in CHATS)),
        'all 60 rows: unknown key "reward_model"',
        "--leave-out reward_model",
    ),
    "the form of Alpaca": (
        jsonl(*({"instruction": f"{i}?", "input": "", "output": "a"} for i in range(60))),
        "all 60 rows: the row is in Alpaca's form; the file can be converted",
        "spard files convert",
    ),
    "no answer": (
        jsonl(*({"messages": row["messages"][:1]} for row in CHATS)),
        "all 60 rows: no message is from the assistant",
        "add an answer",
    ),
    "an empty answer": (jsonl(*(chat(f"{i}?", "") for i in range(60))), "all 60 rows: content is empty", "remove"),
    "a list in a list": (
        jsonl(*({"messages": [row["messages"]]} for row in CHATS)),
        "all 60 rows: a message must be an object",
        '{"role": "user"',
    ),
}
REFUSED: dict[str, tuple[bytes, str, str]] = {
    "one JSON array": (json.dumps(CHATS).encode(), "Line 1 is not a dictionary", "jq -c '.[]'"),
    "Latin-1": (
        "\n".join('{"ä": 1}' for _ in CHATS).encode("latin-1"),
        "not UTF-8: line 1 has byte 0xe4",
        "Save it as",
    ),
    "a table": (b"prompt,answer\n" + b"a,b\n" * 60, "Line 1 is not a dictionary", "DataFrame.to_json"),
}


@pytest.mark.parametrize(("content", "text", "cure"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_of_many_rows_is_one_finding_with_its_cure(
    content: bytes, text: str, cure: str, upload: Upload, customer: TestClient
) -> None:
    file = upload(content).json()
    assert file["status"] == "error"
    assert text in file["status_details"]
    first, *more = customer.get(f"{FILES}/{file['id']}/validation").json()["findings"]
    assert text in first["text"]
    assert cure in first["hint"]
    assert {each["code"] for each in more} <= {"duplicate_example"}, more


@pytest.mark.parametrize(("content", "text", "cure"), REFUSED.values(), ids=REFUSED)
def test_a_file_that_is_no_json_lines_is_refused_in_one_sentence_with_its_cure(
    content: bytes, text: str, cure: str, upload: Upload
) -> None:
    told = upload(content).json()["error"]["message"]
    assert text in told
    assert cure in told


def test_a_finding_counts_rows_and_names_the_first_lines(upload: Upload, customer: TestClient) -> None:
    bad = {"messages": [{"role": "User", "content": "a"}, {"role": "User", "content": "b"}, CHATS[0]["messages"][1]]}
    file = upload(rows(3) + jsonl(*[bad] * 1500, *CHATS)).json()
    first = customer.get(f"{FILES}/{file['id']}/validation").json()["findings"][0]
    assert (first["code"], first["rows"], first["of"], first["lines"]) == (
        "unrecognized_role",
        1500,
        1563,
        list(range(4, 14)),
    )
    assert first["pointer"] == "/messages/*/role"


def test_one_row_s_mistake_is_told_with_line_and_place(upload: Upload) -> None:
    file = upload(rows(3) + jsonl(chat("a", ""))).json()
    assert file["status_details"].startswith("line 4, /messages/1/content: content is empty: ")


def test_the_same_row_many_times_is_noted(upload: Upload, customer: TestClient) -> None:
    file = upload(jsonl(*[CHATS[0]] * 60)).json()
    assert file["status"] == "processed"
    (found,) = customer.get(f"{FILES}/{file['id']}/validation").json()["findings"]
    assert (found["severity"], found["text"]) == ("warning", "all 60 rows are the same one")


def test_kinds_of_faults_beyond_a_hundred_are_counted_by_code(upload: Upload, customer: TestClient) -> None:
    file = upload(jsonl(*(row | {f"key {i}": 1} for i, row in enumerate(CHATS * 4)))).json()
    found = customer.get(f"{FILES}/{file['id']}/validation").json()["findings"]
    errors = [each for each in found if each["severity"] == "error"]
    assert len(errors) == 101
    assert errors[0]["text"].startswith("140 of 240 rows, the first at line 101: more faults of the kind message_unrec")


def test_a_file_of_an_older_version_has_findings_too(service: Service, upload: Upload, customer: TestClient) -> None:
    file_id = upload(with_role("User")).json()["id"]
    path = f"{FILES}/{file_id}/validation"
    before = customer.get(path).json()["findings"]
    with db.transaction(service.app.state.engine) as session:
        session.get_one(File, file_id).findings = None
    assert customer.get(path).json()["findings"] == [each | {"excerpt": ""} for each in before]


def test_commands_show_each_mistake_once_and_lines_when_asked(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(MISTAKES["a comma"][0])
    code, printed = run("files", "upload", str(path))
    assert (code, printed.count("comma at the end of the row")) == (1, 2)  # in `status_details`, and as a finding
    file_id = json.loads(run("files", "list", "--json")[1])[0]["id"]
    shown = run("files", "show", file_id)[1]
    assert "all 60 rows: there is a comma" in shown
    assert shown.count("invalid_json") == 1
    assert run("files", "show", file_id, "--lines")[1].count("invalid_json") == 61
    assert json.loads(run("files", "show", file_id, "--json")[1])["findings"][0]["rows"] == 60
    path.write_bytes(jsonl(*[CHATS[0]] * 60))
    assert "all 60 rows are the same one" in run("files", "upload", str(path))[1]


def test_commands_convert_and_leave_columns_out(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(jsonl(*(row | {"reward_model": 1, "id": 2, "score": 3} for row in SHAREGPT)))
    run("files", "upload", str(path))
    file_id = json.loads(run("files", "list", "--json")[1])[0]["id"]
    code, printed = run("files", "convert", file_id)
    assert code == 1
    assert "the columns `reward_model`, `score` would be lost" in printed
    assert "--leave-out reward_model --leave-out score" in printed
    code, printed = run("files", "convert", file_id, "--leave-out", "reward_model", "--leave-out", "score", "--json")
    made = json.loads(printed)
    assert (code, made["left_out"], made["file"]["status"]) == (0, ["id", "reward_model", "score"], "processed")


def test_the_page_of_a_file_shows_each_mistake_once_and_converts(
    sign_in: SignIn, provider_with_model: TestClient, upload: Upload, customer: TestClient
) -> None:
    browser = sign_in()
    file_id = upload(jsonl(*(row | {"score": 1} for row in SHAREGPT))).json()["id"]
    page = browser.get(f"/files/{file_id}")
    text = unescape(page.text)
    assert text.count("the column `score` would be lost") == 1
    assert "all 60 rows: " in text
    assert f'action="/files/{file_id}/convert"' in text
    form = {"form_token": token(page)}
    assert browser.post(f"/files/{file_id}/convert", data={"leave_out": "score"}).status_code == 403
    refused = browser.post(f"/files/{file_id}/convert", data=form)
    assert (refused.status_code, "the column `score` would be lost" in unescape(refused.text)) == (400, True)
    made = browser.post(f"/files/{file_id}/convert", data=form | {"leave_out": " score , id"})
    assert "60 rows, ready to be trained on" in made.text
    assert "/convert" not in made.text
    assert len(customer.get(FILES).json()["data"]) == 2


def test_a_file_that_was_parquet_says_so_on_its_page(sign_in: SignIn, upload: Upload) -> None:
    content = json.dumps(CHATS).encode()
    file_id = upload(content, name="rows.json").json()["id"]
    page = sign_in().get(f"/files/{file_id}").text
    assert "the file was one JSON array; its 60 rows are kept as JSON lines" in page
    assert "No row has a fault." in page


def test_a_finding_shows_the_piece_of_the_first_row_that_has_it(
    upload: Upload, customer: TestClient, sign_in: SignIn
) -> None:
    script = {"role": "<script>alert(1)</script>", "content": "secret " * 1000}
    bad = [{"messages": [script, row["messages"][1]]} for row in CHATS[:3]]
    file = upload(rows(3) + jsonl(*bad) + b'{"messages": None}\n').json()
    found = customer.get(f"{FILES}/{file['id']}/validation").json()["findings"]
    first = next(each for each in found if each["rows"] == 3)
    assert first["excerpt"].startswith('{"messages": [{"role": "<script>alert(1)</script>", "content": "secret ')
    assert [each["excerpt"] for each in found if each["lines"] == [7]] == ['{"messages": None}']
    assert all(len(each["excerpt"]) <= 120 for each in found)
    page = sign_in().get(f"/files/{file['id']}").text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<script>alert" not in page
    assert "{&#34;messages&#34;: None}" in page
