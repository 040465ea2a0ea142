"""Make `fixture.tar.xz`: an installation of commit 14c5fa6, on SQLite and on PostgreSQL, with work in every state.

Run in a checkout of that commit with this folder in its tests, as root, since the model lies where a provider keeps it:

    python -m tests.legacy.make

Everything goes through the command line and HTTP. What the service answered at the end is kept word for word.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import httpx2

from tests import servers
from tests.legacy import rows
from tests.legacy.installation import FIXTURE, MODEL
from tests.legacy.model import write_model
from tests.legacy.running import Home, Running, good

JOBS = "/v1/fine_tuning/jobs"
FIRST_SECRET = "sk-spard-legacy-first-key-for-tests-only"
AN_AGE_S = "3000000000"  # the old jobs must not be overdue when they go on
SMALL = {"lora": {"rank": 2}, "hyperparameters": {"n_epochs": 2, "batch_size": 4}, "seed": 5}
GENTLE = SMALL | {"hyperparameters": {"n_epochs": 2, "batch_size": 4, "learning_rate_multiplier": 0.2}}
HARSH = SMALL | {"hyperparameters": {"n_epochs": 10, "batch_size": 4, "learning_rate_multiplier": 2}}
LONG = SMALL | {"hyperparameters": {"n_epochs": 50, "batch_size": 4, "learning_rate_multiplier": 0.05}}
FEW = {"selection": {"min_examples": 6}}
QUICK = FEW | {"audit": {"max_prompts": 20, "max_new_tokens": 32}}
DEFENSES: dict[str, dict[str, Any]] = {
    "closed_form": {"type": "spard", "variant": "closed_form"},
    "reference": {"type": "spard", "variant": "reference"},
    "gated": {"type": "spard", "variant": "gated", "augment": []},
    "preconditioned": {"type": "spard", "variant": "preconditioned", "tau": 2.0, "augment": ["deep", "encodings"]},
    "lisa": {"type": "lisa"},
    "safegrad": {"type": "safegrad"},
    "safeinstr": {"type": "safeinstr"},
    "ptst": {"type": "ptst"},
    "none": {"type": "none"},
}


def main() -> None:
    if MODEL.exists():
        sys.exit(f"{MODEL} is there already; remove it, so that the model in the fixture is the one that was used.")
    write_model(MODEL)
    with TemporaryDirectory() as folder:
        root = Path(folder)
        with ThreadPoolExecutor() as pool:
            made = [pool.submit(_make_sqlite, root / "sqlite"), pool.submit(_make_postgres, root / "postgres")]
        for each in made:
            each.result()
        shutil.copytree(MODEL, root / "model")
        with tarfile.open(FIXTURE, "w:xz", preset=9) as archive:
            for path in sorted(root.rglob("*")):
                archive.add(path, path.relative_to(root).as_posix(), recursive=False, filter=_nobody_s)
    shutil.rmtree(MODEL)
    sys.stdout.write(f"{FIXTURE.name}: {FIXTURE.stat().st_size} bytes\n")


def _nobody_s(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def _make_sqlite(folder: Path) -> None:
    folder.mkdir()
    home = Home(folder, {"SPARD_MAX_RUN_S": AN_AGE_S, "SPARD_ADMIN_KEY": FIRST_SECRET})
    _fill(home)
    _tidy(folder)


def _make_postgres(folder: Path) -> None:
    (folder / "data").mkdir(parents=True)
    key = folder / "data" / "signing_key.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True)
    key.chmod(0o600)
    with servers.postgres() as url:
        settings = {"SPARD_DATABASE_URL": url, "SPARD_SIGNING_KEY": str(key)}
        _fill(Home(folder, settings | {"SPARD_MAX_RUN_S": AN_AGE_S, "SPARD_ADMIN_KEY": FIRST_SECRET}))
        dump = [
            str(servers.postgres_client("pg_dump")),
            "--no-owner",
            "--inserts",
            "--rows-per-insert=100",
            url.replace("+psycopg", ""),
        ]
        text = subprocess.run(dump, check=True, capture_output=True, text=True).stdout
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith("\\")]  # psql's own commands
    (folder / "database.sql").write_text("".join(lines))
    _tidy(folder)


def _tidy(folder: Path) -> None:
    shutil.rmtree(folder / "data" / "work", ignore_errors=True)
    (folder / "service.log").unlink()


def _fill(home: Home) -> None:
    with _receivers() as port:
        with home.serving(worker=True) as service:
            old = _Installation(service, port)
            old.provide()
            old.finish_jobs()
            old.interrupt_jobs()
            service.kill()
        with home.serving(worker=False) as service:
            old.resume(service)
            old.queue_jobs()
            old.begin_upload()
            facts = old.facts() | {"answers": old.answers()}
    found = home.run("audit-log", "verify")
    assert found.returncode == 0, found.stderr
    facts["audit_log_head"] = found.stdout.rsplit(" ", 1)[-1].strip()
    (home.folder / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")


class _Installation:
    """A provider with two customers, from their first request to the day of the upgrade."""

    def __init__(self, service: Running, receiver_port: int) -> None:
        self._service, self._receiver = service, f"http://127.0.0.1:{receiver_port}"
        self._secrets = {"first": FIRST_SECRET}
        self._ids: dict[str, str] = {}
        self._requests: dict[str, dict[str, Any]] = {}
        self._webhooks: dict[str, dict[str, str]] = {}
        self._unfinished: list[str] = []

    def resume(self, service: Running) -> None:
        """The service was started again."""
        self._service = service

    def facts(self) -> dict[str, Any]:
        """What a test has to know of the old installation."""
        return {
            "secrets": self._secrets,
            "ids": self._ids,
            "requests": self._requests,
            "webhooks": self._webhooks,
            "unfinished": self._unfinished,
        }

    def provide(self) -> None:
        """Projects, keys, a model, rows, the first policy."""
        first = self._client("first")
        for name in ("a", "b", "capped"):
            self._ids[f"project_{name}"] = good(first.post("/v1/admin/projects", json={"name": name}))["id"]
        quota = {"max_unfinished_jobs": 50, "max_file_bytes": 10_000_000, "requests_per_minute": 100_000}
        good(first.post(f"/v1/admin/projects/{self._ids['project_a']}/quota", json=quota))
        good(first.post(f"/v1/admin/projects/{self._ids['project_capped']}/quota", json={"max_jobs_per_day": 0}))
        self._give_keys(first)
        model = {"alias": "tiny", "source": str(MODEL), "learning_rate": 0.0005, "allow_full_fine_tuning": True}
        good(first.post("/v1/admin/models", json=model))
        good(first.post("/v1/admin/pools?name=general", files={"file": ("pool.jsonl", rows.pool())}))
        for kind, content in (("harmful", rows.harmful()), ("benign", rows.benign()), ("utility", rows.utility())):
            path = f"/v1/admin/suites?name=our-{kind}&kind={kind}"
            good(first.post(path, files={"file": (f"{kind}.jsonl", content)}))
        good(first.post("/v1/admin/policies", json={"models": ["tiny"], "waivers": True}))

    def _give_keys(self, first: httpx2.Client) -> None:
        a, b, capped = (self._ids[f"project_{name}"] for name in ("a", "b", "capped"))
        asked: dict[str, dict[str, Any]] = {
            "alice": {"project_id": a, "scopes": ["admin", "customer"], "owner": "alice@example.org"},
            "bob": {"project_id": "org-default", "scopes": ["admin"], "owner": "bob@example.org"},
            "carol": {"project_id": a, "scopes": ["customer"]},
            "reader": {"project_id": a, "scopes": ["read"]},
            "dave": {"project_id": b, "scopes": ["customer"], "expires_in_s": 300_000_000},
            "capped": {"project_id": capped},
            "revoked": {"project_id": a},
            "expired": {"project_id": a, "expires_in_s": 60},
            "replaced": {"project_id": a},
        }
        for name, key in asked.items():
            made = good(first.post("/v1/admin/keys", json={"name": name} | key))
            self._secrets[name], self._ids[f"key_{name}"] = made["secret"], made["key"]["id"]
        good(first.delete(f"/v1/admin/keys/{self._ids['key_revoked']}"))
        rotated = good(first.post(f"/v1/admin/keys/{self._ids['key_replaced']}/rotate?overlap_s=0"))
        self._secrets["replacing"] = rotated["secret"]

    def finish_jobs(self) -> None:
        """Jobs that have ended, each in a way of its own, under two policies."""
        self._upload_files()
        self._listen()
        settled = {"suffix": "sums", "metadata": {"team": "green", "run": "1"}, "safety": FEW}
        settled |= {"training_file": self._ids["file_whole"], "validation_file": self._ids["file_validation"]}
        self._create("carol", "released", settled, {"idempotency-key": "order-1"})
        self._create("alice", "measured", {"safety": QUICK | {"defense": {"type": "none"}}})
        unsafe = HARSH | {"safety": {"defense": {"type": "safeinstr"}, "selection": {"min_examples": 1}}}
        self._create("carol", "held", unsafe | {"training_file": self._ids["file_poisoned"]})
        self._create("dave", "waived", unsafe | {"training_file": self._ids["file_of_b"]})
        diverging = {"hyperparameters": {"n_epochs": 2, "batch_size": 4, "learning_rate_multiplier": 1e6}}
        self._create("carol", "diverged", diverging | {"safety": FEW})
        ended = {name: self._wait_for_end(name) for name in ("released", "measured", "held", "waived", "diverged")}
        _check(ended)
        self._create("carol", "deleted", GENTLE | {"model": ended["released"]["fine_tuned_model"], "safety": FEW})
        ended["deleted"] = self._wait_for_end("deleted")
        good(self._client("carol").delete(f"/v1/models/{ended['deleted']['fine_tuned_model']}"))
        self._ids["model_released"] = ended["released"]["fine_tuned_model"]
        self._ids["model_deleted"] = ended["deleted"]["fine_tuned_model"]
        strict = {"defenses": ["spard", "safeinstr"], "waivers": False, "thresholds": {"max_asr": 0.05}}
        good(self._client("first").post("/v1/admin/policies", json=strict))
        self._create("carol", "rejected", unsafe | {"training_file": self._ids["file_poisoned"]})
        ended["rejected"] = self._wait_for_end("rejected")
        _check(ended)
        self._release_by_waiver()
        bounds = {"ranges": {"lora.rank": {"max": 8}}, "models": ["tiny"], "defenses": ["spard", "safegrad", "lisa"]}
        good(self._client("bob").post("/v1/admin/policies", json=bounds))

    def _upload_files(self) -> None:
        files = {"train": rows.training(), "poisoned": rows.poisoned_rows(), "validation": rows.validation()}
        files |= {"bad": b'{"messages": []}\n{"prompt": 1}\nno json\n' + rows.training(9), "spare": rows.training(11)}
        for name, content in files.items():
            self._ids[f"file_{name}"] = self._send("carol", name, content)
        self._ids["file_of_b"] = self._send("dave", "poisoned", rows.poisoned_rows())
        upload = self._announce(rows.training())
        ask = {"part_ids": [self._part(upload, half) for half in _halves(rows.training())]}
        done = good(self._client("carol").post(f"/v1/uploads/{upload}/complete", json=ask))
        self._ids["upload_completed"], self._ids["file_whole"] = upload, done["file"]["id"]

    def _send(self, who: str, name: str, content: bytes) -> str:
        file = {"file": (f"{name}.jsonl", content)}
        sent = good(self._client(who).post("/v1/files", data={"purpose": "fine-tune"}, files=file))
        return str(sent["id"])

    def _announce(self, content: bytes) -> str:
        ask = {"filename": "parts.jsonl", "purpose": "fine-tune", "bytes": len(content), "mime_type": "text/jsonl"}
        return str(good(self._client("carol").post("/v1/uploads", json=ask))["id"])

    def _part(self, upload: str, content: bytes) -> str:
        return str(good(self._client("carol").post(f"/v1/uploads/{upload}/parts", files={"data": content}))["id"])

    def _listen(self) -> None:
        """Endpoints whose receiver takes events, has a fault, and is gone."""
        events = ["fine_tuning.job.succeeded", "fine_tuning.job.failed", "safety.audit.completed"]
        for name, asked in (("heard", events), ("faulty", events), ("gone", events[:1])):
            ask = {"url": f"{self._receiver}/{name}", "events": asked}
            made = good(self._client("carol").post("/v1/webhook_endpoints", json=ask))
            self._webhooks[name] = {"id": made["id"], "secret": made["secret"], "url": made["url"]}

    def _create(self, who: str, name: str, ask: dict[str, Any], headers: dict[str, str] | None = None) -> str:
        whole = {"model": "tiny", "training_file": self._ids["file_train"]} | SMALL | ask
        if whole["model"] != "tiny":
            del whole["lora"]  # that of the adapter it starts from
        self._requests[name] = {"who": who, "body": whole, "headers": headers or {}}
        made = good(self._client(who).post(JOBS, json=whole, headers=headers or {}))
        self._ids[name] = made["id"]
        return str(made["id"])

    def _wait_for_end(self, name: str) -> Any:
        self._service.wait_until(lambda: self._job(name)["status"] in ("succeeded", "failed"))
        return self._job(name)

    def _job(self, name: str) -> Any:
        return good(self._client(self._requests[name]["who"]).get(f"{JOBS}/{self._ids[name]}"))

    def _release_by_waiver(self) -> None:
        year = int(time.time()) + 365 * 86_400
        for name in ("waived", "held"):
            ask = {"reason": "A red team studies this adapter.", "expires_at": year}
            path = f"/v1/admin/jobs/{self._ids[name]}/waivers"
            self._ids[f"waiver_{name}"] = good(self._client("alice").post(path, json=ask))["id"]
        path = f"/v1/admin/jobs/{self._ids['waived']}/waivers/{self._ids['waiver_waived']}/approve"
        good(self._client("bob").post(path))

    def interrupt_jobs(self) -> None:
        """One job is paused in its training; another was, goes on, and is still running when the power fails."""
        for name in ("paused", "interrupted"):
            self._create("carol", name, LONG | {"safety": FEW, "seed": 7})
            self._service.wait_until(lambda name=name: self._step(name) >= 20)  # type: ignore[misc]
            good(self._client("carol").post(f"{JOBS}/{self._ids[name]}/pause"))
            self._service.wait_until(lambda name=name: self._job(name)["status"] == "paused")  # type: ignore[misc]
            self._unfinished.append(name)
        reached = self._step("interrupted")
        good(self._client("carol").post(f"{JOBS}/{self._ids['interrupted']}/resume"))
        self._service.wait_until(lambda: self._step("interrupted") > reached)

    def _step(self, name: str) -> int:
        return int(self._job(name)["safety"]["progress"]["step"] or 0)

    def queue_jobs(self) -> None:
        """Jobs that nobody has begun: each defense, each kind of start; and some that were taken back."""
        for name, defense in DEFENSES.items():
            self._queue("alice", name, {"safety": QUICK | {"defense": defense}})
        unaligned = {"type": "safelora", "base_unaligned": str(MODEL), "layers": 2}
        self._queue("alice", "safelora", {"safety": QUICK | {"defense": unaligned}})
        self._queue("carol", "queued", {"safety": FEW, "priority": -5, "suffix": "later"})
        self._queue("carol", "on_top", {"model": self._ids["model_released"], "safety": FEW})
        whole = {"model": "tiny", "training_file": self._ids["file_train"], "safety": QUICK, "full_fine_tuning": True}
        self._requests["full"] = {"who": "alice", "body": whole | {"seed": 5}, "headers": {}}
        self._ids["full"] = good(self._client("alice").post(JOBS, json=whole | {"seed": 5}))["id"]
        self._unfinished.append("full")
        for name in ("cancelled", "erased"):
            self._create("carol", name, {"safety": FEW})
            good(self._client("carol").post(f"{JOBS}/{self._ids[name]}/cancel"))
        good(self._client("carol").delete(f"{JOBS}/{self._ids['erased']}"))
        self._permit()

    def _queue(self, who: str, name: str, ask: dict[str, Any]) -> None:
        self._create(who, name, GENTLE | ask)
        self._unfinished.append(name)

    def _permit(self) -> None:
        found = good(self._client("carol").get(f"{JOBS}/{self._ids['paused']}/checkpoints"))
        self._ids["checkpoint"] = found["data"][0]["fine_tuned_model_checkpoint"]
        path = f"/v1/fine_tuning/checkpoints/{self._ids['checkpoint']}/permissions"
        good(self._client("alice").post(path, json={"project_ids": [self._ids["project_b"]]}))

    def begin_upload(self) -> None:
        """One of two parts is there."""
        content = rows.training(13)
        self._ids["upload_pending"] = self._announce(content)
        self._ids["part_first"] = self._part(self._ids["upload_pending"], _halves(content)[0])

    def answers(self) -> list[dict[str, Any]]:
        """What the service says now, to the byte."""
        found = []
        for who, path in self._paths():
            answer = self._client(who).get(path, headers={"accept": "application/json"})
            if answer.status_code == 404:  # the file that went with a deleted model
                continue
            assert answer.is_success, f"{path}: {answer.text}"
            found.append({"who": who, "path": path, "body": base64.b64encode(answer.content).decode()})
        return found

    def _paths(self) -> Iterator[tuple[str, str]]:
        """Everything that does not depend on the time."""
        for name in ("released", "measured", "held", "waived", "diverged", "deleted", "rejected", "cancelled"):
            yield from ((self._requests[name]["who"], path) for path in self._job_paths(name))
        for name in self._unfinished:
            of_job, who = f"{JOBS}/{self._ids[name]}", self._requests[name]["who"]
            yield from ((who, f"{of_job}/{what}") for what in ("events?limit=1000", "checkpoints"))
            if name != "interrupted":  # when it will be done depends on the time
                yield who, of_job
        for name in ("train", "bad", "whole", "validation"):
            of_file = f"/v1/files/{self._ids[f'file_{name}']}"
            yield from (("carol", path) for path in (of_file, f"{of_file}/content", f"{of_file}/validation"))
        yield "carol", f"/v1/files/{self._ids['file_train']}/preview?model=tiny"
        yield "carol", f"/v1/files/{self._ids['file_train']}/validation?model=tiny"
        for endpoint in self._webhooks.values():
            yield "carol", f"/v1/webhook_endpoints/{endpoint['id']}"
        yield "carol", f"/v1/webhook_endpoints/{self._webhooks['heard']['id']}/deliveries?limit=100"
        yield from (("carol", path) for path in ("/v1/files", "/v1/models", "/v1/models/tiny", "/v1/webhook_endpoints"))
        yield "carol", f"{JOBS}?limit=100&metadata[team]=green"
        for path in ("models", "pools", "suites", "policies", "projects", "usage", "audit_log?limit=1000"):
            yield "bob", f"/v1/admin/{path}"
        yield "alice", f"/v1/fine_tuning/checkpoints/{self._ids['checkpoint']}/permissions"

    def _job_paths(self, name: str) -> Iterator[str]:
        """What there is to be read of an ended job."""
        of_job, job = f"{JOBS}/{self._ids[name]}", self._job(name)
        yield from (of_job, f"{of_job}/events?limit=1000", f"{of_job}/metrics", f"{of_job}/checkpoints")
        if job["result_files"]:
            yield f"{of_job}/safety"
        if job["result_files"] and job["safety"]["defense"]["type"] != "none":
            yield from (f"{of_job}/safety/selected", f"{of_job}/safety/risky_rows")
        for file in job["result_files"]:
            yield from (f"/v1/files/{file}", f"/v1/files/{file}/content")
        if name in ("released", "measured"):
            yield f"{of_job}/adapter"
        if name == "waived":
            yield f"{of_job}/waiver"

    def _client(self, who: str) -> httpx2.Client:
        return self._service.client(self._secrets[who])


def _check(jobs: dict[str, Any]) -> None:
    """Each job has ended in the way that it is there for."""
    wanted = {"released": None, "measured": None, "deleted": None, "diverged": "non_finite_loss"}
    for name, job in jobs.items():
        code = (job["error"] or {}).get("code")
        assert code == wanted.get(name, "safety_gate_failed"), f"{name}: {job['error']} {job['safety']['gate']}"


def _halves(content: bytes) -> tuple[bytes, bytes]:
    middle = len(content) // 2
    return content[:middle], content[middle:]


@contextmanager
def _receivers() -> Iterator[int]:
    """A customer's receivers of events, on one port."""
    statuses = {"/heard": 204, "/faulty": 500, "/gone": 410}

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(statuses[self.path])
            self.end_headers()

        log_message: Callable[..., None] = lambda *_: None

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        Thread(target=server.serve_forever).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


if __name__ == "__main__":
    main()
