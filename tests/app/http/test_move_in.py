"""`spard move-in file` against the real service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.move_in.ledger import open_ledger
from spard.commands import main
from tests.app.http.conftest import Service
from tests.app.move_in.openai_stub import Stub, row, serve_stub


def test_the_service_takes_the_job_as_it_was_and_once(
    service: Service,
    provider_with_model: TestClient,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    account, folder = Stub(), tmp_path / "move"
    train = account.add_file("train.jsonl", b"".join(row(f"What is {i}?", f"It is {i}.") for i in range(12)))
    account.add_job("ftjob-a", train, suffix="shop", metadata={"team": "a"})
    monkeypatch.setenv("OPENAI_API_KEY", account.key)
    monkeypatch.setenv("SPARD_BASE_URL", url)
    monkeypatch.setenv("SPARD_API_KEY", service.add_key("org-customer", "customer"))

    def run(name: str, *arguments: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(["move-in", name, str(folder), *arguments])
        return int(ended.value.code or 0)

    with serve_stub(account):
        assert run("read", "--base-url", account.url) == 0
    assert run("file", "--model", "gpt-old=lab/tiny-1") == 0
    with open_ledger(folder) as ledger:  # as after a kill: the request was noted, the answer was not
        filing: dict[str, Any] = ledger.get("filing", "ftjob-a")
        ledger.put("filing", "ftjob-a", {name: value for name, value in filing.items() if name != "job"})
    assert run("file") == 0

    capsys.readouterr()
    assert run("status", "--json") == 0
    (move,) = json.loads(capsys.readouterr().out)["moves"]
    assert (move["here"], move["status_here"]) == (filing["job"]["id"], "queued")
    job = only_job(service, move["here"])
    assert job["metadata"] == {"team": "a", "moved_from": "ftjob-a"}
    assert (job["hyperparameters"]["n_epochs"], job["hyperparameters"]["batch_size"], job["seed"]) == (3, 2, 7)


def only_job(service: Service, job_id: str) -> dict[str, Any]:
    """The one job of the customer."""
    (job,) = service.client("org-customer", "customer").get("/v1/fine_tuning/jobs").json()["data"]
    assert job["id"] == job_id
    found: dict[str, Any] = job
    return found
