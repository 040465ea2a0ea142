"""Parquet, Arrow and JSON arrays are kept as JSON lines, decoded by a process with limits; what cannot be is told."""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from datasets import Dataset
from fastapi.testclient import TestClient
from pyarrow import feather, ipc, parquet

from app.files import tables
from app.settings import Settings
from tests.app.http.conftest import FILES, Service, Upload, chat, jsonl

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": null}'}}
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}},
}
SUB = {
    "type": "function",
    "function": {"name": "sub", "parameters": {"type": "object", "properties": {"b": {"enum": ["x"]}}}},
}
DATES = [datetime(2026, 5, 1), datetime(2025, 12, 24)]
ROWS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "content": f"What is {i}?"},
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "content": "1", "tool_call_id": "c1"},
            {"role": "assistant", "content": "four, caf\u00e9", **({"weight": 1} if i % 2 else {})},
        ],
        "tools": [ADD if i % 2 else SUB],
    }
    for i in range(12)
]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def as_json(path: Path) -> bytes:
    Dataset.from_list(ROWS).to_json(path)
    return path.read_bytes()


def as_parquet(path: Path) -> bytes:
    Dataset.from_list(ROWS).to_parquet(path)
    return path.read_bytes()


def as_parquet_of_mixed_types(path: Path) -> bytes:
    Dataset.from_list(ROWS, on_mixed_types="use_json").to_parquet(path)
    return path.read_bytes()


def as_saved_to_disk(path: Path) -> bytes:
    Dataset.from_list(ROWS).save_to_disk(path)
    return (path / "data-00000-of-00001.arrow").read_bytes()


def as_feather(path: Path) -> bytes:
    feather.write_feather(Dataset.from_list(ROWS).data.table, path)
    return path.read_bytes()


def as_array(path: Path) -> bytes:
    path.write_text(json.dumps(ROWS, indent=1, ensure_ascii=False), encoding="utf-8-sig")
    return path.read_bytes()


