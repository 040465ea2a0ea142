"""Jobs over HTTP: OpenAI's object and state rules, what we add, and what each key may ask."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app import db
from app.db.tables import File, Job, JobMetric
from app.jobs import lease
from spard.config import JudgeSpec, Lisa, Lora, SafeGrad, SafeInstr, Selection, Spard
from spard.config.earlier_versions import without_added
from tests.app.http.conftest import FILES, JOBS, Service, jsonl, pool, rows
from tests.app.parts import PUBLICATION

Ask = dict[str, Any]


def as_json(settings: Any) -> Any:
    """Settings as a response shows them: as they are stored, without newer ones at their defaults."""
    shown = without_added({"defense": asdict(settings)})["defense"]
    return json.loads(json.dumps(shown))


def test_a_job_is_openais_object_with_a_defense_by_default(customer: TestClient, job_body: Ask) -> None:
    job = customer.post(JOBS, json=job_body).json()
    hyperparameters = {"n_epochs": "auto", "batch_size": "auto", "learning_rate_multiplier": "auto"}
    assert job.pop("id").startswith("ftjob-")
    assert 0 <= job.pop("seed") < 2**31
    assert isinstance(job.pop("created_at"), int)
    safety = job.pop("safety")
    assert (safety["phase"], safety["gate"], safety["progress"]["queue_position"]) == ("validate", None, 1)
    assert (safety["defense"], safety["selection"]) == (
        as_json(Spard()),
        as_json(Selection(embedder="centered_states")),
    )
    assert job == {
        "object": "fine_tuning.job",
        "started_at": None,
        "finished_at": None,
        "estimated_finish": None,
        "model": job_body["model"],
        "fine_tuned_model": None,
        "organization_id": "org-customer",
        "status": "queued",
        "training_file": job_body["training_file"],
        "validation_file": None,
        "result_files": [],
        "trained_tokens": None,
        "error": None,
        "hyperparameters": hyperparameters,
        "method": {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}},
        "integrations": None,
        "metadata": None,
        "lora": asdict(Lora()),
        "warnings": [],
    }


def test_creation_tells_its_story_in_openais_words(customer: TestClient, job_body: Ask) -> None:
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    events = customer.get(f"{JOBS}/{job_id}/events").json()["data"]
    assert [event["message"] for event in events[::-1]] == [
        f"Created fine-tuning job: {job_id}",
        f"Validating training file: {job_body['training_file']}",
        "Files validated, moving job to queued state",
    ]
    assert {event["object"] for event in events} == {"fine_tuning.job.event"}


def test_events_come_in_pages(customer: TestClient, job_body: Ask) -> None:
    path = f"{JOBS}/{customer.post(JOBS, json=job_body).json()['id']}/events"
    first = customer.get(path, params={"limit": 2}).json()
    rest = customer.get(path, params={"limit": 2, "after": first["data"][-1]["id"]}).json()
    assert (first["has_more"], rest["has_more"], len(rest["data"])) == (True, False, 1)


def test_what_a_job_depends_on_is_frozen(service: Service, customer: TestClient, job_body: Ask) -> None:
    job_id = customer.post(JOBS, json=job_body | {"seed": 7}).json()["id"]
    with db.read(service.app.state.engine) as session:
        job = session.get_one(Job, job_id)
        file = session.get_one(File, job_body["training_file"])
        assert job.spec.training_file.sha256 == file.sha256
        assert job.spec.model.learning_rate == job.recipe["learning_rate"] == 0.002
        assert job.spec.pool is not None
        assert (job.spec.pool.name, job.spec.pool.rows) == ("general", 100)
        assert [suite.name for suite in job.spec.suites] == ["general-heldout"]
        assert (job.recipe["seed"], job.spec.waived, job.spec.judge) == (7, False, "refusal")
        assert job.spec.judge_spec == JudgeSpec()


def test_the_held_out_prompts_yield_to_the_providers_own_attacks(
    service: Service, provider_with_model: TestClient, customer: TestClient, job_body: Ask
) -> None:
    for name, kind in (("attacks", "harmful"), ("chat", "benign")):
        files = {"file": ("s.jsonl", jsonl({"prompt": "a"}))}
        assert provider_with_model.post(f"/v1/admin/suites?name={name}&kind={kind}", files=files).status_code == 200
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    with db.read(service.app.state.engine) as session:
        assert [suite.name for suite in session.get_one(Job, job_id).spec.suites] == ["attacks", "chat"]


def test_the_numbers_asked_for_are_echoed(customer: TestClient, job_body: Ask) -> None:
    asked_for = {"n_epochs": 3, "batch_size": 4, "learning_rate_multiplier": 25.0}
    method = {"type": "supervised", "supervised": {"hyperparameters": asked_for}}
    assert customer.post(JOBS, json=job_body | {"method": method}).json()["hyperparameters"] == asked_for
    assert customer.post(JOBS, json=job_body | {"hyperparameters": asked_for}).json()["hyperparameters"] == asked_for


def test_ours_are_taken_and_shown(customer: TestClient, job_body: Ask) -> None:
    defense = {"type": "spard", "variant": "closed_form", "tau": 0.2, "eta_safe": 5e-5}
    extra = {"safety": {"defense": defense, "selection": {"method": "random", "ratio": 0.1}}, "lora": {"rank": 4}}
    job = customer.post(JOBS, json=job_body | extra).json()
    assert job["safety"]["defense"] == as_json(Spard()) | defense
    assert (job["safety"]["selection"]["ratio"], job["lora"]["rank"]) == (0.1, 4)


@pytest.mark.parametrize(
    "defense", [SafeGrad(rho=2.0), Lisa(task_steps=9), SafeInstr(), Spard(variant="gated")], ids=lambda each: each.type
)
def test_the_baselines_can_be_asked_for(customer: TestClient, job_body: Ask, defense: Any) -> None:
    job = customer.post(JOBS, json=job_body | {"safety": {"defense": asdict(defense)}}).json()
    assert job["safety"]["defense"] == as_json(defense)


def test_validating_on_the_training_file_is_a_warning(customer: TestClient, job_body: Ask) -> None:
    job = customer.post(JOBS, json=job_body | {"validation_file": job_body["training_file"]}).json()
    assert len(job["warnings"]) == 1


def test_a_provider_may_measure_without_a_defense(
    service: Service, provider_with_model: TestClient, customer: TestClient, job_body: Ask
) -> None:
    file = provider_with_model.post(FILES, data={"purpose": "fine-tune"}, files={"file": ("a.jsonl", rows(10))}).json()
    ask = job_body | {"training_file": file["id"], "safety": {"defense": {"type": "none"}}}
    job = provider_with_model.post(JOBS, json=ask).json()
    assert job["safety"]["defense"] == {"type": "none"}
    with db.read(service.app.state.engine) as session:
        assert session.get_one(Job, job["id"]).spec.waived


def test_a_queued_job_is_cancelled_at_once_and_only_once(customer: TestClient, job_body: Ask) -> None:
    path = f"{JOBS}/{customer.post(JOBS, json=job_body).json()['id']}/cancel"
    assert customer.post(path).json()["status"] == "cancelled"
    again = customer.post(path)
    assert (again.status_code, again.json()["error"]["code"]) == (400, "invalid_state")


@pytest.fixture
def running(service: Service, customer: TestClient, job_body: Ask) -> lease.Claim:
    """A job that a worker has."""
    customer.post(JOBS, json=job_body)
    with db.transaction(service.app.state.engine) as session:
        claim = lease.claim(session, "worker", 60)
    assert claim is not None
    return claim


def test_a_running_job_is_cancelled_for_its_owner_and_its_worker_is_told(
    service: Service, customer: TestClient, running: lease.Claim
) -> None:
    path = f"{JOBS}/{running.job_id}"
    assert customer.post(f"{path}/cancel").json()["status"] == "cancelled"
    assert customer.get(path).json()["status"] == customer.get(JOBS).json()["data"][0]["status"] == "cancelled"
    with db.transaction(service.app.state.engine) as session:
        pulse = lease.heartbeat(session, running, 60)
    assert pulse is not None
    assert pulse.cancel_requested


@pytest.mark.parametrize("wish", ["cancel", "pause", "resume"])
def test_a_cancelled_job_takes_no_more_wishes(wish: str, customer: TestClient, running: lease.Claim) -> None:
    customer.post(f"{JOBS}/{running.job_id}/cancel")
    again = customer.post(f"{JOBS}/{running.job_id}/{wish}")
    assert (again.status_code, again.json()["error"]["code"]) == (400, "invalid_state")
    assert again.json()["error"]["message"].endswith("it is cancelled.")


def test_the_files_of_a_running_job_go_as_soon_as_it_is_cancelled(
    service: Service, customer: TestClient, running: lease.Claim
) -> None:
    file = f"{FILES}/{customer.get(f'{JOBS}/{running.job_id}').json()['training_file']}"
    assert "cancel it first" in customer.delete(file).json()["error"]["message"]
    customer.post(f"{JOBS}/{running.job_id}/cancel")
    assert customer.delete(file).json()["deleted"]

    erased = customer.delete(f"{JOBS}/{running.job_id}")
    assert "try again in a moment" in erased.json()["error"]["message"]
    with db.transaction(service.app.state.engine) as session:
        assert lease.confirm_cancel(session, running)
    assert customer.delete(f"{JOBS}/{running.job_id}").json()["deleted"]


def test_jobs_are_listed_newest_first_in_pages(customer: TestClient, job_body: Ask) -> None:
    ids = [customer.post(JOBS, json=job_body).json()["id"] for _ in range(3)]
    first = customer.get(JOBS, params={"limit": 2}).json()
    rest = customer.get(JOBS, params={"limit": 2, "after": first["data"][-1]["id"]}).json()
    assert [job["id"] for job in first["data"] + rest["data"]] == ids[::-1]
    assert (first["has_more"], rest["has_more"]) == (True, False)


def test_a_large_limit_is_a_page_of_a_hundred(customer: TestClient, job_body: Ask) -> None:
    customer.post(JOBS, json=job_body)
    assert len(customer.get(JOBS, params={"limit": 1000}).json()["data"]) == 1


def test_a_job_that_has_ended_is_all_done(service: Service, customer: TestClient, running: lease.Claim) -> None:
    with db.transaction(service.app.state.engine) as session:
        lease.update(session, running, progress={"percent": 97.0, "step": 9, "total_steps": 9, "eta_seconds": 12})
    path = f"{JOBS}/{running.job_id}"
    assert customer.get(path).json()["safety"]["progress"]["eta_seconds"] == 12
    with db.transaction(service.app.state.engine) as session:
        assert lease.publish(session, running, PUBLICATION)
    progress = customer.get(path).json()["safety"]["progress"]
    assert (progress["percent"], progress["eta_seconds"], progress["step"]) == (100, None, 9)


def test_jobs_are_found_by_metadata(customer: TestClient, job_body: Ask) -> None:
    wanted = customer.post(JOBS, json=job_body | {"metadata": {"run": "a", "user": "b"}}).json()
    customer.post(JOBS, json=job_body | {"metadata": {"run": "c"}})
    plain = customer.post(JOBS, json=job_body).json()
    empty = customer.post(JOBS, json=job_body | {"metadata": {}}).json()
    assert [job["id"] for job in customer.get(f"{JOBS}?metadata%5Brun%5D=a&metadata[user]=b").json()["data"]] == [
        wanted["id"]
    ]
    for without in ("metadata=null", "metadata=", "metadata"):  # as OpenAI documents it, and as its clients send null
        assert [job["id"] for job in customer.get(f"{JOBS}?{without}").json()["data"]] == [empty["id"], plain["id"]]
    for wrong in ("metadata[]=c", f"metadata[{'k' * 65}]=c", "metadata[a=c", "metadata=c", "metadata[a%00]=c"):
        assert customer.get(f"{JOBS}?{wrong}").json()["error"]["param"] == "metadata", wrong


def test_jobs_are_searched_by_as_many_pairs_as_a_job_may_have(customer: TestClient, job_body: Ask) -> None:
    pairs = {f"k{i}": "v" for i in range(16)}
    wanted = customer.post(JOBS, json=job_body | {"metadata": pairs}).json()
    query = {f"metadata[{name}]": value for name, value in pairs.items()}
    assert [job["id"] for job in customer.get(JOBS, params=query).json()["data"]] == [wanted["id"]]
    refused = customer.get(JOBS, params={f"metadata[k{i}]": "v" for i in range(1100)})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "too_long")


@pytest.mark.parametrize("query", ["limit=-1", "limit=1000000000", "limit=x", "after=ftjob-0", "after=%27%20OR%201"])
def test_a_bad_page_is_refused(query: str, customer: TestClient) -> None:
    assert customer.get(f"{JOBS}?{query}").status_code == 400


def test_somebody_elses_job_reads_as_unknown(customer: TestClient, stranger: TestClient, job_body: Ask) -> None:
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    for rest in ("", "/events", "/metrics", "/adapter", "/safety"):
        theirs, unknown = stranger.get(f"{JOBS}/{job_id}{rest}"), stranger.get(f"{JOBS}/ftjob-0{rest}")
        assert theirs.status_code == unknown.status_code == 404
        assert theirs.text.replace(job_id, "ftjob-0").split("req_")[0] == unknown.text.split("req_")[0]
    assert stranger.post(f"{JOBS}/{job_id}/cancel").status_code == 404
    assert stranger.get(JOBS).json()["data"] == []
    assert stranger.get(JOBS, params={"after": job_id}).json()["error"]["code"] == "invalid_cursor"
    assert stranger.post(JOBS, json=job_body).status_code == 404


def test_an_idempotency_key_makes_one_job(customer: TestClient, job_body: Ask) -> None:
    headers = {"idempotency-key": "once"}
    first, again = (customer.post(JOBS, json=job_body, headers=headers).json() for _ in range(2))
    assert first["id"] == again["id"]
    other = customer.post(JOBS, json=job_body | {"seed": 1}, headers=headers).json()
    assert other["error"]["code"] == "idempotency_mismatch"


@pytest.mark.parametrize("key", ["", "a" * 256, "a b"])
def test_an_unusable_idempotency_key_is_refused(key: str, customer: TestClient, job_body: Ask) -> None:
    assert customer.post(JOBS, json=job_body, headers={"idempotency-key": key}).status_code == 400


def test_a_retry_of_the_client_makes_no_second_job(customer: TestClient, job_body: Ask) -> None:
    first = customer.post(JOBS, json=job_body, headers={"x-stainless-retry-count": "0"}).json()
    retry = customer.post(JOBS, json=job_body, headers={"x-stainless-retry-count": "1"}).json()
    fresh = customer.post(JOBS, json=job_body, headers={"x-stainless-retry-count": "0"}).json()
    assert first["id"] == retry["id"] != fresh["id"]


def test_metrics_are_the_whole_series(service: Service, customer: TestClient, job_body: Ask) -> None:
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    with db.transaction(service.app.state.engine) as session:
        session.add_all(JobMetric(job_id=job_id, step=step, data={"loss/task": 1 / step}) for step in (2, 1))
    got = customer.get(f"{JOBS}/{job_id}/metrics").json()
    assert got == {"object": "list", "data": [{"step": 1, "loss/task": 1.0}, {"step": 2, "loss/task": 0.5}]}


def test_a_crowd_at_once_is_accepted_and_every_job_is_there(
    service: Service, customer: TestClient, job_body: dict[str, Any]
) -> None:
    crowd = 20 * service.clients(5, "org-customer", "customer")
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda client: client.post(JOBS, json=job_body), crowd))
    accepted = {answer.json()["id"] for answer in answers if answer.status_code == 200}
    assert {answer.status_code for answer in answers} <= {200, 429}
    assert len(accepted) > 50
    assert {job["id"] for job in customer.get(JOBS, params={"limit": 100}).json()["data"]} == accepted


WANDB: dict[str, Any] = {"type": "wandb", "wandb": {"project": "mine", "entity": "us", "tags": ["a"]}}


def test_an_integration_that_is_off_is_a_warning(customer: TestClient, job_body: dict[str, Any]) -> None:
    job = customer.post(JOBS, json=job_body | {"integrations": [WANDB, {"type": "other"}]}).json()
    assert job["integrations"] is None
    assert [warning.split("'")[1] for warning in job["warnings"]] == ["wandb", "other"]


def test_an_integration_that_is_on_is_passed_on(
    service: Service, customer: TestClient, job_body: dict[str, Any]
) -> None:
    service.app.state.settings = service.app.state.settings.model_copy(update={"integrations": ("wandb",)})
    job = customer.post(JOBS, json=job_body | {"integrations": [WANDB, {"type": "wandb"}]}).json()
    assert job["integrations"] == [{"type": "wandb", "wandb": WANDB["wandb"] | {"name": None}}]
    assert len(job["warnings"]) == 1


@pytest.mark.parametrize(
    ("suffix", "name"),
    [
        ("größe", "grosse"),
        ("Łódź", "Lodz"),
        ("naïve café", "naive-cafe"),
        ("ﬁn Ærø", "fin-AEro"),
        ("日本-2", "2"),
        ("a:b/c", "a-b-c"),
        ("acme-2.1_x", "acme-2.1_x"),
    ],
)
def test_a_suffix_is_written_in_plain_letters_and_its_owner_is_told(
    service: Service, customer: TestClient, job_body: Ask, suffix: str, name: str
) -> None:
    job = customer.post(JOBS, json=job_body | {"suffix": suffix}).json()
    with db.transaction(service.app.state.engine) as session:
        assert session.get_one(Job, job["id"]).suffix == name
    told = [] if suffix == name else [f"The suffix {suffix!r} is {name!r} in the model's name."]
    assert job["warnings"] == told
    events = customer.get(f"{JOBS}/{job['id']}/events").json()["data"]
    assert [event["message"] for event in events if event["level"] == "warn"] == told


def test_a_job_on_a_pool_without_benign_rows_is_warned_of_it_before_and_when_it_is_made(
    provider: TestClient, customer: TestClient, job_body: Ask
) -> None:
    plain = {"defense": {"type": "none"}}
    files = {"file": ("pool.jsonl", pool(150))}
    assert provider.post("/v1/admin/pools?name=general", files=files).status_code == 200

    job = customer.post(JOBS, json=job_body).json()
    events = customer.get(f"{JOBS}/{job['id']}/events").json()["data"]
    estimate = customer.post(f"{JOBS}/estimate", json=job_body).json()

    (told,) = job["warnings"]
    assert told.startswith("The safety pool has no benign rows")
    assert [event["message"] for event in events if event["level"] == "warn"] == [told]
    assert told in estimate["warnings"]
    assert provider.post(f"{JOBS}/estimate", json=job_body | {"safety": plain}).json().get("warnings", []) == []
