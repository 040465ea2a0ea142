"""`spard up` with the small lab's model, and a customer who has one job that succeeded, for all clients in turn."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from openai import OpenAI

from tests.legacy.running import Home, Running, good

ADMIN_KEY = "sk-spard-key-of-the-client-matrix-only"
SEED = 31


@dataclass(frozen=True)
class ClientService:
    """What each client is told, and what each reader of archives is handed."""

    running: Running
    key: str
    admin_key: str
    folder: Path
    job: str
    base: Path
    adapter: Path

    @property
    def url(self) -> str:
        return f"{self.running.url}/v1"


def make_lab(folder: Path) -> Path:
    """The small lab, made once (about a minute)."""
    if not (folder / "lab.json").exists():
        make = [sys.executable, "-m", "spard_lab.lab", "make", str(folder), "--seed", str(SEED)]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return folder


@contextmanager
def provider_service(folder: Path, lab: Path) -> Iterator[ClientService]:
    """A service in an empty `folder`, as a provider starts it."""
    judged = str(lab / "model" / "calibration" / "judge.json")  # of the same weights and tokens
    settings = {"SPARD_ADMIN_KEY": ADMIN_KEY, "SPARD_JUDGE_ERRORS": judged, "SPARD_BAD_FILES": "fail"}
    home = Home(folder, settings)
    base = _of_2024(lab / "model", folder / "models" / "lab")
    (folder / "bad.jsonl").write_text('{"messages": []}\n' * 20)
    for name, rows in (("train", slice(0, 200)), ("validation", slice(200, 240))):
        lines = (lab / "train.jsonl").read_text().splitlines(keepends=True)[rows]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    with home.serving(worker=True) as running:
        provider = Home(folder, {"SPARD_BASE_URL": f"{running.url}/v1", "SPARD_API_KEY": ADMIN_KEY})
        _run(provider, "models", "add", "lab", str(base))
        _run(provider, "pool", "import", str(lab / "pool.jsonl"), "--name", "general-safe")
        project = good(running.client(ADMIN_KEY).post("/v1/admin/projects", json={"name": "clients"}))["id"]
        keys = [
            json.loads(_run(provider, "keys", "create", project, name, *options, "--json"))["secret"]
            for name, options in (("customer", []), ("admin", ["--admin"]))
        ]
        job = finish_a_job(running, keys[0], folder / "train.jsonl")
        adapter = unpack(running, keys[0], job, folder / "archive")
        yield ClientService(running, keys[0], keys[1], folder, job, base, adapter)


def _of_2024(model: Path, folder: Path) -> Path:
    """The same base model with its tokenizer's files as transformers 4 wrote them, as most bases have them."""
    shutil.copytree(model, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = [" ".join(pair) for pair in tokenizer["model"]["merges"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["backend"]
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["chat_template"] = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def finish_a_job(running: Running, key: str, file: Path) -> str:
    """A defended job to its end, which the gate has let through."""
    with OpenAI(base_url=f"{running.url}/v1", api_key=key) as client:
        made = client.files.create(file=file, purpose="fine-tune")
        job = client.fine_tuning.jobs.create(model="lab", training_file=made.id)
        running.wait_until(lambda: client.fine_tuning.jobs.retrieve(job.id).finished_at is not None)
        ended = client.fine_tuning.jobs.retrieve(job.id)
        assert ended.status == "succeeded", ended.error
        return job.id


def unpack(running: Running, key: str, job: str, folder: Path) -> Path:
    """The archive of a job as its customer unpacks it; the folder that holds the adapter."""
    archive = folder.with_suffix(".tar.gz")
    answer = running.client(key).get(f"/v1/fine_tuning/jobs/{job}/adapter", follow_redirects=True)
    assert answer.is_success, answer.text
    archive.write_bytes(answer.content)
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return next(folder.rglob("adapter_config.json")).parent


def _run(home: Home, *arguments: str) -> str:
    done = home.run(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
