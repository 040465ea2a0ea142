"""Whoever runs commit 14c5fa6 and upgrades loses nothing: what had ended reads as before, what had not goes on.

The installation in `fixture.tar.xz` was made by that commit (see README.md). Everything here goes through the command
line and HTTP; only `installation` knows names of tables.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import httpx2
import pytest

from tests.legacy import rows
from tests.legacy.installation import MARK, MODEL, Installation, change_endpoints, unpack
from tests.legacy.running import Running, good

JOBS, AUDIT_LOG = "/v1/fine_tuning/jobs", "/v1/admin/audit_log?limit=1000"
# Fields that newer versions leave out of an answer where they were null, as OpenAI's schema wants them.
ABSENT = ("expires_at", "status_details", "data")
# Fields that versions after 14c5fa6 have added, to any answer or by its path; nothing else may differ.
ADDED_ANYWHERE = {
    *("allow_unmeasured_judge", "approximate", "audit_version", "confidence", "max_dressed_refusal_rise", "ending"),
    "max_shown_asr_rise",
    "correct_judge_errors",
    "max_dressed_asr",
    *("after_tuning", "agent", "further_tuning", "later_audit"),
    *("older_audit", "own_refusal", "pending_bytes", "row_signal", "rows_in_file", "transcripts"),
    *("calls", "max_tokens_per_day", "prompt_tokens", "reply_tokens", "serving", "tokens_per_minute"),
    *("memory_plan", "verdict", "weight", "embedder", "not_audited"),
}
ADDED = {
    "/v1/admin/policies": {"audit"},
    "/v1/admin/models": {
        *("digest", "lora_reach", "quantization", "target_modules", "tool_support"),
        "template_arguments",
    },
    "/v1/admin/pools": {"warnings"},
    "/v1/admin/suites": {"warnings"},
}
ADDED_OF_JOBS = {  # by the path's end
    "checkpoints": {"safety"},
    "risky_rows": {"dropped"},
    "transcripts": {"votes"},
    "validation": {"findings"},
}
# Jobs that are trained to their end; SPARD_SOAK=1 trains all, on SQLite.
CORE = ("queued", "on_top", "none", "paused", "interrupted")


class Event(NamedTuple):
    """What a receiver of webhooks was sent."""

    headers: dict[str, str]
    body: bytes


@pytest.fixture(params=["sqlite", "postgres"])
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Installation:
    """The old installation, brought to this version's schema as the README of every version says."""
    is_postgres = request.param == "postgres"
    url = request.getfixturevalue("empty_postgres_url") if is_postgres else None
    installation = unpack(tmp_path, request.param, url)
    migrated = installation.home.run("migrate")
    assert migrated.returncode == 0, migrated.stderr
    return installation


def test_what_had_ended_is_answered_as_before(old: Installation) -> None:
    # What a worker that is gone had begun is not handed back meanwhile.
    with old.home.serving(worker=False, SPARD_REAP_S="3600") as service:
        answers = {
            (each["who"], each["path"]): (base64.b64decode(each["body"]), _get(old, service, each["who"], each["path"]))
            for each in old.facts["answers"]
            if each["path"] != AUDIT_LOG
        }
        log = good(_client(old, service, "bob").get(AUDIT_LOG))["data"]
        page = _client(old, service, "carol").get(
            f"{JOBS}/{old.ids['released']}/safety", headers={"accept": "text/html"}
        )
    different = [
        (who, path)
        for (who, path), (before, now) in answers.items()
        if _at_end(_strip_new_fields(old, path, now)) != _at_end(_without_nulls(path, before))
    ]
    assert different == []
    assert len(answers) > 100
    before = _old_answer(old, AUDIT_LOG)["data"]
    assert log[-len(before) :] == before  # the latest first; reading adapters is noted
    assert page.is_success
    assert old.ids["released"] in page.text


def test_signed_archives_and_the_audit_log_hold(old: Installation, tmp_path: Path) -> None:
    public = tmp_path / "public.pem"
    public.write_text(old.home.run("keys", "signing").stdout)
    archives = [each for each in old.facts["answers"] if each["path"].endswith("/adapter")]
    for i, each in enumerate(archives):
        archive = tmp_path / f"{i}.tar.gz"
        archive.write_bytes(base64.b64decode(each["body"]))
        verified = old.home.run("verify", str(archive), "--public-key", str(public))
        assert verified.returncode == 0, verified.stderr
    assert len(archives) == 2
    _check_audit_log(old)