WRITERS = {
    "rows.jsonl": as_json,
    "rows.parquet": as_parquet,
    "mixed.parquet": as_parquet_of_mixed_types,
    "saved.arrow": as_saved_to_disk,
    "rows.feather": as_feather,
    "rows.json": as_array,
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_datasets_writes_is_taken_as_it_is(
    name: str, upload: Upload, customer: TestClient, tmp_path: Path
) -> None:
    file = upload(WRITERS[name](tmp_path / "written"), name=name).json()
    assert (file["status"], file["filename"]) == ("processed", f"{Path(name).stem}.jsonl")
    kept = customer.get(f"{FILES}/{file['id']}/content").content
    assert file["bytes"] == len(kept)
    again = upload(kept).json()["id"]
    shared = customer.get(f"{FILES}/{again}/validation", params={"validation_file": upload(jsonl(*ROWS)).json()["id"]})
    assert (shared.json()["rows"], shared.json()["overlap"]["rows"]) == (12, 12)  # the same rows, nulls aside
    found = customer.get(f"{FILES}/{file['id']}/validation").json()["findings"]
    notes = [each["text"] for each in found if each["severity"] == "note"]
    assert [note.endswith("its 12 rows are kept as JSON lines") for note in notes] == [True] * (name != "rows.jsonl")


def table(**columns: Any) -> bytes:
    sink = io.BytesIO()
    parquet.write_table(pa.table(columns), sink)
    return sink.getvalue()


def test_columns_become_the_rows_of_any_form(upload: Upload, customer: TestClient) -> None:
    content = table(
        instruction=["Add."] * 10,
        output=["a"] * 10,
        id=pa.array(range(10)),
        source=DATES * 5,
        rated=pa.array([float("nan")] * 10),
    )
    file = upload(content, name="alpaca.parquet").json()
    assert file["status"] == "error"
    made = customer.post(f"{FILES}/{file['id']}/convert").json()
    assert (made["format"], made["left_out"], made["file"]["status"]) == ("alpaca", ["id", "source"], "processed")


def test_a_pool_and_a_suite_may_be_parquet(provider: TestClient) -> None:
    safe = table(prompt=[f"How do I do harm {i}?" for i in range(100)], safe=["No."] * 100)
    got = provider.post("/v1/admin/pools?name=general", files={"file": ("pool.parquet", safe)})
    assert (got.status_code, got.json()["rows"] + got.json()["held_out"]) == (200, 100)
    asked = table(prompt=["How do I do other harm?", "And more?"], category=["a", None])
    shown = provider.post("/v1/admin/suites/preview?name=red&kind=harmful", files={"file": ("suite.parquet", asked)})
    assert (shown.status_code, shown.json()["rows"]) == (200, 2), shown.text


def stream(batch: pa.RecordBatch) -> bytes:
    sink = io.BytesIO()
    with ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


BAD: dict[str, tuple[bytes, str, int, str]] = {
    "a torso of Parquet": (table(prompt=["a"])[:40], "a.parquet", 400, "it is broken"),
    "a torso of Arrow": (stream(pa.record_batch({"prompt": ["a" * 1000]}))[:-500], "a.arrow", 400, "it is broken"),
    "bytes": (table(image=[b"\xff"]), "a.parquet", 400, "the column 'image' holds bytes"),
    "bytes within": (table(a=[{"image": b"\xff"}]), "a.parquet", 400, "the column 'a.image' holds bytes"),
    "dates as answers": (table(completion=DATES), "a.parquet", 400, "'completion' holds values of the type timestamp"),
    "dates within": (table(messages=[[{"content": DATES[0]}]]), "a.parquet", 400, "the column 'messages.content'"),
    "an array that ends early": (b'[{"prompt": "a"', "a.json", 400, "entry 1 cannot be read"),
    "an array without a comma": (b'[{"a": 1} {"a": 2}]', "a.json", 400, "expected ',', found '{'"),
    "an array and more": (b"[] {}", "a.json", 400, "something follows"),
    "an array that is not UTF-8": (b'[{"a": "\xff"}]', "a.json", 400, "it is not UTF-8"),
    "no row": (table(prompt=pa.array([], pa.string())), "a.parquet", 400, "The file is empty"),
}


@pytest.mark.parametrize(("content", "name", "status", "reason"), BAD.values(), ids=BAD)
def test_what_cannot_be_decoded_is_told_and_not_kept(
    content: bytes, name: str, status: int, reason: str, upload: Upload, customer: TestClient, tmp_path: Path
) -> None:
    got = upload(content, name=name)
    assert (got.status_code, reason in got.json()["error"]["message"]) == (status, True), got.text
    assert got.json()["error"]["param"] == "file"
    assert customer.get(FILES).json()["data"] == []
    assert not [path for path in (tmp_path / "objects").rglob("*") if path.is_file()]


def test_offsets_that_lie_do_not_reach_the_service(upload: Upload) -> None:
    batch = pa.record_batch({"prompt": ["abcd", "efgh"]})
    offsets = b"\0\0\0\0\4\0\0\0\x08\0\0\0"
    content = stream(batch)
    assert offsets in content
    got = upload(content.replace(offsets, b"\0\0\0\0\4\0\0\0\xff\xff\xff\x7f"), name="a.arrow")
    assert got.status_code == 400, got.text


def test_a_small_file_of_very_many_bytes_ends_at_the_limit_of_a_file(
    settings: Settings, service: Service, upload: Upload
) -> None:
    service.app.state.settings = settings.model_copy(update={"max_upload_mb": 2})
    content = table(prompt=pa.array(["a" * 100_000] * 2000).dictionary_encode())
    assert len(content) < 20_000
    got = upload(content, name="bomb.parquet")
    assert (got.status_code, got.json()["error"]["code"]) == (413, "file_too_large")


def test_a_value_that_needs_more_memory_than_allowed_ends_the_process_alone(
    upload: Upload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_MEMORY_BYTES", 512 << 20)
    sink = io.BytesIO()
    options: dict[str, Any] = {"compression": "zstd", "use_dictionary": False, "write_statistics": False}
    parquet.write_table(pa.table({"prompt": ["a" * (200 << 20)]}), sink, **options)  # decoded in one piece
    assert len(sink.getvalue()) < 1 << 20
    got = upload(sink.getvalue(), name="bomb.parquet")
    assert (got.status_code, got.json()["error"]["code"]) == (413, "file_too_large")
    assert "more than 512 MiB of memory" in got.json()["error"]["message"]
    assert upload(table(prompt=["a"], completion=["b"]), name="good.parquet").status_code == 200


def test_the_process_has_limits_and_none_of_our_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARD_ADMIN_KEY", "sk-spard-secret")
    seen: list[str] = []
    start = subprocess.Popen

    def start_and_note(command: list[str], **options: Any) -> Any:
        seen.extend([*command, *options["env"], *options["env"].values()])
        return start(command, **options)

    monkeypatch.setattr(subprocess, "Popen", start_and_note)
    lines = tables.read_lines([table(prompt=["a"])], "a.parquet", 1 << 20, 1 << 20)
    assert b"".join(lines.chunks) == b'{"prompt": "a"}\n'
    assert "app.files.table_reader" in seen
    assert "sk-spard-secret" not in seen


def test_a_file_that_nobody_reads_on_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    start = subprocess.Popen

    def start_and_note(*command: Any, **options: Any) -> Any:
        started.append(start(*command, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start_and_note)
    lines = tables.read_lines([table(prompt=["a" * 1000] * 100_000)], "a.parquet", 1 << 30, 1 << 20)
    next(lines.chunks)
    lines.chunks.close()  # type: ignore[attr-defined]
    assert started[0].returncode is not None
    assert tables._AT_ONCE.acquire(blocking=False)
    tables._AT_ONCE.release()


def test_a_file_sent_in_parts_is_decoded_too(customer: TestClient) -> None:
    content = table(prompt=[f"{i}?" for i in range(10)], completion=["b"] * 10)
    ask = {"filename": "rows.parquet", "purpose": "fine-tune", "bytes": len(content), "mime_type": "text/jsonl"}
    upload_id = customer.post("/v1/uploads", json=ask).json()["id"]
    part = customer.post(f"/v1/uploads/{upload_id}/parts", files={"data": ("p", content)}).json()["id"]
    file = customer.post(f"/v1/uploads/{upload_id}/complete", json={"part_ids": [part]}).json()["file"]
    assert (file["status"], file["filename"]) == ("processed", "rows.jsonl")


def test_an_array_under_a_name_of_lines_keeps_openai_s_sentence_and_says_the_cure(upload: Upload) -> None:
    error = upload(json.dumps([chat("a")]).encode()).json()["error"]
    assert error["code"] is None
    assert error["message"].startswith("Expected file to have JSONL format, where every line is a JSON dictionary.")
    assert "one object a line" in error["message"]
    assert ".json" in error["message"]


def test_an_entry_that_no_row_may_hold_is_named_by_its_line(upload: Upload, customer: TestClient) -> None:
    content = (
        b'[\n{"prompt": "a",\n "completion": "b"},\n{"prompt": "a", "prompt":\r\n "\xe2\x80\xa8", "completion": NaN}]'
    )
    file = upload(content, name="rows.json").json()
    problems = customer.get(f"{FILES}/{file['id']}/validation").json()["problems"]
    assert [(each["line"], each["code"]) for each in problems] == [(2, "non_finite_number")]
