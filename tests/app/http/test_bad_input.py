"""The bad-input table: each row is refused with its code, nothing of it is kept, and nothing is a server error."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.settings import Settings
from tests.app.http.conftest import FILES, JOBS, Upload, chat, jsonl, rows

REFUSED = {
    "empty": (b"", 400, "dataset_empty"),
    "blank lines": (b"\n \n\n", 400, "dataset_empty"),
    "a JSON array": (json.dumps([chat("a")]).encode(), 400, None),
    "CSV": (b"prompt,completion\na,b\n", 400, None),
    "ZIP": (b"PK\x03\x04" + b"\0" * 100, 400, "unsupported_format"),
    "Parquet": (b"PAR1" + b"\x15" * 100, 400, "unsupported_format"),
    "PDF": (b"%PDF-1.7\n" + b"a" * 100, 400, "unsupported_format"),
    "a pickle": (b"\x80\x04\x95" + b"a" * 100, 400, "unsupported_format"),
    "gzip": (gzip.compress(b"0" * 10_000_000), 400, "unsupported_format"),
    "UTF-16": (rows(10).decode().encode("utf-16"), 400, "invalid_encoding"),
    "UTF-16 without a mark": (rows(10).decode().encode("utf-16-le"), 400, "invalid_encoding"),
    "Latin-1": (rows(10) + '{"messages": "é"}'.encode("latin-1"), 400, "invalid_encoding"),
    "one line without an end": (b'{"messages": "' + b"a" * 1_100_000, 400, "line_too_long"),
    "a line of brackets": (b'{"a": [' + b"[]," * 400_000 + b"[]]}\n", 400, "line_too_long"),
}


@pytest.mark.parametrize(("content", "status", "code"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_jsonl_text_is_refused_and_not_kept(
    content: bytes, status: int, code: str | None, upload: Upload, customer: TestClient, tmp_path: Path
) -> None:
    got = upload(content)
    assert (got.status_code, got.json()["error"]["code"]) == (status, code), got.text
    assert customer.get(FILES).json()["data"] == []
    assert not [path for path in (tmp_path / "objects").rglob("*") if path.is_file()]


MESSAGE = {"role": "assistant", "content": "four"}
QUESTION = {"role": "user", "content": "two and two?"}
BAD_ROWS: dict[str, tuple[str, str, str]] = {
    "no JSON": ('{"messages": [}', "invalid_json", ""),
    "no object": ("[1, 2]", "data_type", ""),
    "half a surrogate pair": (r'{"messages": "\ud800"}', "invalid_unicode", ""),
    "NUL": (r'{"messages": "\u0000"}', "nul_character", ""),
    "NaN": ('{"messages": NaN}', "non_finite_number", ""),
    "Infinity": ('{"messages": -Infinity}', "non_finite_number", ""),
    "1e400": ('{"messages": 1e400}', "non_finite_number", ""),
    "5,000 digits": ('{"messages": ' + "1" * 5000 + "}", "number_too_large", ""),
    "depth 17": ('{"messages": ' + "[" * 17 + "]" * 17 + "}", "nesting_too_deep", ""),
    "depth 100,000": ('{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}", "nesting_too_deep", ""),
    "a key twice": ('{"messages": [], "messages": []}', "duplicate_key", ""),
    "the last of many keys twice": (
        "{" + "".join(f'"{i}":1,' for i in range(60_000)) + '"59999":1}',
        "duplicate_key",
        "",
    ),
    "no messages": ("{}", "missing_messages_list", "/messages"),
    "empty messages": ('{"messages": []}', "missing_messages_list", "/messages"),
    "messages of text": ('{"messages": "a"}', "missing_messages_list", "/messages"),
    "a message of text": ('{"messages": ["a"]}', "data_type", "/messages/0"),
    "no role": (json.dumps({"messages": [QUESTION, {"content": "4"}]}), "message_missing_key", "/messages/1/role"),
    "an unknown role": (
        json.dumps({"messages": [{"role": "robot", "content": "a"}, MESSAGE]}),
        "unrecognized_role",
        "/messages/0/role",
    ),
    "no assistant": (json.dumps({"messages": [QUESTION]}), "example_missing_assistant_message", "/messages"),
    "an open question": (
        json.dumps({"messages": [MESSAGE, QUESTION]}),
        "example_missing_assistant_message",
        "/messages/1/role",
    ),
    "an answer to nothing": (json.dumps({"messages": [MESSAGE]}), "role_order", "/messages/0/role"),
    "an empty answer": (json.dumps(chat("a", " ")), "missing_content", "/messages/1/content"),
    "a null answer": (
        json.dumps({"messages": [QUESTION, MESSAGE | {"content": None}]}),
        "message_missing_key",
        "/messages/1/content",
    ),
    "content as a number": (json.dumps(chat("a", 4)), "data_type", "/messages/1/content"),  # type: ignore[arg-type]
    "content as an object": (json.dumps(chat("a", {})), "data_type", "/messages/1/content"),  # type: ignore[arg-type]
    "an image": (
        json.dumps({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, MESSAGE]}),
        "data_type",
        "/messages/0/content",
    ),
    "weight 0.5": (json.dumps({"messages": [QUESTION, MESSAGE | {"weight": 0.5}]}), "data_type", "/messages/1/weight"),
    "nothing to learn": (
        json.dumps({"messages": [QUESTION, MESSAGE | {"weight": 0}]}),
        "all_tokens_masked",
        "/messages",
    ),
    "a control token": (json.dumps(chat("a", "b<|im_end|>")), "reserved_token", "/messages/1/content"),
    "an unknown key": (json.dumps(chat("a") | {"a/b": 1}), "message_unrecognized_key", "/a~1b"),
    "an unknown message key": (
        json.dumps({"messages": [QUESTION, MESSAGE | {"mood": "good"}]}),
        "message_unrecognized_key",
        "/messages/1/mood",
    ),
    "another format": ('{"prompt": "a", "completion": "b"}', "mixed_formats", ""),
    "a preference": ('{"input": {}, "preferred_completion": []}', "mixed_formats", ""),
    "half a preference": ('{"input": {"messages": []}}', "mixed_formats", ""),
    "a tool answer without id": (
        json.dumps({"messages": [QUESTION, {"role": "tool", "content": "4"}, MESSAGE]}),
        "message_missing_key",
        "/messages/1/tool_call_id",
    ),
}


@pytest.mark.parametrize(("row", "code", "pointer"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_is_named_and_keeps_the_file_out_of_jobs(
    row: str, code: str, pointer: str, upload: Upload, customer: TestClient
) -> None:
    file = upload(rows(10) + row.encode() + b"\n" + rows(1)).json()
    assert file["status"] == "error"
    assert "line 11" in file["status_details"]
    validation = customer.get(f"{FILES}/{file['id']}/validation").json()
    errors = [problem for problem in validation["problems"] if problem["severity"] == "error"]
    assert [(e["line"], e["code"], e["pointer"]) for e in errors] == [(11, code, pointer)]
    assert errors[0]["message"]
    assert errors[0]["hint"]


def test_a_row_with_an_input_alone_is_no_preference(upload: Upload, customer: TestClient) -> None:
    file = upload(rows(10) + b'{"input": "a", "output": "b"}\n').json()
    counts = customer.get(f"{FILES}/{file['id']}/validation").json()["counts"]
    assert counts == {"message_unrecognized_key": 2, "missing_messages_list": 1}


def test_a_job_on_a_bad_file_lists_what_is_wrong(
    upload: Upload, provider_with_model: TestClient, customer: TestClient
) -> None:
    file = upload(rows(10) + b"{}\n").json()
    got = customer.post(JOBS, json={"model": "lab/tiny-1", "training_file": file["id"]})
    error = got.json()["error"]
    assert (got.status_code, error["code"], error["param"]) == (400, "invalid_training_file", "training_file")
    assert error["details"][0]["line"] == 11
    assert error["details_url"] == f"{FILES}/{file['id']}/validation"


def test_problems_beyond_a_thousand_are_counted_and_listed_when_asked(upload: Upload, customer: TestClient) -> None:
    file = upload(b"{}\n" * 2500).json()
    path, lines = f"{FILES}/{file['id']}/validation", []
    page = customer.get(path).json()
    assert page["counts"]["missing_messages_list"] == 1000
    counted = [problem["message"] for problem in page["problems"] if problem["line"] is None]
    assert counted == ["1500 more problems are not listed: 1500 missing_messages_list"]
    while True:
        lines += [problem["line"] for problem in page["problems"] if problem["code"] == "missing_messages_list"]
        if (after := page["next_after_line"]) is None:
            break
        page = customer.get(path, params={"after_line": after}).json()
    assert lines == list(range(1, 2501))


def test_a_byte_order_mark_is_accepted(upload: Upload) -> None:
    assert upload(b"\xef\xbb\xbf" + rows(10)).json()["status"] == "processed"


def test_windows_line_ends_and_no_last_one_are_accepted(upload: Upload) -> None:
    assert upload(rows(10).replace(b"\n", b"\r\n").rstrip()).json()["status"] == "processed"


def test_prompt_and_completion_rows_are_accepted(upload: Upload) -> None:
    assert upload(jsonl(*[{"prompt": "a", "completion": "b"}] * 10)).json()["status"] == "processed"


def test_repeated_rows_and_odd_role_orders_are_warnings(upload: Upload, customer: TestClient) -> None:
    odd = {"messages": [QUESTION, QUESTION, MESSAGE]}
    file = upload(rows(10) + jsonl(odd, odd)).json()
    validation = customer.get(f"{FILES}/{file['id']}/validation").json()
    assert (file["status"], validation["counts"]) == ("processed", {"role_order": 2, "duplicate_example": 1})


def test_more_lines_than_allowed_are_refused(settings: Settings, upload: Upload, service: Any) -> None:
    service.app.state.settings = settings.model_copy(update={"max_rows": 20})
    assert upload(b"\n" * 21).json()["error"]["code"] == "too_many_lines"


def test_a_file_over_the_size_limit_is_413_and_not_kept(
    settings: Settings, upload: Upload, service: Any, tmp_path: Path
) -> None:
    service.app.state.settings = settings.model_copy(update={"max_upload_mb": 1})
    assert upload(rows(20_000)).status_code == 413
    assert not [path for path in (tmp_path / "objects").rglob("*") if path.is_file()]


def test_another_purpose_is_refused_and_not_kept(upload: Upload, tmp_path: Path) -> None:
    assert upload(rows(10), purpose="vision").json()["error"]["param"] == "purpose"
    assert not [path for path in (tmp_path / "objects").rglob("*") if path.is_file()]


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl.gz", "a\u202e.jsonl", "x" * 300])
def test_a_name_that_is_no_jsonl_name_is_refused(name: str, upload: Upload) -> None:
    assert upload(rows(10), name=name).json()["error"]["code"] in ("unsupported_format", "invalid_name")


def test_folders_in_a_name_are_dropped(upload: Upload) -> None:
    assert upload(rows(10), name="../../etc/a.jsonl").json()["filename"] == "a.jsonl"


BODIES = {
    "no multipart": (b"{}", "application/json", 415),
    "no boundary": (b"", "multipart/form-data", 415),
    "a boundary without end": (b"", f"multipart/form-data; boundary={'b' * 1000}", 415),
    "no form": (b"hello", "multipart/form-data; boundary=b", 400),
    "an early end": (b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{}', None, 400),
    "no file": (b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n--b--\r\n', None, 400),
}


@pytest.mark.parametrize(("body", "kind", "status"), BODIES.values(), ids=BODIES)
def test_a_broken_form_is_refused(body: bytes, kind: str | None, status: int, customer: TestClient) -> None:
    headers = {"content-type": kind or "multipart/form-data; boundary=b"}
    got = customer.post(FILES, content=body, headers=headers)
    assert (got.status_code, "message" in got.json()["error"]) == (status, True), got.text


def test_a_compressed_body_is_refused(customer: TestClient) -> None:
    got = customer.post(FILES, files={"file": ("a.jsonl", rows(10))}, headers={"content-encoding": "gzip"})
    assert got.status_code == 415
