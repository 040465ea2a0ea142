"""The pages for customers and providers, walked through as they stand on one service: every command and every script.

What a reader fills in is filled in here: the address, the key, the model's folder, ids. Commands of `spard` run in this
process, as each would take seconds to start.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from app.settings import get_settings
from spard.commands import main
from tests import blocks
from tests.app.move_in import openai_stub
from tests.judge_server import judge_server, knowing_what_complies
from tests.legacy import rows
from tests.legacy.installation import unpack
from tests.legacy.running import Home

KEY = "sk-spard-walk-0123456789abcdef"
STARTED = ("pip ", "spard up ")  # what the fixture has done
TRAINS = "spard jobs create --model my-model --file train.jsonl --follow"  # tests/test_production.py runs this line
_ASKED = 30  # prompts
_MOVED = [json.loads(line)["prompt"] for line in rows.benign().splitlines()[:4]]  # what an old account's model answered
# In the order of a reader; each goes on with what the ones before left.
PAGES = (
    "README.md",
    "docs/quickstart.md",
    "docs/serving.md",
    "docs/checkpoints.md",
    "docs/jobs.md",
    "docs/adapters.md",
    "docs/provider.md",
)


@dataclass
class Walk:
    """A reader at a terminal: what they know, what they have typed, and the names of their last script."""

    there: dict[str, str]
    typed: set[str] = field(default_factory=set)
    names: dict[str, Any] = field(default_factory=dict)

    def go(self, page: str) -> None:
        """Do what the blocks of a page say, in order."""
        for block in blocks.to_run(page, "bash", "python"):
            if block.kind == "python":
                self._script(self._fill(block.text))
            else:
                self.type(block.text)

    def type(self, lines: str) -> None:
        """Do what the lines of a terminal say."""
        for line in lines.replace("\\\n", "").splitlines():
            self._line(self._fill(line))

    def learn(self, client: OpenAI) -> None:
        """Take the id of the job that is done, and end those that nobody waits for."""
        jobs = list(client.fine_tuning.jobs.list())
        done = next(job for job in jobs if job.status == "succeeded")
        self.there |= {"ftjob-...": done.id, "file-...": done.training_file, "adapter.tar.gz": "adapter.tar.gz"}
        for job in jobs:
            if job.status in ("queued", "running"):
                client.fine_tuning.jobs.cancel(job.id)

    def _fill(self, text: str) -> str:
        for name, value in self.there.items():
            text = text.replace(name, value)
        return text

    def _script(self, text: str) -> None:
        with redirect_stdout(io.StringIO()):
            exec(compile(text.replace("sleep(5)", "sleep(0.2)"), "script", "exec"), self.names)  # noqa: S102 - ours

    def _line(self, line: str) -> None:
        words = shlex.split(os.path.expandvars(line), comments=True)
        command = shlex.join(words)
        if command in self.typed or not words or line.startswith(STARTED) or line == TRAINS:
            return
        self.typed.add(command)
        if words[0] == "export":
            os.environ |= {name: value for name, _, value in (word.partition("=") for word in words[1:])}
        elif words[0] == "spard":
            target = words.index(">") if ">" in words else len(words)
            told = _spard(words[1:target])
            if target < len(words):
                Path(words[target + 1]).write_text(told)
        else:
            flags = " --silent --fail-with-body" if words[0] == "curl" else ""
            done = subprocess.run(["bash", "-c", f"{line}{flags}"], capture_output=True, check=False)
            assert done.returncode == 0, done.stdout


def _spard(arguments: list[str]) -> str:
    told = io.StringIO()
    get_settings.cache_clear()
    with redirect_stdout(told), pytest.raises(SystemExit) as ended:
        main(arguments)
    assert not ended.value.code, f"spard {shlex.join(arguments)}: {told.getvalue()}"
    return told.getvalue()


@pytest.fixture
def walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Walk]:
    """A service with nothing in it, and a folder with the files that the pages name."""
    model = unpack(tmp_path / "old", "sqlite").model
    here = tmp_path / "here"
    here.mkdir()
    for name, content in _files().items():
        (here / name).write_bytes(content)
    with judge_server() as judge:
        judge.answer = knowing_what_complies("Steal", "how to steal")
        settings = {
            "SPARD_ADMIN_KEY": KEY,
            "SPARD_JUDGE": "llm",
            "SPARD_JUDGE_BASE_URL": judge.url,
            "SPARD_JUDGE_API_KEY": "sesame",
            "SPARD_GATE_ALLOW_UNMEASURED_JUDGE": "true",
            "SPARD_CHECKPOINT_PROMPTS": "0",
            "SPARD_GATE_CONFIDENCE": "0.5",  # so that few prompts decide
        }
        home = Home(here, settings)
        with home.serving(worker=True) as service:
            _settle(monkeypatch, home.environment(), here)
            there = {
                "http://127.0.0.1:8000": service.url,
                "sk-spard-...": KEY,
                "/models/Qwen2.5-7B-Instruct": f"{model} --learning-rate 1e-6",  # its job changes next to nothing
                "https://example.org/spard": "http://127.0.0.1:9/spard",
            }
            yield Walk(there)
    get_settings.cache_clear()


def _settle(monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str], folder: Path) -> None:
    """Work in the folder, with these variables; what the walk exports goes with the test."""
    monkeypatch.chdir(folder)
    for name in ("SPARD_BASE_URL", "SPARD_API_KEY"):
        monkeypatch.setenv(name, "")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def _files() -> dict[str, bytes]:
    training = [json.loads(line) for line in rows.training().splitlines()]
    for row in training:
        row["messages"][1]["content"] = rows.ANSWER  # what the model says anyway
    return {
        "general-safe.jsonl": rows.pool(),
        "redteam.jsonl": b"".join(rows.harmful().splitlines(keepends=True)[:_ASKED]),
        "train.jsonl": b"".join(json.dumps(row).encode() + b"\n" for row in training),
    }


@pytest.mark.filterwarnings("ignore:unclosed", "ignore::pytest.PytestUnraisableExceptionWarning")  # as people write
def test_the_pages_run_as_they_stand(walk: Walk) -> None:
    walk.go("README.md")
    assert walk.names["job"].status == "succeeded", walk.names["job"].error
    assert walk.names["reply"].choices[0].message
    with OpenAI(base_url=os.environ["SPARD_BASE_URL"], api_key=KEY) as client:
        for page in PAGES[1:]:
            walk.learn(client)
            walk.go(page)
    assert TRAINS in (blocks.ROOT / "docs" / "deployment.md").read_text()
    assert {"spard verify adapter.tar.gz --public-key provider.pub", "spard objects check"} <= walk.typed


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Iterator[openai_stub.Stub]:
    """An account with one job. Its model says what the service's base model says at every other prompt."""
    account = openai_stub.Stub(say=lambda body, n: old.get(body["messages"][-1]["content"], "something else"))
    old = dict.fromkeys(_MOVED[::2], rows.ANSWER)
    validation = b"".join(openai_stub.row(prompt, rows.ANSWER) for prompt in _MOVED)
    train = account.add_file("train.jsonl", _files()["train.jsonl"])
    numbers = {"hyperparameters": {"n_epochs": 1, "batch_size": 8}}
    account.add_job(
        "ftjob-old",
        train,
        model="gpt-4o-mini-2024-07-18",
        validation_file=account.add_file("valid.jsonl", validation),
        method={"type": "supervised", "supervised": numbers},
    )
    with openai_stub.serve_stub(account):
        monkeypatch.setenv("OPENAI_API_KEY", account.key)
        monkeypatch.setenv("OPENAI_BASE_URL", account.url)
        yield account


