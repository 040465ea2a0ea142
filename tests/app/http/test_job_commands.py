"""spard jobs: watched to its end, measured, compared, downloaded and checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi.testclient import TestClient

from app import db
from app.commands import client
from app.commands.jobs import watch
from app.db.tables.job_records import Adapter, GateJson, Progress, ResolvedJson, SafetySummary
from app.jobs import events, lease
from app.jobs.lease import Publication, Rejection
from app.settings import Settings
from app.signing import signing_key
from spard.commands import main
from spard.digests import write_manifest
from spard.release.archive import archive
from spard.release.keys import public_pem
from spard.release.manifest import sign
from tests.app.http.conftest import JOBS, Run, Service, rows
from tests.app.http.test_report import REPORT

GATE: GateJson = {"decision": "fail", "reasons": ["Attacks succeed in 20 of 40."]}
MODEL = "ft:lab/tiny-1:org-customer::1"
STEPS = {i: {"loss/task": 1 / i, "loss/safe": 0.2} for i in range(1, 6)}


@pytest.fixture
def run(service: Service, run_with_key: Callable[[str], Run]) -> Run:
    """Commands of the customer."""
    return run_with_key(service.add_key("org-customer", "customer"))


@pytest.fixture
def job(customer: TestClient, job_body: dict[str, Any]) -> str:
    job_id: str = customer.post(JOBS, json=job_body).json()["id"]
    return job_id


@pytest.fixture
def packed_adapter(settings: Settings, tmp_path: Path) -> Path:
    """A signed adapter that passed."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "weights").write_bytes(bytes(range(256)) * 4000)
    write_manifest(folder, {"gate": {"decision": "pass", "reasons": []}})
    sign(folder, signing_key(settings))
    archive(folder, tmp_path / "adapter.tar.gz", "adapter")
    return tmp_path / "adapter.tar.gz"


