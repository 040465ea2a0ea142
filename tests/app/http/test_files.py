"""Files over HTTP: OpenAI's objects, kept within one project."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from fastapi.testclient import TestClient

from tests.app.http.conftest import FILES, JOBS, Upload, rows


def test_a_good_file_is_openais_object(upload: Upload) -> None:
    file = upload(rows(10)).json()
    assert file.pop("id").startswith("file-")
    assert isinstance(file.pop("created_at"), int)
    assert file == {
        "object": "file",
        "bytes": len(rows(10)),
        "filename": "train.jsonl",
        "purpose": "fine-tune",
        "status": "processed",
    }


def test_the_content_comes_back_byte_by_byte(upload: Upload, customer: TestClient) -> None:
    content = rows(5000)
    file = upload(content).json()
    got = customer.get(f"{FILES}/{file['id']}/content")
    assert got.content == content
    assert got.headers["etag"] == f'"{sha256(content).hexdigest()}"'


def test_the_purpose_may_follow_the_file(customer: TestClient) -> None:
    body = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n' + rows(10) + b"\r\n"
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n--b--\r\n'
    )
    got = customer.post(FILES, content=body, headers={"content-type": "multipart/form-data; boundary=b"})
    assert (got.status_code, got.json()["bytes"]) == (200, len(rows(10)))


def test_a_deleted_file_is_gone_with_its_bytes(upload: Upload, customer: TestClient, tmp_path: Path) -> None:
    file_id = upload(rows(10)).json()["id"]
    assert customer.delete(f"{FILES}/{file_id}").json() == {"id": file_id, "object": "file", "deleted": True}
    assert customer.get(f"{FILES}/{file_id}").status_code == 404
    assert not [path for path in (tmp_path / "objects").rglob("*") if path.is_file()]


def test_a_file_that_a_job_needs_is_not_deleted(customer: TestClient, job_body: dict[str, str]) -> None:
    job = customer.post(JOBS, json=job_body).json()
    got = customer.delete(f"{FILES}/{job_body['training_file']}")
    assert (got.status_code, got.json()["error"]["code"]) == (400, "invalid_state")
    customer.post(f"{JOBS}/{job['id']}/cancel")
    assert customer.delete(f"{FILES}/{job_body['training_file']}").status_code == 200


def test_files_are_listed_newest_first_in_pages(upload: Upload, customer: TestClient) -> None:
    ids = [upload(rows(10)).json()["id"] for _ in range(3)]
    first = customer.get(FILES, params={"limit": 2}).json()
    second = customer.get(FILES, params={"limit": 2, "after": first["last_id"]}).json()
    assert [file["id"] for file in first["data"] + second["data"]] == ids[::-1]
    assert (first["object"], first["has_more"], second["has_more"]) == ("list", True, False)
    assert first["first_id"] == ids[2]


def test_files_can_be_listed_oldest_first(upload: Upload, customer: TestClient) -> None:
    ids = [upload(rows(10)).json()["id"] for _ in range(2)]
    page = customer.get(FILES, params={"order": "asc", "limit": 1}).json()
    rest = customer.get(FILES, params={"order": "asc", "after": page["last_id"]}).json()
    assert [file["id"] for file in page["data"] + rest["data"]] == ids


def test_files_are_listed_by_purpose(upload: Upload, customer: TestClient) -> None:
    upload(rows(10))
    assert len(customer.get(FILES, params={"purpose": "fine-tune"}).json()["data"]) == 1
    assert customer.get(FILES, params={"purpose": "fine-tune-results"}).json()["data"] == []


def test_somebody_elses_file_reads_as_unknown(upload: Upload, stranger: TestClient) -> None:
    file_id = upload(rows(10)).json()["id"]
    for path in (f"{FILES}/{file_id}", f"{FILES}/{file_id}/content", f"{FILES}/{file_id}/validation"):
        theirs, unknown = stranger.get(path), stranger.get(path.replace(file_id, "file-0"))
        assert theirs.status_code == unknown.status_code == 404
        assert theirs.json()["error"]["message"].replace(file_id, "file-0") == unknown.json()["error"]["message"]
    assert stranger.delete(f"{FILES}/{file_id}").status_code == 404
    assert stranger.get(FILES).json()["data"] == []
    assert stranger.get(FILES, params={"after": file_id}).json()["error"]["code"] == "invalid_cursor"


def test_a_file_can_be_told_to_expire(upload: Upload) -> None:
    expiry = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    file = upload(rows(10), **expiry).json()
    assert abs(file["expires_at"] - file["created_at"] - 3600) < 60


def test_an_expiry_out_of_range_is_refused(upload: Upload) -> None:
    got = upload(rows(10), **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "60"})
    assert (got.status_code, got.json()["error"]["code"]) == (400, "out_of_range")


def test_a_part_of_a_file_can_be_asked_for(upload: Upload, customer: TestClient) -> None:
    path = f"{FILES}/{upload(rows(10)).json()['id']}/content"
    got = customer.get(path, headers={"range": "bytes=5-9"})
    assert (got.status_code, got.content) == (206, rows(10)[5:10])
    assert got.headers["content-range"] == f"bytes 5-9/{len(rows(10))}"


def test_the_last_bytes_can_be_asked_for(upload: Upload, customer: TestClient) -> None:
    path = f"{FILES}/{upload(rows(10)).json()['id']}/content"
    assert customer.get(path, headers={"range": "bytes=-7"}).content == rows(10)[-7:]


def test_a_range_beyond_the_end_is_not_satisfiable(upload: Upload, customer: TestClient) -> None:
    path = f"{FILES}/{upload(rows(10)).json()['id']}/content"
    assert customer.get(path, headers={"range": "bytes=99999-"}).status_code == 416


def test_many_ranges_are_answered_by_the_whole(upload: Upload, customer: TestClient) -> None:
    path = f"{FILES}/{upload(rows(10)).json()['id']}/content"
    got = customer.get(path, headers={"range": "bytes=" + "0-0," * 1000 + "1-1"})
    assert (got.status_code, got.content) == (200, rows(10))


def test_a_changed_file_is_sent_whole(upload: Upload, customer: TestClient) -> None:
    path = f"{FILES}/{upload(rows(10)).json()['id']}/content"
    assert customer.get(path, headers={"range": "bytes=0-0", "if-range": '"other"'}).status_code == 200
