from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.move_in.filing import NotThere, job_suffix, map_request, notes
from tests.app.move_in.conftest import Run
from tests.app.move_in.openai_stub import Stub, error, once

MODEL = ("--model", "gpt-old=lab")


def job(**fields: Any) -> dict[str, Any]:
    return {"id": "ftjob-x", "model": "m", "seed": 7, "fine_tuned_model": "ft:m:org:shop:AbC", **fields}


def test_a_job_is_mapped_with_method_numbers_suffix_seed_and_metadata() -> None:
    numbers = {"n_epochs": 3, "batch_size": 2, "learning_rate_multiplier": 1.8}
    method = {"type": "supervised", "supervised": {"hyperparameters": {**numbers, "unheard_of": 1}}}
    old = job(method=method, metadata={"team": "a"}, integrations=[{"type": "wandb"}])
    assert map_request(old, "lab", {"training_file": "file-1"}, ["batch_size"]) == {
        "model": "lab",
        "training_file": "file-1",
        "method": {"type": "supervised", "supervised": {"hyperparameters": {**numbers, "batch_size": "auto"}}},
        "suffix": "shop",
        "seed": 7,
        "metadata": {"team": "a", "moved_from": "ftjob-x"},
    }
    assert len(notes(old)) == 2


def test_jobs_of_before_methods_and_preferences() -> None:
    old = job(hyperparameters={"n_epochs": 4, "batch_size": None})
    assert map_request(old, "lab", {})["method"] == {
        "type": "supervised",
        "supervised": {"hyperparameters": {"n_epochs": 4}},
    }
    numbers = {"beta": 0.1, "n_epochs": 2}
    pairs = job(method={"type": "dpo", "dpo": {"hyperparameters": numbers}})
    assert map_request(pairs, "lab", {})["method"] == {"type": "dpo", "dpo": {"hyperparameters": numbers}}
    with pytest.raises(NotThere, match="reinforcement, which is not trained here"):
        map_request(job(method={"type": "reinforcement"}), "lab", {})


@pytest.mark.parametrize(
    ("fields", "suffix"),
    [
        ({"fine_tuned_model": "ft:m:org::AbC"}, None),
        ({"fine_tuned_model": None}, None),
        ({"fine_tuned_model": None, "user_provided_suffix": "mine"}, "mine"),
    ],
)
def test_the_suffix_is_said_by_the_job_or_by_its_model(fields: dict[str, Any], suffix: str | None) -> None:
    assert job_suffix(job(**fields)) == suffix


def test_the_same_job_is_filed_here_and_waited_for(account: Stub, service: Stub, run: Run) -> None:
    run("read")
    code, printed = run("file", *MODEL, "--wait")
    assert code == 0, printed
    (here,) = service.jobs.values()
    assert here["method"]["supervised"]["hyperparameters"] == {"n_epochs": 3, "batch_size": 2}
    assert (here["model"], here["suffix"], here["metadata"]) == ("lab", "shop", {"moved_from": "ftjob-a"})
    assert service.contents[here["training_file"]] == account.contents["file-000"]
    assert service.contents[here["validation_file"]] == account.contents["file-001"]
    assert "ftjob-b left: failed at OpenAI" in printed
    assert f"ftjob-a -> {here['id']}: succeeded" in printed
    move = json.loads(run("status", "--json")[1])["moves"][0]
    assert (move["here"], move["status_here"]) == (here["id"], "succeeded")


def test_answers_that_are_lost_make_nothing_twice(account: Stub, service: Stub, run: Run) -> None:
    service.faults = {
        "POST /files": once("lost", "lost"),
        "POST /fine_tuning/jobs": once("lost", (503, error("Away"), {}), "lost"),
    }
    run("read")
    assert run("file", *MODEL)[0] == 0
    assert (len(service.files), len(service.jobs)) == (2, 1)
    assert run("file")[0] == 0  # the table is remembered
    assert len(service.jobs) == 1


def test_a_dry_run_asks_nothing(account: Stub, service: Stub, run: Run) -> None:
    run("read")
    code, printed = run("file", *MODEL, "--dry-run")
    assert (code, service.requests) == (0, [])
    assert "ftjob-a would be filed on lab: supervised, n_epochs 3, batch_size 2" in printed
    assert "2 files of" in printed


def test_what_cannot_be_filed_says_why_and_the_rest_is(account: Stub, service: Stub, run: Run) -> None:
    account.add_job("ftjob-d", "file-000", model="ft:gpt-old:org:a:ftjob-a")
    account.add_job("ftjob-e", "file-000", model="gpt-other")
    account.add_job("ftjob-f", "file-gone")
    account.add_job("ftjob-g", "file-000", method={"type": "reinforcement", "reinforcement": {}})
    run("read")
    code, printed = run("file", *MODEL, "--dry-run")
    assert (code, "ftjob-e would not be filed: say which model" in printed) == (1, True)
    code, printed = run("file", *MODEL)
    assert code == 1
    assert "ftjob-d is not filed: it starts from the model of ftjob-a, which is not trained here yet" in printed
    assert "ftjob-e is not filed: say which model here stands for gpt-other: --model gpt-other=NAME" in printed
    assert "ftjob-f is not filed: file-gone was not downloaded: the account does not have it any more" in printed
    assert "ftjob-g is not filed: its method is reinforcement" in printed
    assert run("file", "--wait", "--job", "ftjob-a", "--job", "ftjob-d")[0] == 0
    models = [job["model"] for job in service.jobs.values()]
    assert models == ["lab", next(iter(service.jobs.values()))["fine_tuned_model"]]


def test_a_refusal_is_told_and_tried_again_by_the_next_command(account: Stub, service: Stub, run: Run) -> None:
    service.faults["POST /fine_tuning/jobs"] = once((400, error("No model lab here", "model_not_found"), {}))
    run("read")
    code, printed = run("file", *MODEL)
    assert (code, "the service refuses it: No model lab here" in printed) == (1, True)
    assert run("file", "--model", "gpt-old=other")[0] == 0
    assert [job["model"] for job in service.jobs.values()] == ["other"]


def test_a_job_that_failed_here_is_filed_anew_when_asked(account: Stub, service: Stub, run: Run) -> None:
    service.ends = "failed"
    run("read")
    assert run("file", *MODEL, "--wait")[0] == 1
    assert run("file")[0] == 1
    assert len(service.jobs) == 1
    service.ends = "succeeded"
    assert run("file", "--again", "--wait")[0] == 0
    assert len(service.jobs) == 2


def test_a_file_that_was_changed_meanwhile_is_not_sent(account: Stub, service: Stub, run: Run, folder: Path) -> None:
    run("read")
    (folder / "files" / "file-000-train.jsonl").write_text("{}\n")
    code, printed = run("file", *MODEL)
    assert (code, "is not as it was downloaded" in printed, service.files) == (1, True, {})


@pytest.mark.parametrize("given", [("--model", "lab"), ("--auto", "dropout")])
def test_wrong_use_is_a_usage_error(account: Stub, service: Stub, run: Run, given: tuple[str, str]) -> None:
    run("read")
    assert run("file", *given)[0] == 3