def test_keys_policies_and_quotas_bind(old: Installation) -> None:
    with old.home.serving(worker=False) as service:
        for who in ("first", "alice", "bob", "carol", "reader", "dave", "capped", "replacing"):
            path = "/v1/admin/projects" if who == "bob" else JOBS
            assert _client(old, service, who).get(path).status_code == 200, who
        for who in ("revoked", "expired", "replaced"):
            assert _code(_client(old, service, who).get(JOBS)) == (401, "invalid_api_key"), who
        assert _code(_client(old, service, "reader").post(JOBS, json={})) == (403, "insufficient_scope")
        assert _code(_client(old, service, "carol").get("/v1/admin/projects")) == (403, "insufficient_scope")
        assert _code(_client(old, service, "dave").get(f"{JOBS}/{old.ids['released']}")) == (404, "fine_tune_not_found")

        ask = old.facts["requests"]["queued"]["body"]
        carol = _client(old, service, "carol")
        large = ask | {"lora": {"rank": 16}}
        other = ask | {"safety": {"defense": {"type": "safeinstr"}}}
        assert _code(carol.post(JOBS, json=large)) == (400, "not_allowed_by_policy")
        assert _code(carol.post(JOBS, json=other)) == (400, "defense_not_allowed")
        own = _client(old, service, "capped").post(
            "/v1/files", data={"purpose": "fine-tune"}, files=_file(rows.training())
        )
        capped = _client(old, service, "capped").post(JOBS, json=ask | {"training_file": good(own)["id"]})
        assert _code(capped) == (429, "quota_exceeded")


def test_what_was_begun_is_finished(old: Installation, tmp_path: Path) -> None:
    with old.home.serving(worker=False) as service:
        _repeat_a_request(old, service)
        _complete_an_upload(old, service)
        _release_by_a_waiver(old, service, tmp_path)
    _check_audit_log(old)


def test_work_goes_on(old: Installation, tmp_path: Path) -> None:
    is_whole = os.environ.get("SPARD_SOAK") == "1" and "SPARD_DATABASE_URL" not in old.home.settings
    names = [name for name in old.facts["unfinished"] if is_whole or name in CORE]
    with _receiver() as (url, events):
        change_endpoints(old, old.facts["webhooks"]["heard"]["url"].rpartition("/")[0], url)
        with old.home.serving(worker=True) as service:
            for name in set(old.facts["unfinished"]) - set(names):
                good(_owner(old, service, name).post(f"{JOBS}/{old.ids[name]}/cancel"))
            good(_owner(old, service, "paused").post(f"{JOBS}/{old.ids['paused']}/resume"))
            jobs = {name: _wait_for_end(old, service, name) for name in names}
            for name in ("paused", "interrupted"):
                _check_continuation(old, service, name)
            _check_adapter(old, service, jobs["queued"], tmp_path)
            assert _columns(service, old, "queued") == _columns(service, old, "released")
            service.wait_until(lambda: _is_all_delivered(old, service))
    errors = {name: job["error"]["code"] for name, job in jobs.items() if job["status"] != "succeeded"}
    # What weak defenses come to is no matter of the upgrade; SafeLoRA takes all of it back here.
    assert {code for name, code in errors.items() if name != "safelora"} <= {"safety_gate_failed"}
    assert errors.keys() & set(CORE) == set()
    assert jobs["none"]["safety"]["gate"]["decision"] == "waived"
    assert jobs["on_top"]["safety"]["lineage"] == [old.ids["released"]]
    _check_events(old, events)
    _check_audit_log(old)


def _repeat_a_request(old: Installation, service: Running) -> None:
    """A client that had no answer before the upgrade asks again, and gets the job that its first request made."""
    first = old.facts["requests"]["released"]
    again = _client(old, service, "carol").post(JOBS, json=first["body"], headers=first["headers"])
    assert good(again)["id"] == old.ids["released"]
    other = _client(old, service, "carol").post(JOBS, json=first["body"] | {"seed": 6}, headers=first["headers"])
    assert not other.is_success