def test_an_account_moves_in_as_the_page_says(walk: Walk, account: openai_stub.Stub) -> None:
    """The job is trained and audited here, and its model is compared with the replies that were kept."""
    walk.type(next(block.text for block in blocks.to_run("README.md", "bash") if "suites import" in block.text))
    walk.there |= {"OPENAI_API_KEY=...": f"OPENAI_API_KEY={account.key}", "SPARD_API_KEY=...": f"SPARD_API_KEY={KEY}"}
    walk.go("docs/move-in.md")

    with OpenAI(base_url=os.environ["SPARD_BASE_URL"], api_key=KEY) as client:
        (job,) = client.fine_tuning.jobs.list()
        model = job.fine_tuned_model or ""
        asked: list[Any] = [[{"role": "user", "content": prompt}] for prompt in _MOVED[::2]]
        found = [client.chat.completions.create(model=model, messages=each, temperature=0) for each in asked]
    assert (job.status, job.metadata) == ("succeeded", {"moved_from": "ftjob-old"})
    assert (job.trained_tokens or 0) > 0
    assert job.safety["gate"]["decision"] == "pass"  # type: ignore[attr-defined]
    same = sum(each.choices[0].message.content == rows.ANSWER for each in found) / len(_MOVED)
    (compared,) = json.loads(Path("move/comparison.json").read_text())
    exact = compared["measures"]["exact"]
    assert (compared["new"], same > 0) == (model, True)
    assert [exact[name]["value"] for name in ("new_old", "old_old", "new_new")] == [same, 1.0, 1.0]
