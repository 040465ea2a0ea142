"""POST /admin/models reads a folder before its transaction, refuses what files tell, and notes which bytes it saw."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app import db
from app.catalog import fitness
from app.db.tables import Job
from app.files.template_look import FolderLook, inspect_folder
from spard.digests import folder_digest
from spard.models.folder.check import findings
from tests.spard.base_folders import KINDS, Kind, by_files, finding_notes, write_kind
from tests.spard.parts import write_model

MODELS, POLICIES = "/v1/admin/models", "/v1/admin/policies"
TOLD = [each for each in KINDS if each.refusal and "never ends" not in each.name]


@pytest.fixture(autouse=True)
def _looks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is started for a template where nothing is said of one: that takes a second for each folder."""
    given = getattr(request.node, "callspec", None)
    kind = given.params.get("kind") if given else None
    if kind is not None and "template" not in kind.name:
        monkeypatch.setattr(fitness, "inspect_folder", lambda folder, arguments: FolderLook(findings(folder), None))


def offer(provider: TestClient, folder: Path, **more: Any) -> tuple[int, Any]:
    answer = provider.post(MODELS, json={"alias": "tiny", "source": str(folder)} | more)
    return answer.status_code, answer.json()


@pytest.mark.parametrize("kind", TOLD, ids=lambda kind: kind.name)
def test_what_files_tell_is_refused_in_the_same_words(kind: Kind, provider: TestClient, tmp_path: Path) -> None:
    folder = write_kind(kind, tmp_path)
    status, answer = offer(provider, folder)
    if sentence := by_files(folder):
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "invalid_model", "source")
        assert answer["error"]["message"] == f"model cannot be offered: {sentence}."
    elif "template" in kind.name:
        assert (status, answer["error"]["code"]) == (400, "invalid_model")
        assert kind.refusal in answer["error"]["message"]
    else:
        assert status == 200  # only loading tells


def test_the_digest_and_what_the_provider_should_know_are_in_the_answer(provider: TestClient, tmp_path: Path) -> None:
    kind = next(each for each in KINDS if "penalties" in each.name)
    folder = write_kind(kind, tmp_path)
    status, answer = offer(provider, folder)
    assert (status, answer["digest"]) == (200, folder_digest(folder))
    assert finding_notes(folder) in answer["warnings"]
    told = f"sha256:{'0' * 64}"
    assert offer(provider, folder, digest=told)[1]["digest"] == told


def test_a_job_names_the_digest_of_its_base_model(
    provider: TestClient, customer: TestClient, job_body: dict[str, Any]
) -> None:
    job = customer.post("/v1/fine_tuning/jobs", json=job_body).json()["id"]
    (entry,) = provider.get(MODELS).json()["data"]
    with db.read(provider.app.state.engine) as session:  # type: ignore[attr-defined]  # Starlette says less of it
        found = session.get_one(Job, job).spec.model
    assert (found.digest, found.source) == (entry["digest"], entry["source"])
    assert found.digest


@pytest.mark.parametrize("more", [{"allow_full_fine_tuning": True}, {"quantization": "always"}])
def test_stored_weights_are_offered_for_adapters_alone(
    more: dict[str, Any], provider: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitness, "inspect_folder", lambda folder, arguments: FolderLook(findings(folder), None))
    folder = write_kind(next(each for each in KINDS if each.note == "stored in MXFP4"), tmp_path)
    assert offer(provider, folder)[0] == 200
    status, answer = offer(provider, folder, **more)
    assert (status, [answer["error"]["param"]]) == (400, list(more))
    assert "MXFP4" in answer["error"]["message"]


def test_no_transaction_is_open_while_the_files_are_read(
    provider: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, opened = write_kind(KINDS[0], tmp_path), list[str]()
    begun = db.provider_transaction

    def noting(path: Path, arguments: object) -> Any:
        opened.append("files")
        return inspect_folder(path)

    @contextmanager
    def begin(*given: Any) -> Iterator[Any]:
        opened.append("transaction")
        with begun(*given) as session:
            yield session

    monkeypatch.setattr(fitness, "inspect_folder", noting)
    monkeypatch.setattr(db, "provider_transaction", begin)
    assert offer(provider, folder)[0] == 200
    assert opened == ["files", "transaction"]


def test_this_process_reads_no_tokenizer_and_no_template(
    provider: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process does, with limits: whatever a folder holds, the service goes on."""

    def refuse(*given: object, **named: object) -> None:
        raise AssertionError("read in the process of the API")

    for name in ("check.findings", "check.read_vocabulary", "check.read_object", "check.read_template"):
        monkeypatch.setattr(f"spard.models.folder.{name}", refuse)
    monkeypatch.setattr("app.files.tokenizer.Tokenizer", SimpleNamespace(from_file=refuse))
    model = write_model(tmp_path / "tiny")
    answer = provider.post("/v1/admin/models", json={"alias": "lab/own", "source": str(model)})
    assert answer.status_code == 200, answer.text
    assert provider.get("/v1/admin/models/lab/own/fitness").json()["tokenizer"] is True
