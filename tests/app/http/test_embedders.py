"""Which embedder a job gets: of the request, the policy or the base model's entry, and who may name a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select

from app import db
from app.db.tables import Job
from tests.app.http.conftest import JOBS, Service
from tests.spard.encoder_folders import write_encoder

ALIAS = "lab/tiny-1"
MODELS, POLICIES = "/v1/admin/models", "/v1/admin/policies"


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    return write_encoder(tmp_path / "encoders" / "mini")


def offer(provider: TestClient, embedder: str | None) -> Any:
    """Offer the model that jobs name with an embedder of its own."""
    listed = provider.get(MODELS).json()["data"]
    (entry,) = [each for each in listed if each["alias"] == ALIAS]
    body = {name: entry[name] for name in ("alias", "source", "revision")} | {"embedder": embedder}
    return provider.post(MODELS, json=body)


def add_policy(provider: TestClient, embedder: str) -> Any:
    """Add a policy that fixes the embedder."""
    return provider.post(POLICIES, json={"embedder": embedder})


def ask(client: TestClient, asked: dict[str, Any], embedder: str | None) -> Any:
    """Ask for a job that names an embedder, or none."""
    selection = {} if embedder is None else {"embedder": embedder}
    return client.post(JOBS, json=asked | {"safety": {"selection": selection}})


def shown_embedder(got: Any) -> str:
    """Return the embedder that a job shows."""
    assert got.status_code == 200, got.text
    name: str = got.json()["safety"]["selection"].get("embedder", "states")  # left out, as jobs from before have it
    return name


def encoder_source(service: Service) -> str | None:
    """Return where the only job finds its encoder."""
    with db.transaction(service.app.state.engine) as session:
        return session.scalars(select(Job)).one().spec.embedder


def refusal(got: Any) -> tuple[int, str, str]:
    error = got.json()["error"]
    return got.status_code, error["code"], error["param"]


def test_without_a_word_a_job_compares_centered_states(
    provider_with_model: TestClient, customer: TestClient, job_body: dict[str, Any], service: Service
) -> None:
    assert shown_embedder(ask(customer, job_body, None)) == "centered_states"
    assert encoder_source(service) is None


def test_the_base_model_s_entry_names_the_default(
    provider_with_model: TestClient, customer: TestClient, job_body: dict[str, Any], encoder: Path, service: Service
) -> None:
    assert offer(provider_with_model, str(encoder)).json()["embedder"] == str(encoder)
    assert shown_embedder(ask(customer, job_body, None)) == "mini"
    assert encoder_source(service) == str(encoder)


def test_a_customer_names_the_encoder_that_is_offered_by_its_name(
    provider_with_model: TestClient, customer: TestClient, job_body: dict[str, Any], encoder: Path
) -> None:
    offer(provider_with_model, str(encoder))
    assert shown_embedder(ask(customer, job_body, "mini")) == "mini"
    assert shown_embedder(ask(customer, job_body, "states")) == "states"


def test_the_policy_fixes_the_embedder(
    provider_with_model: TestClient, customer: TestClient, job_body: dict[str, Any], encoder: Path
) -> None:
    assert add_policy(provider_with_model, str(encoder)).status_code == 200
    assert shown_embedder(ask(customer, job_body, None)) == "mini"
    assert refusal(ask(customer, job_body, "states")) == (400, "embedder_not_allowed", "safety.selection.embedder")


def test_a_customer_names_no_folder_of_the_provider_s(
    provider_with_model: TestClient, customer: TestClient, job_body: dict[str, Any], encoder: Path
) -> None:
    for named in (str(encoder), "/etc", "mini"):
        got = ask(customer, job_body, named)
        assert refusal(got) == (400, "embedder_not_allowed", "safety.selection.embedder")
        assert "'centered_states'" in got.json()["error"]["message"]


@pytest.mark.parametrize("named", ["/nowhere", "org/name", "~", "org/name@main"])
def test_what_is_no_encoder_is_refused_when_it_is_set(provider_with_model: TestClient, named: str) -> None:
    assert refusal(offer(provider_with_model, named)) == (400, "invalid_embedder", "embedder")
    assert refusal(add_policy(provider_with_model, named)) == (400, "invalid_embedder", "embedder")


def test_a_hub_id_with_its_commit_is_taken(provider_with_model: TestClient) -> None:
    named = f"org/name@{'0' * 40}"
    assert offer(provider_with_model, named).json()["embedder"] == named


def test_an_encoder_with_pickled_weights_is_refused_with_the_reason(
    provider_with_model: TestClient, encoder: Path
) -> None:
    (encoder / "model.safetensors").rename(encoder / "pytorch_model.bin")
    got = offer(provider_with_model, str(encoder))
    assert refusal(got) == (400, "invalid_embedder", "embedder")
    assert "pickled" in got.json()["error"]["message"]