def test_verify_says_which_key_it_took(
    packed_adapter: Path,
    settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SPARD_DATA_DIR", str(settings.data_dir))
    monkeypatch.delenv("SPARD_SIGNING_KEY", raising=False)
    assert _verify(capsys, str(packed_adapter)).endswith("signing_key.pem; no key was given")
    public = tmp_path / "key.pub"
    public.write_text(public_pem(signing_key(settings)))
    assert _verify(capsys, str(packed_adapter), "--public-key", str(public)).endswith("that of the key given")


def _verify(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["verify", *arguments])
    assert ended.value.code == 0
    return capsys.readouterr().out.strip().splitlines()[-1]


def claim_job(service: Service) -> lease.Claim:
    with db.transaction(service.app.state.engine) as session:
        claim = lease.claim(session, "worker", 60)
        assert claim is not None
        assert lease.record_metrics(session, claim, STEPS)
    return claim


WARNING = "2 of 20 rows of the training file are not trained on."


def reject(service: Service) -> None:
    """End the queued job with a warning, and a report that its gate did not pass."""
    claim = claim_job(service)
    with db.transaction(service.app.state.engine) as session:
        assert lease.update(session, claim, warnings=[WARNING])
    report = REPORT | {"gate": GATE}
    service.app.state.storage.write("jobs/report", [json.dumps(report).encode()])
    with db.transaction(service.app.state.engine) as session:
        assert lease.reject(session, claim, Rejection("No.", 10, [], {"gate": GATE}, "jobs/report"))


def publish(service: Service, packed: Path) -> None:
    """End the queued job with an adapter."""
    claim, content = claim_job(service), packed.read_bytes()
    service.app.state.storage.write("jobs/report", [b'{"gate": {"decision": "pass", "reasons": []}}'])
    service.app.state.storage.write("jobs/adapter", [content])
    adapter: Adapter = {"storage_key": "jobs/adapter", "sha256": sha256(content).hexdigest(), "bytes": len(content)}
    safety: SafetySummary = {"gate": {"decision": "pass", "reasons": []}, "asr": {"base": 0.0, "adapter": 0.01}}
    resolved: ResolvedJson = {"n_epochs": 3, "batch_size": 4, "learning_rate_multiplier": 1.0, "learning_rate": 0.002}
    with db.transaction(service.app.state.engine) as session:
        assert lease.update(session, claim, resolved=resolved)
        assert lease.publish(session, claim, Publication(MODEL, 10, [], adapter, safety, "jobs/report"))


def test_a_job_is_watched_until_it_has_succeeded(run: Run, service: Service, job: str, packed_adapter: Path) -> None:
    publish(service, packed_adapter)
    code, printed = run("jobs", "watch", job)
    assert code == 0
    assert "moving job to queued state" in printed
    assert printed.splitlines()[-1] == f"model: {MODEL}; its adapter: spard jobs adapter {job}"
    assert run("jobs", "follow", job) == (code, printed)


def test_a_job_that_its_gate_stopped_is_exit_code_2_and_a_sentence(run: Run, service: Service, job: str) -> None:
    reject(service)
    code, printed = run("jobs", "watch", job)
    assert (code, f"{job} failed: Stopped by the safety gate. 20 of 40 attacks succeed on this model." in printed) == (
        2,
        True,
    )
    *events, last = [json.loads(line) for line in run("jobs", "watch", job, "--json")[1].splitlines()]
    assert {each["object"] for each in events} == {"fine_tuning.job.event"}
    assert (last["object"], last["status"]) == ("fine_tuning.job", "failed")


def test_what_happens_while_one_watches_is_shown(
    run: Run, service: Service, job: str, packed_adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job goes on when its first event was shown, and ends when the step was."""
    shown: list[str] = []

    def then(line: str) -> None:
        shown.append(line)
        if len(shown) == 1:
            with db.transaction(service.app.state.engine) as session:
                events.append(session, job, "info", "metrics", "Step 1/2: on the way", {"step": 1})
        elif "Step 1/2" in line:
            publish(service, packed_adapter)

    monkeypatch.setattr(watch, "say", then)
    assert run("jobs", "watch", job)[0] == 0
    assert any("Step 1/2" in line for line in shown)
    assert shown[-1].startswith(f"model: {MODEL}")


def test_a_silence_is_broken_with_what_the_job_does(
    run: Run, service: Service, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream's sign of life says what is asked; the job ends once it was shown."""
    progress: Progress = {"percent": 40, "step": 6, "total_steps": 10, "eta_seconds": 90}
    progress["doing"] = "asking 100 attacks at the end of epoch 6 of 10, 40 left, about 20 s"
    claim = claim_job(service)
    with db.transaction(service.app.state.engine) as session:
        assert lease.update(session, claim, phase="train", progress=progress)
    shown: list[str] = []

    def then(line: str) -> None:
        shown.append(line)
        if line.endswith("Asking 100 attacks at the end of epoch 6 of 10, 40 left, about 20 s"):
            with db.transaction(service.app.state.engine) as session:
                lease.fail(session, claim, {"code": "server_error", "message": "It ends here.", "param": None})

    monkeypatch.setattr("app.jobs.stream._HEARTBEAT_S", 0.05)
    monkeypatch.setattr(watch, "say", then)
    assert run("jobs", "watch", job)[0] == 1
    assert [line for line in shown if "Asking 100 attacks" in line]


def test_the_last_lines_say_whether_the_task_was_learned(run: Run, service: Service, job: str) -> None:
    losses = {who: {"loss": 2.0, "accuracy": 0.6, "tokens": 9} for who in ("base", "adapter")}
    check = {"source": "held_out", "rows": 5, "replies": 1, "is_pairs": False, "why_none": "", "words": "It did."}
    reply = {"line": 3, "system": "Be brief.", "turns": 0, "prompt": "Where?", "expected": "Here."}
    reply |= {"base": "No.", "trained": "There."}
    service.app.state.storage.write("jobs/report", [b'{"gate": {"decision": "pass", "reasons": []}}'])
    service.app.state.storage.write("jobs/task_replies.jsonl", [json.dumps(reply).encode()])
    adapter: Adapter = {"storage_key": "jobs/adapter", "sha256": "0" * 64, "bytes": 1}
    safety: Any = {"gate": {"decision": "pass", "reasons": []}, "task_check": check | losses}
    claim = claim_job(service)
    with db.transaction(service.app.state.engine) as session:
        assert lease.publish(session, claim, Publication(MODEL, 10, [], adapter, safety, "jobs/report"))
    printed = run("jobs", "watch", job)[1].splitlines()
    assert "Your task: It did." in printed
    assert f"Its replies to 1 of your rows: spard jobs task-replies {job}" in printed
    assert run("jobs", "task-replies", job)[1].splitlines() == [
        "line 3: Where?",
        "  under the system prompt: Be brief.",
        "    the file: Here.",
        "  base model: No.",
        "  this model: There.",
    ]
    assert json.loads(run("jobs", "task-replies", job, "--json")[1])[0]["trained"] == "There."


def test_ctrl_c_leaves_the_job_and_says_how_to_come_back(
    run: Run, job: str, customer: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("app.commands.jobs.watch._show", interrupt)
    code, printed = run("jobs", "watch", job)
    assert (code, f"spard jobs watch {job}" in printed) == (130, True)
    assert customer.get(f"{JOBS}/{job}").json()["status"] == "queued"


def test_a_report_is_a_sentence_and_a_table_and_saved_as_a_page(
    run: Run, service: Service, job: str, tmp_path: Path
) -> None:
    reject(service)
    code, printed = run("jobs", "report", job, "--html", str(tmp_path / "report.html"))
    assert code == 0
    for shown in (
        "Stopped by the safety gate: 20 of 40 attacks",
        "Attacks succeed in 20 of 40.",
        "35.2% to 64.8%",
        WARNING,
    ):
        assert shown in printed
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    found = json.loads(run("jobs", "report", job, "--json")[1])
    assert (found["verdict"]["look"], found["report"]["gate"]) == ("bad", GATE)
    assert json.loads(run("jobs", "risky-rows", job, "--json")[1])[0]["line"] == 3
    assert "verdict" in run("jobs", "risky-rows", job)[1]


def test_a_job_that_was_not_measured_has_no_report(run: Run, job: str) -> None:
    code, printed = run("jobs", "report", job)
    assert (code, printed.count("\n")) == (1, 1)


def test_jobs_are_compared_and_their_steps_listed(
    run: Run, service: Service, customer: TestClient, job_body: dict[str, Any], job: str, packed_adapter: Path
) -> None:
    publish(service, packed_adapter)
    other = customer.post(JOBS, json=job_body | {"seed": 7}).json()["id"]
    found = json.loads(run("jobs", "compare", job, other, "--json")[1])
    assert [(each["id"], each["status"]) for each in found] == [(job, "succeeded"), (other, "queued")]
    assert (found[0]["asr"], found[0]["last training loss"], found[1]["seed"]) == ("0.01 (base model 0)", "0.2", 7)
    assert "training file" in run("jobs", "compare", job, other)[1]
    assert run("jobs", "compare", job)[0] == 3
    assert [row["step"] for row in json.loads(run("jobs", "metrics", job, "--last", "2", "--json")[1])] == [4, 5]
    assert run("jobs", "metrics", job)[1].split()[:3] == ["step", "loss/safe", "loss/task"]


def test_a_job_is_paused_resumed_and_deleted(run: Run, job: str) -> None:
    assert json.loads(run("jobs", "pause", job, "--json")[1])["status"] == "paused"
    assert f"spard jobs watch {job}" in run("jobs", "resume", job)[1]
    run("jobs", "cancel", job)
    assert run("jobs", "watch", job)[0] == 1
    assert run("jobs", "delete", job)[0] == 0
    assert run("jobs", "show", job)[0] == 1


def test_a_job_is_estimated_and_none_is_made(run: Run, provider_with_model: TestClient, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(rows(10))
    ask = ["--model", "lab/tiny-1", "--file", str(tmp_path / "train.jsonl"), "--epochs", "3"]
    found = json.loads(run("jobs", "estimate", *ask, "--json")[1])
    assert (found["rows"], found["hyperparameters"]["n_epochs"]) == (10, 3)
    assert "n_epochs" in run("jobs", "estimate", *ask)[1]
    assert json.loads(run("jobs", "list", "--json")[1]) == []


def test_an_adapter_is_checked_and_then_appears(
    run: Run, service: Service, job: str, packed_adapter: Path, tmp_path: Path
) -> None:
    publish(service, packed_adapter)
    out = tmp_path / "got" / "adapter.tar.gz"
    code, printed = run("jobs", "adapter", job, "--out", str(out), "--json")
    saved = json.loads(printed)
    assert (code, saved["verified"], saved["resumed_at"]) == (0, True, 0)
    assert out.read_bytes() == packed_adapter.read_bytes()
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize(("kept", "resumed"), [("same", True), ("other", False)])
def test_a_download_that_broke_goes_on_where_it_was(
    kept: str, resumed: bool, run: Run, service: Service, job: str, packed_adapter: Path, tmp_path: Path
) -> None:
    """What is left of the same object is not asked for again; of another one nothing is kept."""
    publish(service, packed_adapter)
    content, out = packed_adapter.read_bytes(), tmp_path / "got.tar.gz"
    tag = sha256(content if kept == "same" else b"other").hexdigest()
    part = tmp_path / f"got.tar.gz.{tag}.part"
    part.write_bytes(content[:100] if resumed else b"x" * 100)
    saved = json.loads(run("jobs", "adapter", job, "--out", str(out), "--json")[1])
    assert saved["resumed_at"] == (100 if resumed else 0)
    assert out.read_bytes() == content
    assert not part.exists()


def test_a_connection_that_breaks_is_taken_up_again(
    run: Run, service: Service, job: str, packed_adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(service, packed_adapter)
    starts: list[int] = []

    @contextmanager
    def breaks_once(name: str, start: int, total: int | None) -> Iterator[Callable[[int], None]]:
        starts.append(start)
        yield lambda n: break_connection() if len(starts) == 1 else None

    def break_connection() -> None:
        raise httpx2.ReadError("the wire was cut")

    for name, value in {"_WAITS_S": (0.0,), "_CHUNK_BYTES": 500, "_bar": breaks_once}.items():
        monkeypatch.setattr(client, name, value)
    out = tmp_path / "got.tar.gz"
    code, printed = run("jobs", "adapter", job, "--out", str(out))
    assert (code, starts, "Going on" in printed) == (0, [0, 500], True)
    assert out.read_bytes() == packed_adapter.read_bytes()


def test_what_is_not_as_it_was_signed_is_refused_and_removed(
    run: Run, service: Service, job: str, packed_adapter: Path, settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "adapter" / "weights").write_bytes(b"changed")
    archive(tmp_path / "adapter", packed_adapter, "adapter")
    publish(service, packed_adapter)
    out = tmp_path / "got" / "adapter.tar.gz"
    code, printed = run("jobs", "adapter", job, "--out", str(out))
    assert (code, "refused" in printed) == (1, True)
    assert list(out.parent.iterdir()) == []
    assert run("jobs", "adapter", job, "--out", str(out), "--no-verify")[0] == 0
