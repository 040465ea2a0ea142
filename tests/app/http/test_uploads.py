"""A large file in parts becomes one file, or nothing at all."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from hashlib import md5
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import update

from app import db
from app.db.tables import Upload
from tests.app.http.conftest import FILES, Service, rows

UPLOADS = "/v1/uploads"
CONTENT = rows(30)


def announce(customer: TestClient, **fields: Any) -> Any:
    ask = {"filename": "train.jsonl", "purpose": "fine-tune", "bytes": len(CONTENT), "mime_type": "text/jsonl"}
    return customer.post(UPLOADS, json=ask | fields)


def send(customer: TestClient, upload_id: str, content: bytes) -> Any:
    return customer.post(f"{UPLOADS}/{upload_id}/parts", files={"data": ("upload", content)})


def complete(customer: TestClient, upload_id: str, *part_ids: str, **fields: str) -> Any:
    return customer.post(f"{UPLOADS}/{upload_id}/complete", json={"part_ids": part_ids, **fields})


def stored_files(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "objects").rglob("*") if path.is_file()]


@pytest.fixture
def upload_id(customer: TestClient) -> str:
    upload_id: str = announce(customer).json()["id"]
    return upload_id


@pytest.fixture
def part_ids(customer: TestClient, upload_id: str) -> list[str]:
    """The second half was sent first."""
    second, first = (send(customer, upload_id, piece).json()["id"] for piece in (CONTENT[100:], CONTENT[:100]))
    return [first, second]


def test_an_upload_waits_an_hour_for_its_parts(customer: TestClient) -> None:
    upload = announce(customer).json()
    assert (upload["object"], upload["status"], upload["file"]) == ("upload", "pending", None)
    assert upload["expires_at"] - upload["created_at"] in (3599, 3600)  # whole seconds of two looks at the clock


def test_parts_become_a_file_in_the_order_asked_for(
    customer: TestClient, upload_id: str, part_ids: list[str], tmp_path: Path
) -> None:
    done = complete(customer, upload_id, *part_ids, md5=md5(CONTENT, usedforsecurity=False).hexdigest()).json()
    assert (done["status"], done["file"]["status"]) == ("completed", "processed")
    assert customer.get(f"{FILES}/{done['file']['id']}/content").content == CONTENT
    assert len(stored_files(tmp_path)) == 1


def test_completing_again_gets_the_same_file(customer: TestClient, upload_id: str, part_ids: list[str]) -> None:
    first, again = (complete(customer, upload_id, *part_ids).json() for _ in range(2))
    assert first == again
    assert len(customer.get(FILES).json()["data"]) == 1


def test_a_wrong_digest_leaves_no_file(
    customer: TestClient, upload_id: str, part_ids: list[str], tmp_path: Path
) -> None:
    got = complete(customer, upload_id, *part_ids, md5="0" * 32)
    assert (got.status_code, got.json()["error"]["code"]) == (400, "md5_mismatch")
    assert customer.get(FILES).json()["data"] == []
    assert len(stored_files(tmp_path)) == len(part_ids)


def test_parts_must_have_the_announced_size(customer: TestClient, upload_id: str, part_ids: list[str]) -> None:
    got = complete(customer, upload_id, part_ids[0])
    assert (got.status_code, got.json()["error"]["code"]) == (400, "size_mismatch")


@pytest.mark.parametrize(("named", "code"), [("part_0", "part_not_found"), ("twice", "duplicate_part")])
def test_only_its_own_parts_once_each(
    customer: TestClient, upload_id: str, part_ids: list[str], named: str, code: str
) -> None:
    got = complete(customer, upload_id, *part_ids, part_ids[0] if named == "twice" else named)
    assert (got.status_code, got.json()["error"]["code"]) == (400, code)


def test_bad_rows_are_named_as_in_every_file(customer: TestClient) -> None:
    content = b'{"messages": []}\n' * 10
    upload_id = announce(customer, bytes=len(content)).json()["id"]
    file = complete(customer, upload_id, send(customer, upload_id, content).json()["id"]).json()["file"]
    assert (file["status"], "all 10 rows: " in file["status_details"]) == ("error", True)


def test_a_cancelled_upload_takes_no_parts_and_keeps_no_bytes(
    customer: TestClient, upload_id: str, part_ids: list[str], tmp_path: Path
) -> None:
    assert customer.post(f"{UPLOADS}/{upload_id}/cancel").json()["status"] == "cancelled"
    assert send(customer, upload_id, b"more").json()["error"]["code"] == "invalid_state"
    assert complete(customer, upload_id, *part_ids).json()["error"]["code"] == "invalid_state"
    assert customer.post(f"{UPLOADS}/{upload_id}/cancel").status_code == 400
    assert stored_files(tmp_path) == []


def test_an_expired_upload_is_swept_when_another_begins(
    service: Service, customer: TestClient, upload_id: str, part_ids: list[str], tmp_path: Path
) -> None:
    with db.transaction(service.app.state.engine) as session:
        session.execute(update(Upload).values(expires_at=datetime.now(UTC) - timedelta(seconds=1)))
    assert complete(customer, upload_id, *part_ids).json()["error"]["code"] == "upload_expired"
    announce(customer)
    assert stored_files(tmp_path) == []


def test_somebody_elses_upload_reads_as_unknown(
    stranger: TestClient, customer: TestClient, upload_id: str, part_ids: list[str]
) -> None:
    unknown = stranger.post(f"{UPLOADS}/upload_0/cancel").json()["error"]
    for got in (
        send(stranger, upload_id, b"x"),
        complete(stranger, upload_id, *part_ids),
        stranger.post(f"{UPLOADS}/{upload_id}/cancel"),
    ):
        assert (got.status_code, got.json()["error"]["code"]) == (404, unknown["code"])
    assert complete(customer, upload_id, *part_ids).status_code == 200


def test_parts_of_another_upload_are_unknown(customer: TestClient, part_ids: list[str]) -> None:
    other = announce(customer).json()["id"]
    assert complete(customer, other, *part_ids).json()["error"]["code"] == "part_not_found"


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"bytes": 0}, 400, "out_of_range", "bytes"),
        ({"bytes": 9 << 30}, 413, "file_too_large", "bytes"),
        ({"purpose": "assistants"}, 400, "invalid_purpose", "purpose"),
        ({"filename": "model.zip"}, 400, "unsupported_format", "filename"),
        ({"filename": "a\x00b"}, 400, "nul_character", None),
        ({"mime_type": "jsonl"}, 400, "invalid_value", "mime_type"),
        ({"expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "out_of_range", "expires_after.seconds"),
        ({"surprise": 1}, 400, "extra_forbidden", "surprise"),
    ],
)
def test_what_cannot_become_a_file_is_refused_at_once(
    customer: TestClient, fields: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    got = announce(customer, **fields)
    assert (got.status_code, got.json()["error"]["code"], got.json()["error"]["param"]) == (status, code, param)


def test_a_part_over_64_mb_is_refused_and_not_kept(customer: TestClient, upload_id: str, tmp_path: Path) -> None:
    got = send(customer, upload_id, bytes((64 << 20) + 1))
    assert (got.status_code, got.json()["error"]["code"]) == (413, "part_too_large")
    assert stored_files(tmp_path) == []


def test_parts_cannot_fill_the_storage(customer: TestClient, upload_id: str, tmp_path: Path) -> None:
    sent = [send(customer, upload_id, CONTENT).status_code for _ in range(4)]
    assert sent == [200, 200, 200, 413]
    assert len(stored_files(tmp_path)) == 3


def test_a_part_comes_under_the_name_data(customer: TestClient, upload_id: str) -> None:
    got = customer.post(f"{UPLOADS}/{upload_id}/parts", files={"file": ("upload", b"x")})
    assert (got.status_code, got.json()["error"]["param"]) == (400, "data")
