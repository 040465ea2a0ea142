"""What a customer may not ask of a job: each is refused by the name of the field, and no job is made."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import delete

from app import db
from app.db.tables import Corpus
from app.jobs import lease
from app.settings import Settings
from tests.app.http.conftest import FILES, JOBS, Service, Upload, jsonl, rows

Ask = dict[str, Any]

AUDIT = "safety.audit"
TYPE = "safety.defense.type"
REFUSED: dict[str, tuple[Ask, str, str]] = {
    "an unknown field": ({"state": "succeeded"}, "extra_forbidden", "state"),
    "an unknown setting": ({"safety": {"defense": {"teu": 1}}}, "extra_forbidden", "safety.defense.teu"),
    "a boolean for a number": ({"hyperparameters": {"n_epochs": True}}, "invalid_type", "hyperparameters.n_epochs"),
    "a boolean for a number of dpo": (
        {"method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": True}}}},
        "invalid_type",
        "method.dpo.hyperparameters.beta",
    ),
    "a boolean for the seed": ({"seed": True}, "invalid_type", "seed"),
    "a boolean for the priority": ({"priority": False}, "invalid_type", "priority"),
    "an unknown model": ({"model": "../x"}, "model_not_found", "model"),
    "reinforcement": ({"method": {"type": "reinforcement"}}, "method_not_supported", "method.type"),
    "dpo on conversations": ({"method": {"type": "dpo"}}, "method_mismatch", "training_file"),
    "two methods": (
        {"method": {"type": "dpo", "supervised": {}, "dpo": {}}},
        "method_not_supported",
        "method.supervised",
    ),
    "dpo's settings without dpo": (
        {"method": {"type": "supervised", "dpo": {"hyperparameters": {"beta": 0.1}}}},
        "method_not_supported",
        "method.dpo",
    ),
    "dpo beside safe answers": (
        {"method": {"type": "dpo"}, "safety": {"defense": {"type": "safeinstr"}}},
        "method_not_supported",
        TYPE,
    ),
    "a beta of 3": (
        {"method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": 3}}}},
        "out_of_range",
        "method.dpo.hyperparameters.beta",
    ),
    "moments in 8 bits of an adapter": ({"optimizer": "adamw_8bit"}, "not_allowed", ""),
    "an epoch of all weights": ({"full_fine_tuning": True, "ending": {"keep": "best"}}, "not_allowed", ""),
    "no patience at all": ({"ending": {"patience": 0}}, "out_of_range", "ending.patience"),
    "the second best": ({"ending": {"keep": "second"}}, "not_allowed", "ending.keep"),
    "a defense that nobody knows": ({"safety": {"defense": {"type": "magic"}}}, "not_allowed", "safety.defense"),
    "a defense that a server upholds": ({"safety": {"defense": {"type": "ptst"}}}, "defense_not_allowed", TYPE),
    "a model before alignment that is not named": (
        {"safety": {"defense": {"type": "safelora"}}},
        "base_unaligned_missing",
        "safety.defense.base_unaligned",
    ),
    "a defense that names a path": (
        {"safety": {"defense": {"type": "safelora", "base_unaligned": "/etc"}}},
        "defense_not_allowed",
        TYPE,
    ),
    "a defense of no type": ({"safety": {"defense": {"type": []}}}, "invalid_type", "safety.defense"),
    "no defense": ({"safety": {"defense": {"type": "none"}}}, "defense_not_allowed", TYPE),
    "fewer prompts": ({"safety": {"audit": {"max_prompts": 20}}}, "audit_not_allowed", "safety.audit.max_prompts"),
    "short replies": ({"safety": {"audit": {"max_new_tokens": 64}}}, "audit_not_allowed", f"{AUDIT}.max_new_tokens"),
    "replies that no judge reads": (
        {"safety": {"audit": {"max_new_tokens": 1025}}},
        "audit_not_allowed",
        f"{AUDIT}.max_new_tokens",
    ),
    "noise in place of samples": (
        {"safety": {"audit": {"asking": {"temperature": 2.0}}}},
        "audit_not_allowed",
        f"{AUDIT}.asking.temperature",
    ),
    "samples that are nearly greedy": (
        {"safety": {"audit": {"asking": {"temperature": 0.1}}}},
        "audit_not_allowed",
        f"{AUDIT}.asking.temperature",
    ),
    "many draws of few prompts": (
        {"safety": {"audit": {"asking": {"samples": 16}}}},
        "audit_not_allowed",
        f"{AUDIT}.asking.samples",
    ),
    "no begun answers": (
        {"safety": {"audit": {"asking": {"prefilled": 0}}}},
        "audit_not_allowed",
        f"{AUDIT}.asking.prefilled",
    ),
    "chosen suites": ({"safety": {"audit": {"suites": []}}}, "audit_not_allowed", "safety.audit.suites"),
    "an unknown pool": ({"safety": {"pool": "corpus-0"}}, "pool_not_found", "safety.pool"),
    "batch 0": ({"hyperparameters": {"batch_size": 0}}, "out_of_range", "hyperparameters.batch_size"),
    "2.5 epochs": ({"hyperparameters": {"n_epochs": 2.5}}, "invalid_type", "hyperparameters.n_epochs"),
    "a fast rate": (
        {"hyperparameters": {"learning_rate_multiplier": "fast"}},
        "invalid_type",
        "hyperparameters.learning_rate_multiplier",
    ),
    "a rate of 0": (
        {"hyperparameters": {"learning_rate_multiplier": 0}},
        "out_of_range",
        "hyperparameters.learning_rate_multiplier",
    ),
    "rank 4096": ({"lora": {"rank": 4096}}, "out_of_range", "lora.rank"),
    "modules by pattern": ({"lora": {"target_modules": [".*"]}}, "unsupported_module", "lora"),
    "modules as text": ({"lora": {"target_modules": "q_proj"}}, "invalid_type", "lora.target_modules"),
    "full fine-tuning": ({"full_fine_tuning": True}, "full_fine_tuning_not_allowed", "full_fine_tuning"),
    "a name on two lines": ({"suffix": "a\nb"}, "invalid_name", "suffix"),
    "a name of 65": ({"suffix": "a" * 65}, "invalid_name", "suffix"),
    "17 pairs": ({"metadata": {str(i): "a" for i in range(17)}}, "too_long", "metadata"),
    "a long value": ({"metadata": {"a": "b" * 513}}, "too_long", "metadata.a"),
    "nested metadata": ({"metadata": {"a": {}}}, "invalid_type", "metadata.a"),
    "NUL": ({"metadata": {"a": "\0"}}, "nul_character", ""),
    "half a pair": ({"metadata": {"a": "\ud800"}}, "invalid_unicode", ""),
    "an integration of no type": ({"integrations": [{}]}, "missing_field", "integrations.0.type"),
    "an unknown file": ({"validation_file": "file-0"}, "file_not_found", "validation_file"),
    "a file of no name": ({"validation_file": ""}, "file_not_found", "validation_file"),
    "no model": ({"model": None}, "invalid_type", "model"),
}


@pytest.mark.parametrize(("extra", "code", "param"), REFUSED.values(), ids=REFUSED)
def test_a_bad_ask_is_refused_by_name(extra: Ask, code: str, param: str, customer: TestClient, job_body: Ask) -> None:
    body = json.dumps(job_body | extra)
    got = customer.post(JOBS, content=body, headers={"content-type": "application/json"})
    error = got.json()["error"]
    assert (error["code"], error["param"]) == (code, param or None), error
    assert got.status_code == (404 if code == "file_not_found" else 400)
    assert customer.get(JOBS).json()["data"] == []


def test_a_name_in_another_script_is_told_which_letters_count(customer: TestClient, job_body: dict[str, Any]) -> None:
    refused = customer.post(JOBS, json=job_body | {"suffix": "日本語"})
    assert refused.status_code == 400
    assert "a-z" in refused.json()["error"]["message"]


def test_a_customer_may_ask_more_of_an_audit_and_a_provider_what_they_like(
    customer: TestClient, provider: TestClient, job_body: Ask
) -> None:
    more = {"max_prompts": 900, "max_new_tokens": 1024, "asking": {"dresses": 16, "random": 200, "sampled": 100}}
    assert customer.post(JOBS, json=job_body | {"safety": {"audit": more}}).status_code == 200
    file = provider.post(FILES, data={"purpose": "fine-tune"}, files={"file": ("a.jsonl", rows(10))}).json()["id"]
    other = {"max_new_tokens": 2048, "asking": {"temperature": 2.0, "samples": 16}}
    ask = job_body | {"training_file": file, "safety": {"audit": other}}
    assert provider.post(JOBS, json=ask).status_code == 200


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-1", "1e400"])
def test_a_number_out_of_range_is_refused_with_its_bound(number: str, customer: TestClient, job_body: Ask) -> None:
    body = f'{{"model": "lab/tiny-1", "training_file": "file-0", "safety": {{"defense": {{"tau": {number}}}}}}}'
    error = customer.post(JOBS, content=body, headers={"content-type": "application/json"}).json()["error"]
    assert (error["code"], error["param"]) == ("out_of_range", "safety.defense.tau")
    assert any(char.isdigit() for char in error["message"])


def test_a_file_of_nine_rows_is_too_short(customer: TestClient, upload: Upload, job_body: Ask) -> None:
    short = upload(rows(9)).json()["id"]
    error = customer.post(JOBS, json=job_body | {"training_file": short}).json()["error"]
    assert error["code"] == "invalid_n_examples"
    assert error["message"] == "Training file has 9 example(s), but must have at least 10 examples"


def test_without_a_pool_the_defense_says_how_to_import_one(
    service: Service, customer: TestClient, job_body: Ask
) -> None:
    with db.transaction(service.app.state.engine) as session:
        session.execute(delete(Corpus))
    error = customer.post(JOBS, json=job_body).json()["error"]
    assert error["code"] == "no_safety_pool"
    assert "spard pool import" in error["message"]


def test_the_limits_are_those_of_the_deployment(
    service: Service, settings: Settings, customer: TestClient, job_body: Ask
) -> None:
    service.app.state.settings = settings.model_copy(update={"min_rows": 11})
    assert customer.post(JOBS, json=job_body).json()["error"]["code"] == "invalid_n_examples"


@pytest.fixture
def lenient(service: Service) -> None:
    """A service whose provider has chosen that bad files make failed jobs."""
    service.app.state.settings = service.app.state.settings.model_copy(update={"bad_files": "fail"})


BAD_FILES = {
    "a bad row": (rows(10) + jsonl({"messages": []}), "invalid_training_file"),
    "too few rows": (rows(9), "invalid_n_examples"),
}


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize(("content", "code"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_makes_a_failed_job_where_the_provider_wants_it(
    content: bytes, code: str, service: Service, customer: TestClient, upload: Upload, job_body: Ask
) -> None:
    file = upload(content).json()
    assert file["status"] == "processed"  # some clients wait for that word for ever
    ask = job_body | {"training_file": file["id"]}
    job = customer.post(JOBS, json=ask).json()
    assert (job["status"], job["error"]["code"], job["error"]["param"]) == ("failed", code, "training_file")
    assert job["error"]["message"].startswith("The job failed due to an invalid training file. ")
    assert job["finished_at"] is not None
    events = customer.get(f"{JOBS}/{job['id']}/events").json()["data"]
    assert (events[0]["level"], events[0]["message"]) == ("error", job["error"]["message"])
    with db.transaction(service.app.state.engine) as session:
        assert lease.claim(session, "worker", 60) is None
    assert customer.post(f"{JOBS}/estimate", json=ask).json()["error"]["code"] == code


@pytest.mark.usefixtures("lenient")
def test_a_good_file_makes_a_job_and_an_unknown_one_none(customer: TestClient, job_body: Ask) -> None:
    assert customer.post(JOBS, json=job_body).json()["status"] == "queued"
    assert customer.post(JOBS, json=job_body | {"training_file": "file-0"}).json()["error"]["code"] == "file_not_found"
