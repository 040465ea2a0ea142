"""What a job would take, said before it is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from safetensors.numpy import save_file

from app.db import transaction
from app.db.tables import BaseModelEntry, Corpus, Job
from app.db.tables.jobs import StageCosts
from app.jobs import fleet, lease
from app.jobs.clone import job_request
from app.jobs.needs import Room
from tests.app.http.conftest import JOBS, Service, Upload, chat, jsonl, rows
from tests.app.http.test_results import MODEL, publish
from tests.app.test_needs import LLAMA_8B
from tests.spard.parts import byte_tokenizer

URL = f"{JOBS}/estimate"


def test_an_estimate_counts_steps_as_training_does(customer: TestClient, job_body: dict[str, Any]) -> None:
    ask = job_body | {
        "method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 3, "batch_size": 4}}}
    }
    found = customer.post(URL, json=ask).json()
    assert (found["rows"], found["steps"], found["approximate"]) == (10, 9, True)
    kinds = {name: type(number) for name, number in found["hyperparameters"].items()}
    assert kinds == {"n_epochs": int, "batch_size": int, "learning_rate_multiplier": float}
    assert found["trained_tokens"] == 3 * found["tokens_per_epoch"] == 3 * -(-len(rows(10)) // 4)
    assert (found["safe_examples"], found["estimated_seconds"]) == (64, None)


COSTS: StageCosts = {
    "rows": {"seconds": 1.0, "units": 10},
    "base_audit": {"seconds": 20.0, "units": 100},
    "train": {"seconds": 30.0, "units": 1000},
    "audit": {"seconds": 60.0, "units": 200},
    "package": {"seconds": 5.0, "units": 1},
}


def note(service: Service, costs: StageCosts) -> None:
    """A worker takes the queued job, tells what its stages took, and the job fails."""
    with transaction(service.app.state.engine) as session:
        claim = lease.claim(session, "worker", 60)
        assert claim is not None
        assert lease.update(session, claim, stage_costs=costs)
        assert lease.fail(session, claim, {"code": "non_finite_loss", "message": "No.", "param": None})


def test_time_is_the_sum_of_stages_by_what_jobs_took_that_failed_too(
    service: Service, customer: TestClient, job_body: dict[str, Any], upload: Upload
) -> None:
    assert customer.post(URL, json=job_body).json()["stages"] == []
    customer.post(JOBS, json=job_body)
    note(service, COSTS)
    found = customer.post(URL, json=job_body).json()
    stages = {each["stage"]: each for each in found["stages"]}
    assert found["estimated_seconds"] == round(sum(each["seconds"] for each in found["stages"]))
    assert stages["train"]["seconds"] == pytest.approx(0.03 * found["trained_tokens"], abs=0.1)
    assert stages["audit"] == {"stage": "audit", "seconds": 60.0, "units": 200, "unit": "replies"}
    assert (stages["base_audit"]["units"], stages["package"]["seconds"]) == (0, 5.0)

    other = customer.post(URL, json=job_body | {"training_file": upload(rows(11)).json()["id"]}).json()
    assert next(each["seconds"] for each in other["stages"] if each["stage"] == "rows") == 1.1


@pytest.mark.parametrize(("more", "trained", "replies"), [({}, 57, 10), ({"held_out_rows": 0}, 62, 0)])
def test_rows_that_are_held_out_are_not_trained_on_and_their_requests_are_a_stage(
    service: Service,
    customer: TestClient,
    job_body: dict[str, Any],
    upload: Upload,
    more: Any,
    trained: int,
    replies: int,
) -> None:
    customer.post(JOBS, json=job_body)
    note(service, COSTS)
    numbers = {"hyperparameters": {"n_epochs": 2, "batch_size": 1}}
    ask = job_body | {"training_file": upload(rows(62)).json()["id"]} | numbers | more
    found = customer.post(URL, json=ask).json()
    assert (found["rows"], found["steps"]) == (62, 2 * trained)
    stages = {each["stage"]: each for each in found["stages"]}
    assert stages.get("task", {"units": 0})["units"] == replies


def test_the_first_job_on_a_model_is_estimated_by_the_model_s_trial(
    service: Service, customer: TestClient, job_body: dict[str, Any]
) -> None:
    with transaction(service.app.state.engine) as session:
        entry = session.get_one(BaseModelEntry, job_body["model"])
        entry.rates = {"generated_per_s": 100.0, "reply_tokens": 20.0, "trained_per_s": 1000.0, "load_s": 2.0}
    found = customer.post(URL, json=job_body).json()
    stages = {each["stage"]: each for each in found["stages"]}
    assert stages["train"]["seconds"] == pytest.approx(2.5 * found["trained_tokens"] / 1000, abs=0.1)
    assert stages["audit"]["units"] > 0
    assert stages["audit"]["seconds"] == pytest.approx(0.2 * stages["audit"]["units"], abs=0.1)
    assert stages["start"]["seconds"] == 10.0


@pytest.mark.parametrize(("costs", "step_s"), [(COSTS, None), (COSTS | {"evidence": {"seconds": 40.0, "units": 8}}, 5)])
def test_a_probe_of_the_rows_is_a_stage_by_recent_jobs_or_the_trial(
    service: Service, customer: TestClient, job_body: dict[str, Any], costs: StageCosts, step_s: float | None
) -> None:
    with transaction(service.app.state.engine) as session:
        entry = session.get_one(BaseModelEntry, job_body["model"])
        entry.rates = {"generated_per_s": 100.0, "reply_tokens": 20.0, "trained_per_s": 10.0, "load_s": 2.0}
        facts = {"kind": "benign", "name": "benign", "version": 1, "rows": 9, "bytes": 9, "sha256": "benign"}
        session.add(Corpus(storage_key="corpora/benign", **facts))  # the pool's own suite has only harmful prompts
    customer.post(JOBS, json=job_body)
    note(service, costs)
    assert "evidence" not in [each["stage"] for each in customer.post(URL, json=job_body).json()["stages"]]
    service.app.state.settings = service.app.state.settings.model_copy(update={"probe_steps": 32})
    found = customer.post(URL, json=job_body).json()
    names = [each["stage"] for each in found["stages"]]
    stage = found["stages"][names.index("evidence")]
    assert names.index("base_audit") < names.index("evidence") < names.index("train")
    assert (stage["units"], stage["unit"]) == (32, "steps")
    own_s = 16 * found["tokens_per_epoch"] / found["rows"] / 10
    assert stage["seconds"] == pytest.approx(32 * (step_s or own_s), abs=0.1)
    assert found["seconds_with_longer_audit"] is None
    service.app.state.settings = service.app.state.settings.model_copy(update={"probe_longer_audit": True})
    longer = customer.post(URL, json=job_body).json()
    assert (longer["stages"], longer["estimated_seconds"]) == (found["stages"], found["estimated_seconds"])
    assert longer["seconds_with_longer_audit"] > found["estimated_seconds"] + 30  # 0.2 or 0.3 s for each reply more


def test_a_job_on_top_of_one_s_own_model_is_estimated(
    service: Service, customer: TestClient, job_body: dict[str, Any]
) -> None:
    customer.post(JOBS, json=job_body)
    publish(service, "pass")
    found = customer.post(URL, json=job_body | {"model": MODEL}).json()
    assert (found["model"], found["rows"]) == (MODEL, 10)


def test_nothing_is_queued(customer: TestClient, job_body: dict[str, Any]) -> None:
    assert customer.post(URL, json=job_body).status_code == 200
    assert customer.get(JOBS).json()["data"] == []


def test_what_no_job_may_ask_for_is_refused_alike(customer: TestClient, job_body: dict[str, Any]) -> None:
    ask = job_body | {"model": "gpt-7"}
    answers = [customer.post(url, json=ask).json()["error"] for url in (URL, JOBS)]
    assert answers[0] == answers[1]


def test_graders_are_refused_in_so_many_words(customer: TestClient) -> None:
    for name in ("run", "validate"):
        got = customer.post(f"/v1/fine_tuning/alpha/graders/{name}", json={"grader": {"type": "string_check"}})
        assert (got.status_code, got.json()["error"]["code"]) == (400, "method_not_supported")
        assert got.json()["error"]["message"].endswith("supervised and dpo.")


def test_rows_over_the_limit_are_counted_with_the_model_s_tokenizer(
    customer: TestClient, job_body: dict[str, Any], tmp_path: Path
) -> None:
    unknown = customer.post(URL, json=job_body).json()
    assert (unknown["max_seq_length"], unknown["rows_over_limit"]) == (None, None)

    byte_tokenizer().save_pretrained(tmp_path / "model")
    found = customer.post(URL, json=job_body).json()
    assert (found["max_seq_length"], found["rows_over_limit"]) == (2048, 0)

    path = f"/v1/files/{job_body['training_file']}/validation"
    longest = customer.get(path, params={"model": "lab/tiny-1"}).json()["tokens"]["max"]
    found = customer.post(URL, json=job_body | {"max_seq_length": longest - 1}).json()
    assert found["max_seq_length"] == longest - 1
    count = found["rows_over_limit"]
    assert 1 <= count <= 10
    kind = "1 row is" if count == 1 else f"{count} rows are"
    assert found["warnings"] == [f"{kind} longer than {longest - 1} tokens; a job fails on such a row."]


def test_tokens_and_time_are_by_the_model_s_tokenizer_where_it_is_at_hand(
    service: Service, customer: TestClient, job_body: dict[str, Any], tmp_path: Path
) -> None:
    guessed = customer.post(URL, json=job_body).json()
    byte_tokenizer().save_pretrained(tmp_path / "model")
    path = f"/v1/files/{job_body['training_file']}/validation"
    tokens = customer.get(path, params={"model": "lab/tiny-1"}).json()["tokens"]["total"]
    assert guessed["tokens_per_epoch"] != tokens

    customer.post(JOBS, json=job_body)
    note(service, COSTS)
    found = customer.post(URL, json=job_body).json()
    trained = tokens * found["hyperparameters"]["n_epochs"]
    assert [found[name] for name in ("tokens_per_epoch", "trained_tokens")] == [tokens, trained]
    assert next(each["units"] for each in found["stages"] if each["stage"] == "train") == trained


def test_rows_that_the_chat_template_leaves_out_are_warned_of(
    customer: TestClient, job_body: dict[str, Any], upload: Upload, tmp_path: Path
) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.content != 'lost' %}{{ m.role }}:{{ m.content }} {% endif %}{% endfor %}"
    )
    file_id = upload(rows(10) + jsonl(chat("a", "lost"))).json()["id"]
    found = customer.post(URL, json=job_body | {"training_file": file_id}).json()
    why = "refused or left out in part by the model's chat template"
    assert found["warnings"] == [f"1 row is {why}; a job fails on such a row."]


def test_a_tokenizer_that_cannot_be_read_leaves_the_rest_of_the_estimate(
    customer: TestClient, job_body: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "model" / "tokenizer.json").write_text('{"version": "9"}')
    found = customer.post(URL, json=job_body).json()
    assert (found["rows"], found["rows_over_limit"]) == (10, None)


def test_memory_is_at_least_that_of_the_weights(
    provider_with_model: TestClient, customer: TestClient, job_body: dict[str, Any], tmp_path: Path
) -> None:
    assert customer.post(URL, json=job_body).json()["memory_bytes_at_least"] is None
    weights = {"a.weight": np.zeros((10, 20), np.float32), "a.bias": np.zeros(10, np.float32)}
    save_file(weights, tmp_path / "model" / "model.safetensors")
    save_file(weights, tmp_path / "model" / "consolidated.safetensors")
    assert customer.post(URL, json=job_body).json()["memory_bytes_at_least"] == 2 * 210

    parts = {name: f"model-{name}.safetensors" for name in weights}
    for name, part in parts.items():
        save_file({name: weights[name]}, tmp_path / "model" / part)
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    entry = {"alias": "lab/tiny-1", "source": str(tmp_path / "model"), "allow_full_fine_tuning": True}
    assert provider_with_model.post("/v1/admin/models", json=entry).status_code == 200
    found = customer.post(URL, json=job_body | {"full_fine_tuning": True}).json()
    assert found["memory_bytes_at_least"] == 4 * 2 * 210
    found = customer.post(URL, json=job_body | {"full_fine_tuning": True, "optimizer": "adamw_8bit"}).json()
    assert found["memory_bytes_at_least"] == 2 * 2 * 210 + 2 * (210 + 4)  # a scale for up to 256 moments


def test_moments_in_8_bits_need_less_of_a_gpu_and_stand_in_plan_and_job(
    service: Service, provider_with_model: TestClient, customer: TestClient, job_body: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA_8B))
    entry = {"alias": "lab/tiny-1", "source": str(tmp_path / "model"), "allow_full_fine_tuning": True}
    assert provider_with_model.post("/v1/admin/models", json=entry).status_code == 200
    with transaction(service.app.state.engine) as session:
        fleet.note(session, fleet.Presence("large", "gpu-1", "0", [], [], 192 << 30))
    full = job_body | {"full_fine_tuning": True}
    wide, narrow = (customer.post(URL, json=full | {"optimizer": each}).json() for each in ("adamw", "adamw_8bit"))
    assert 40 << 30 < wide["memory_bytes_needed"] - narrow["memory_bytes_needed"] < 60 << 30
    assert narrow["memory_plan"]["optimizer"] == "adamw_8bit"
    assert "moments of AdamW in 8 bits" in narrow["memory_plan"]["text"]
    job_id = customer.post(JOBS, json=full | {"optimizer": "adamw_8bit"}).json()["id"]
    with transaction(service.app.state.engine) as session:
        job = session.get_one(Job, job_id)
        assert dict(job.recipe)["optimizer"] == "adamw_8bit"
        assert job_request(job)["optimizer"] == "adamw_8bit"


def test_the_memory_of_a_job_is_planned_for_the_largest_gpu_that_is_there(
    service: Service, customer: TestClient, job_body: dict[str, Any], tmp_path: Path
) -> None:
    assert customer.post(URL, json=job_body).json()["memory_bytes_needed"] is None
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA_8B))
    found = customer.post(URL, json=job_body).json()
    assert (found["memory_plan"], 16 << 30 < found["memory_bytes_needed"] < 24 << 30) == (None, True)
    with transaction(service.app.state.engine) as session:
        fleet.note(session, fleet.Presence("small", "gpu-1", "0", [], [], 12 << 30))
    plan = customer.post(URL, json=job_body).json()["memory_plan"]
    assert (plan["fits"], plan["memory_bytes"]) == (False, 12 << 30)
    job = customer.post(JOBS, json=job_body).json()
    assert "No worker has the GPU memory for it" in job["safety"]["progress"]["queue_reason"]
    with transaction(service.app.state.engine) as session:
        assert lease.claim(session, "small", 60, room=Room(12 << 30)) is None
        fleet.note(session, fleet.Presence("large", "gpu-2", "0", [], [], 80 << 30))
    plan = customer.post(URL, json=job_body).json()["memory_plan"]
    assert (plan["fits"], plan["ranks"], plan["memory_bytes"]) == (True, 1, 80 << 30)
    assert "of 80.0 GiB GPU memory planned" in plan["text"]
    assert "queue_reason" not in customer.get(f"{JOBS}/{job['id']}").json()["safety"]["progress"]


def test_a_model_in_nf4_is_told_planned_kept_in_the_job_and_refused_where_weights_are_needed(
    service: Service, provider_with_model: TestClient, customer: TestClient, job_body: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA_8B))
    entry = {"alias": "lab/tiny-1", "source": str(tmp_path / "model"), "quantization": "if_needed"}
    assert provider_with_model.post("/v1/admin/models", json=entry).json()["quantization"] == "if_needed"
    with transaction(service.app.state.engine) as session:
        fleet.note(session, fleet.Presence("small", "gpu-1", "0", [], [], 12 << 30))
    found = customer.post(URL, json=job_body).json()
    assert (found["memory_plan"]["fits"], found["memory_plan"]["quantization"]) == (True, "nf4_double")
    assert found["memory_bytes_at_least"] < 8 << 30
    assert any("in NF4, 4 bits a weight" in warning for warning in found["warnings"])
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    with transaction(service.app.state.engine) as session:
        assert dict(session.get_one(Job, job_id).recipe)["quantization"] == "nf4_double"
        fleet.note(session, fleet.Presence("large", "gpu-2", "0", [], [], 80 << 30))
    assert customer.post(URL, json=job_body).json()["memory_plan"]["quantization"] == "none"

    always = entry | {"quantization": "always", "allow_full_fine_tuning": True}
    assert provider_with_model.post("/v1/admin/models", json=always).status_code == 200
    assert customer.post(URL, json=job_body).json()["memory_plan"]["quantization"] == "nf4_double"
    refused = customer.post(URL, json=job_body | {"full_fine_tuning": True})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "full_fine_tuning_not_allowed")
    assert "NF4" in refused.json()["error"]["message"]
