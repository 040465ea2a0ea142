"""Results as scripts in the wild read them, and what the OpenAPI document says of downloads."""

from __future__ import annotations

from base64 import b64decode

import pytest
from fastapi.testclient import TestClient

from app import db
from app.db.tables import File
from app.settings import Settings
from tests.app.http.conftest import FILES, JOBS, Service, Upload, rows

CSV = b"step,train_loss\n1,0.5\n"


@pytest.fixture
def result(service: Service, customer: TestClient) -> str:
    """A file as a job leaves it."""
    stored = service.app.state.storage.write("jobs/metrics.csv", [CSV])
    facts = {"project_id": "org-customer", "purpose": "fine-tune-results", "status": "processed"}
    file = File(id="file-r", filename="step_metrics.csv", storage_key="jobs/metrics.csv", **facts)
    file.bytes, file.sha256 = stored.bytes, stored.sha256
    with db.transaction(service.app.state.engine) as session:
        session.add(file)
    return f"{FILES}/file-r/content"


def test_the_metrics_are_plain_unless_the_deployment_says_else(
    service: Service, settings: Settings, customer: TestClient, upload: Upload, result: str
) -> None:
    assert customer.get(result).content == CSV
    service.app.state.settings = settings.model_copy(update={"results_csv_base64": True})
    assert b64decode(customer.get(result).text) == CSV
    training = upload(rows(10)).json()["id"]
    assert customer.get(f"{FILES}/{training}/content").content == rows(10)


@pytest.mark.parametrize("path", [f"{FILES}/{{file_id}}/content", f"{JOBS}/{{job_id}}/adapter"])
def test_the_document_names_every_answer_of_a_download(path: str, service: Service) -> None:
    answers = service.app.openapi()["paths"][path]["get"]["responses"]
    assert {"200", "206", "302", "400", "404", "416"} <= answers.keys()
    assert "application/octet-stream" in answers["200"]["content"]
