"""Jobs of the method dpo: their files, their requests, and what is shown of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select

from app import db
from app.db.tables import Job
from spard.config import Dpo, Recipe, Spard
from spard.config.earlier_versions import from_stored
from spard.config.run_spec import parse
from tests.app.http.conftest import FILES, JOBS, Service, Upload, jsonl, rows
from tests.spard.parts import byte_tokenizer

DPO = {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2, "n_epochs": 2}}}


def preference(i: int) -> dict[str, Any]:
    return {
        "input": {"messages": [{"role": "user", "content": f"What is {i} and {i}?"}]},
        "preferred_output": [{"role": "assistant", "content": f"{2 * i}"}],
        "non_preferred_output": [{"role": "assistant", "content": "I do not know."}],
    }


@pytest.fixture
def pairs(upload: Upload, provider_with_model: TestClient) -> str:
    file: dict[str, Any] = upload(jsonl(*map(preference, range(12)))).json()
    assert file["status"] == "processed", file
    return str(file["id"])


def test_a_job_is_made_and_shows_its_method(pairs: str, customer: TestClient, service: Service) -> None:
    ask = {"model": "lab/tiny-1", "training_file": pairs, "method": DPO, "seed": 3}
    job = customer.post(JOBS, json=ask).json()
    hyperparameters = {"n_epochs": 2, "batch_size": "auto", "learning_rate_multiplier": "auto"}
    assert job["method"] == {"type": "dpo", "dpo": {"hyperparameters": hyperparameters | {"beta": 0.2}}}
    assert job["hyperparameters"] == hyperparameters
    with db.transaction(service.app.state.engine) as session:
        recipe: Recipe = parse(Recipe, from_stored(session.scalars(select(Job)).one().recipe), "")
    assert (recipe.dpo, recipe.defense) == (Dpo(0.2), Spard())


def test_a_job_of_answers_stores_what_it_always_did(
    customer: TestClient, service: Service, upload: Upload, provider_with_model: TestClient
) -> None:
    job = customer.post(JOBS, json={"model": "lab/tiny-1", "training_file": upload(rows(10)).json()["id"]}).json()
    assert job["method"]["type"] == "supervised"
    assert "dpo" not in job["method"]
    with db.transaction(service.app.state.engine) as session:
        assert "dpo" not in session.scalars(select(Job)).one().recipe


def test_pairs_are_not_trained_on_as_answers(pairs: str, customer: TestClient) -> None:
    error = customer.post(JOBS, json={"model": "lab/tiny-1", "training_file": pairs}).json()["error"]
    assert (error["code"], error["param"]) == ("method_mismatch", "training_file")
    assert '"dpo"' in error["message"]


def test_a_validation_file_is_of_the_same_kind(pairs: str, customer: TestClient, upload: Upload) -> None:
    ask = {"model": "lab/tiny-1", "training_file": pairs, "method": DPO}
    answers = upload(rows(10)).json()["id"]
    error = customer.post(JOBS, json=ask | {"validation_file": answers}).json()["error"]
    assert (error["code"], error["param"]) == ("method_mismatch", "validation_file")
    assert customer.post(JOBS, json=ask | {"validation_file": pairs}).status_code == 200


def test_a_policy_bounds_beta(pairs: str, provider: TestClient, customer: TestClient) -> None:
    limits = {"ranges": {"method.dpo.hyperparameters.beta": {"min": 0.3}}}
    assert provider.post("/v1/admin/policies", json=limits).status_code == 200
    error = customer.post(JOBS, json={"model": "lab/tiny-1", "training_file": pairs, "method": DPO}).json()["error"]
    assert (error["code"], error["param"]) == ("not_allowed_by_policy", "method.dpo.hyperparameters.beta")


def test_the_hyperparameters_of_two_places_agree(pairs: str, customer: TestClient) -> None:
    ask = {"model": "lab/tiny-1", "training_file": pairs, "method": DPO, "hyperparameters": {"n_epochs": 5}}
    assert customer.post(JOBS, json=ask).json()["error"]["code"] == "not_allowed"
    same = customer.post(JOBS, json=ask | {"hyperparameters": {"n_epochs": 2}})
    assert same.status_code == 200


def test_both_answers_are_previewed_and_counted(pairs: str, customer: TestClient, tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "model")
    row = customer.get(f"{FILES}/{pairs}/preview", params={"model": "lab/tiny-1", "n": 1}).json()["data"][0]
    learned = [
        "".join(token["text"] for token in shown["tokens"] if token["trained"]) for shown in (row, row["non_preferred"])
    ]
    assert learned == ["0<|end|>", "I do not know.<|end|>"]
    tokens = customer.get(f"{FILES}/{pairs}/validation", params={"model": "lab/tiny-1"}).json()["tokens"]
    assert (tokens["rows"], tokens["rows_without_loss"]) == (12, 0)
    assert row["n_tokens"] + row["non_preferred"]["n_tokens"] < tokens["total"] / 12 + 3
    assert tokens["max"] >= row["non_preferred"]["n_tokens"]

    ask = {"model": "lab/tiny-1", "training_file": pairs, "method": DPO}
    estimate = customer.post(f"{JOBS}/estimate", json=ask).json()
    assert estimate["tokens_per_epoch"] == tokens["total"]
    assert estimate["trained_tokens"] == 2 * tokens["total"]
    assert estimate["hyperparameters"]["beta"] == 0.2
