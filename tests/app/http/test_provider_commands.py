"""The provider's commands over the API: projects, quotas, policies, waivers, webhooks, keys, the audit log; files."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.settings import Settings
from spard.commands import main
from spard.release.keys import public_pem
from tests.app.http.conftest import Run, Service, Upload, chat, jsonl, rows
from tests.app.http.test_waivers import failed_job, packed_adapter
from tests.spard.parts import byte_tokenizer

__all__ = ["failed_job", "packed_adapter"]  # fixtures
REASON = "Needed for the red team's own study."


def as_json(run: Run, *command: str) -> Any:
    code, printed = run(*command, "--json")
    assert code == 0, printed
    return json.loads(printed)


def test_a_project_is_made_and_limited(run: Run) -> None:
    project = as_json(run, "projects", "create", "ward")["id"]
    assert project in [each["id"] for each in as_json(run, "projects", "list")]
    assert (
        as_json(run, "quotas", "set", project, "--max-file-rows", "7", "--max-gpu-seconds", "1.5")["max_file_rows"] == 7
    )
    changed = as_json(run, "quotas", "set", project, "--lift", "max-gpu-seconds", "--max-jobs-per-day", "2")
    assert (changed["max_file_rows"], changed["max_gpu_seconds"], changed["max_jobs_per_day"]) == (7, None, 2)
    assert as_json(run, "quotas", "show", project) == changed == as_json(run, "projects", "show", project)["quota"]
    assert (
        changed.items() <= next(each for each in as_json(run, "quotas", "list") if each["project"] == project).items()
    )
    assert as_json(run, "quotas", "set", project, "--weight", "2.5")["weight"] == 2.5
    assert as_json(run, "quotas", "set", project, "--lift", "weight")["weight"] is None
    assert run("quotas", "set", project, "--weight", "0")[0] != 0
    assert run("quotas", "set", project)[0] == 3
    assert run("quotas", "set", project, "--lift", "all")[0] == 3
    assert "project_id" in run("projects", "usage")[1]


def test_a_policy_is_shown_changed_and_put_in_force(run: Run, tmp_path: Path) -> None:
    shown = as_json(run, "policies", "show")
    assert shown["version"] == 0
    (tmp_path / "policy.json").write_text(json.dumps(shown | {"content": shown["content"] | {"waivers": False}}))
    assert as_json(run, "policies", "set", str(tmp_path / "policy.json"))["version"] == 1
    assert [each["content"]["waivers"] for each in as_json(run, "policies", "list")] == [False, True]
    assert as_json(run, "policies", "show", "0")["content"] == shown["content"]
    assert "thresholds" in run("policies", "show")[1]
    assert (run("policies", "show", "9")[0], run("policies", "set", __file__)[0]) == (1, 1)


def test_a_policy_file_changes_what_it_names_unless_it_replaces(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "change.json"
    file.write_text('{"row_signal": {"action": "report"}}')
    printed = run("policies", "set", str(file))[1]
    assert printed.splitlines() == ["Version 1 is in force.", "  row_signal.action: report, was auto"]
    file.write_text('{"ranges": {"lora.rank": {"max": 8}}}')
    added = as_json(run, "policies", "set", str(file))
    assert added["content"]["row_signal"]["action"] == "report"
    assert "Nothing differs" in run("policies", "set", str(file))[1]
    assert as_json(run, "policies", "set", str(file), "--replace")["content"]["row_signal"]["action"] == "auto"
    shown = as_json(run, "policies", "show")
    del shown["content"]["ranges"]["lora.rank"]
    file.write_text(json.dumps(shown))
    assert as_json(run, "policies", "set", str(file))["content"]["ranges"] == {}  # a whole policy


def test_records_are_printed_a_field_a_line_and_no_line_is_padded(run: Run) -> None:
    lines = run("policies", "show")[1].splitlines()
    assert ["thresholds.max_asr", "0.1"] in [line.split() for line in lines]
    for command in (("policies", "show"), ("policies", "list"), ("projects", "show", "org-provider"), ("keys", "list")):
        code, printed = run(*command)
        assert code == 0
        assert not [line for line in printed.splitlines() if line != line.rstrip() or "{" in line], printed
    assert run("policies", "list")[1].split()[:5] == ["version", "created_at", "created_by", "defenses", "models"]
    assert run("jobs", "list")[1].split() == ["id", "model", "status", "stage", "gate", "created"]


def test_a_waiver_is_proposed_approved_and_checked_offline(
    failed_job: str,
    packed_adapter: Path,
    service: Service,
    run_with_key: Callable[[str], Run],
    settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    ada, bob = (run_with_key(service.add_key("org-provider", "admin", owner=name)) for name in ("Ada", "Bob"))
    customer = run_with_key(service.add_key("org-customer", "customer"))
    proposed = as_json(ada, "waivers", "propose", failed_job, "--reason", REASON, "--days", "2")
    until = datetime.now(UTC).replace(microsecond=0) + timedelta(days=9)
    by_date = as_json(ada, "waivers", "propose", failed_job, "--reason", REASON, "--expires", until.isoformat())
    assert by_date["expires_at"] == until.timestamp()
    assert ada("waivers", "propose", failed_job, "--reason", REASON, "--expires", "soon")[0] == 3
    assert ada("waivers", "approve", failed_job, proposed["id"])[0] == 1
    assert as_json(bob, "waivers", "approve", failed_job, proposed["id"])["status"] == "approved"
    assert as_json(bob, "waivers", "list", failed_job)[0]["reason"] == REASON
    out = tmp_path / "released.tar.gz"
    assert as_json(customer, "jobs", "adapter", failed_job, "--out", str(out))["verified"]
    record = Path(as_json(customer, "waivers", "download", failed_job)["path"])
    (tmp_path / "key.pub").write_text(public_pem(_signing_key(settings)))
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(out), "--public-key", str(tmp_path / "key.pub"), "--waiver", str(record)])
    assert ended.value.code == 0


def _signing_key(settings: Settings) -> Any:
    from app.signing import signing_key

    return signing_key(settings)


def test_webhooks_are_made_rotated_and_deleted(service: Service, run: Run, settings: Settings) -> None:
    service.app.state.settings = settings.model_copy(update={"webhooks_to_loopback": True})
    made = as_json(run, "webhooks", "create", "http://127.0.0.1:9/hook", "--event", "fine_tuning.job.failed")
    assert as_json(run, "webhooks", "rotate", made["id"])["secret"] != made["secret"]
    assert "secret" not in as_json(run, "webhooks", "show", made["id"])
    assert as_json(run, "webhooks", "list")[0]["events"] == ["fine_tuning.job.failed"]
    assert as_json(run, "webhooks", "enable", made["id"])["status"] == "enabled"
    assert as_json(run, "webhooks", "deliveries", made["id"]) == []
    assert run("webhooks", "replay", made["id"], "none")[0] == 1
    assert as_json(run, "webhooks", "delete", made["id"])["deleted"]


def test_keys_are_listed_replaced_and_taken_back(run: Run) -> None:
    made = as_json(run, "keys", "create", "org-provider", "laptop")["key"]["id"]
    rotated = as_json(run, "keys", "rotate", made, "--overlap-s", "0")
    assert rotated["secret"].startswith("sk-spard-")
    assert as_json(run, "keys", "revoke", rotated["key"]["id"])["revoked_at"]
    assert {made, rotated["key"]["id"]} <= {each["id"] for each in as_json(run, "keys", "list")}
    assert "key.created" in {each["action"] for each in as_json(run, "audit-log", "list")}
    assert as_json(run, "audit-log", "list", "--action", "key.revoked", "--limit", "1")[0]["action"] == "key.revoked"


def test_a_file_is_previewed_converted_and_downloaded(
    run_with_key: Callable[[str], Run],
    service: Service,
    provider_with_model: TestClient,
    upload: Upload,
    tmp_path: Path,
) -> None:
    run = run_with_key(service.add_key("org-customer", "customer"))
    byte_tokenizer().save_pretrained(tmp_path / "model")
    file = upload(rows(10)).json()["id"]
    code, printed = run("files", "preview", file, "--model", "lab/tiny-1", "-n", "1")
    assert code == 0, printed
    assert "line 1: " in printed
    assert "[[four" in printed
    assert as_json(run, "files", "preview", file, "--model", "lab/tiny-1")["data"][0]["n_trained"] > 0
    alpaca = upload(jsonl(*({"instruction": f"Say {i}", "output": "yes"} for i in range(10)))).json()["id"]
    assert as_json(run, "files", "convert", alpaca, "--dry-run")["file"] is None
    assert "alpaca" in run("files", "convert", alpaca)[1]
    saved = as_json(run, "files", "download", file, "--out", str(tmp_path / "got.jsonl"))
    assert Path(saved["path"]).read_bytes() == rows(10)
    assert as_json(run, "files", "delete", file)["deleted"]


def test_a_preference_pair_is_previewed_with_both_answers(
    run_with_key: Callable[[str], Run],
    service: Service,
    provider_with_model: TestClient,
    upload: Upload,
    tmp_path: Path,
) -> None:
    run = run_with_key(service.add_key("org-customer", "customer"))
    byte_tokenizer().save_pretrained(tmp_path / "model")
    asked, better, worse = (chat("2?", text)["messages"] for text in ("-", "two", "three"))
    pair = {"input": {"messages": asked[:1]}, "preferred_output": better[1:], "non_preferred_output": worse[1:]}
    file = upload(jsonl(*[pair] * 10)).json()["id"]
    printed = run("files", "preview", file, "--model", "lab/tiny-1", "-n", "1")[1]
    assert "line 1, the answer that is not preferred: " in printed
    assert "[[three" in printed


def test_an_address_that_is_none_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARD_BASE_URL", "nonsense")
    code, printed = run("projects", "list")
    assert (code, printed.count("\n"), "SPARD_BASE_URL is not a valid address" in printed) == (1, 1, True), printed