def _complete_an_upload(old: Installation, service: Running) -> None:
    carol, content, upload = _client(old, service, "carol"), rows.training(13), old.ids["upload_pending"]
    half = content[len(content) // 2 :]
    second = good(carol.post(f"/v1/uploads/{upload}/parts", files={"data": half}))["id"]
    ask = {"part_ids": [old.ids["part_first"], second]}
    file = good(carol.post(f"/v1/uploads/{upload}/complete", json=ask))["file"]
    assert carol.get(f"/v1/files/{file['id']}/content").content == content


def _release_by_a_waiver(old: Installation, service: Running, folder: Path) -> None:
    """Proposed before the upgrade or after it, approved after it, and verified offline."""
    path = f"/v1/admin/jobs/{old.ids['held']}/waivers"
    ask = {"reason": "A red team studies it on.", "expires_at": int(time.time()) + 86_400}
    alice, bob = _client(old, service, "alice"), _client(old, service, "bob")
    waiver = good(alice.post(path, json=ask))["id"]
    assert _code(alice.post(f"{path}/{waiver}/approve")) == (403, "same_person")
    assert good(bob.post(f"{path}/{waiver}/approve"))["status"] == "approved"
    proposed = good(bob.get(path))["data"][-1]
    assert proposed["id"] == old.ids["waiver_held"]
    assert proposed["expires_at"] < time.time() or good(bob.post(f"{path}/{proposed['id']}/approve"))
    carol, of_job = _client(old, service, "carol"), f"{JOBS}/{old.ids['held']}"
    (folder / "held.tar.gz").write_bytes(carol.get(f"{of_job}/adapter").content)
    (folder / "waiver.json").write_bytes(carol.get(f"{of_job}/waiver").content)
    assert old.home.run("verify", str(folder / "held.tar.gz")).returncode == 1
    verified = old.home.run("verify", str(folder / "held.tar.gz"), "--waiver", str(folder / "waiver.json"))
    assert verified.returncode == 0, verified.stderr
    rejected = alice.post(f"/v1/admin/jobs/{old.ids['rejected']}/waivers", json=ask)
    assert _code(rejected) == (400, "adapter_not_kept")


def _wait_for_end(old: Installation, service: Running, name: str) -> Any:
    path, client = f"{JOBS}/{old.ids[name]}", _owner(old, service, name)
    service.wait_until(lambda: good(client.get(path))["status"] in ("succeeded", "failed", "cancelled"))
    return good(client.get(path))


def _check_continuation(old: Installation, service: Running, name: str) -> None:
    """From its checkpoint: the first step was not trained again, and each step has its numbers."""
    carol, of_job = _client(old, service, "carol"), f"{JOBS}/{old.ids[name]}"
    steps = good(carol.get(f"{of_job}/metrics"))["data"]
    assert [each["step"] for each in steps] == list(range(1, 301))
    assert MARK in steps[0]
    path = f"{of_job}/events?limit=1000"
    kept = _present(_old_answer(old, path)["data"])
    assert good(carol.get(path))["data"][-len(kept) :] == kept


def _check_adapter(old: Installation, service: Running, job: Any, folder: Path) -> None:
    """The key of the old installation signs what is new."""
    carol, archive = _client(old, service, "carol"), folder / "new.tar.gz"
    archive.write_bytes(carol.get(f"{JOBS}/{job['id']}/adapter").content)
    verified = old.home.run("verify", str(archive))
    assert verified.returncode == 0, verified.stderr
    before = _old_answer(old, f"{JOBS}/{old.ids['released']}/safety")
    assert before.keys() - good(carol.get(f"{JOBS}/{job['id']}/safety")).keys() == set()


def _columns(service: Running, old: Installation, name: str) -> set[str]:
    """Which numbers the steps of a job have: they tell with what it was trained."""
    steps = good(_client(old, service, "carol").get(f"{JOBS}/{old.ids[name]}/metrics"))["data"]
    return {column for step in steps for column in step}


def _is_all_delivered(old: Installation, service: Running) -> bool:
    path = f"/v1/webhook_endpoints/{old.facts['webhooks']['faulty']['id']}/deliveries?limit=100"
    found = good(_client(old, service, "carol").get(path))["data"]
    return {each["status"] for each in found} == {"delivered"}


def _check_events(old: Installation, events: list[Event]) -> None:
    """What the receiver did not take before the upgrade reaches it, under the signature that it knows."""
    secret = base64.b64decode(old.facts["webhooks"]["faulty"]["secret"].removeprefix("whsec_"))
    told = set()
    for event in events:
        number, at = event.headers["webhook-id"], event.headers["webhook-timestamp"]
        digest = hmac.new(secret, f"{number}.{at}.".encode() + event.body, hashlib.sha256).digest()
        assert f"v1,{base64.b64encode(digest).decode()}" in event.headers["webhook-signature"].split()
        told.add((json.loads(event.body)["type"], json.loads(event.body)["data"]["id"]))
    assert ("fine_tuning.job.succeeded", old.ids["released"]) in told
    assert ("fine_tuning.job.failed", old.ids["held"]) in told
    assert ("fine_tuning.job.succeeded", old.ids["interrupted"]) in told


def _check_audit_log(old: Installation) -> None:
    """The chain holds, and goes on from the head that was noted before the upgrade."""
    found = old.home.run("audit-log", "verify", "--known", old.facts["audit_log_head"])
    assert found.returncode == 0, found.stderr


@contextmanager
def _receiver() -> Iterator[tuple[str, list[Event]]]:
    """A receiver that takes all; what was sent to the endpoint that used to be faulty."""
    events: list[Event] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.path == "/faulty":
                events.append(Event({name.lower(): value for name, value in self.headers.items()}, body))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """It says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", events
        finally:
            server.shutdown()
            thread.join()


def _strip_new_fields(old: Installation, path: str, answer: bytes) -> bytes:
    """An answer without the fields that newer versions have added, and with the model where it was then."""
    answer = answer.replace(str(old.model).encode(), str(MODEL).encode())
    of_path = ADDED.get(path) or ADDED_OF_JOBS.get(path.partition("?")[0].rpartition("/")[2]) or set[str]()
    added = {name for name in of_path | ADDED_ANYWHERE if f'"{name}":'.encode() in answer}
    if not added:
        return answer
    kept = _drop_names(json.loads(answer), added)
    return json.dumps(kept, separators=(",", ":"), ensure_ascii=False).encode()


def _without_nulls(path: str, answer: bytes) -> bytes:
    """What the old service said of files and events, without the nulls that are left out now."""
    if b":null" not in answer or "/content" in path or not ("/files" in path or "/events" in path):
        return answer
    kept = _present(json.loads(answer))
    return json.dumps(kept, separators=(",", ":"), ensure_ascii=False).encode()


def _at_end(answer: bytes) -> bytes:
    """An answer without what is said otherwise of jobs that have ended: how much is done, and how long it will take."""
    if b'"eta_seconds"' not in answer or not answer.startswith(b"{"):
        return answer
    kept = _drop_names(json.loads(answer), {"percent", "eta_seconds"})
    return json.dumps(kept, separators=(",", ":"), ensure_ascii=False).encode()


def _present(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _present(each) for name, each in value.items() if not (name in ABSENT and each is None)}
    return [_present(each) for each in value] if isinstance(value, list) else value


def _drop_names(value: Any, names: set[str]) -> Any:
    if isinstance(value, dict):
        return {name: _drop_names(each, names) for name, each in value.items() if name not in names}
    return [_drop_names(each, names) for each in value] if isinstance(value, list) else value


def _old_answer(old: Installation, path: str) -> Any:
    """What the old service said."""
    body = next(each["body"] for each in old.facts["answers"] if each["path"] == path)
    return json.loads(base64.b64decode(body))


def _get(old: Installation, service: Running, who: str, path: str) -> bytes:
    answer = _client(old, service, who).get(path, headers={"accept": "application/json"})
    assert answer.is_success, f"{path}: {answer.text}"
    return answer.content


def _client(old: Installation, service: Running, who: str) -> httpx2.Client:
    return service.client(old.facts["secrets"][who])


def _owner(old: Installation, service: Running, name: str) -> httpx2.Client:
    """Who asked for a job."""
    return _client(old, service, old.facts["requests"][name]["who"])


def _code(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def _file(content: bytes) -> dict[str, Any]:
    return {"file": ("train.jsonl", content)}
