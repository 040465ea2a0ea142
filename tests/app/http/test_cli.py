"""The command line: against a real server, and the whole service under `spard up`."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from fastapi.testclient import TestClient
from openai import OpenAI

from tests.app.http.conftest import NO_WEIGHTS, chat, jsonl, pool, rows
from tests.app.http.test_preference_jobs import preference
from tests.spard.parts import write_model
from tests.spard.test_stored_tokenizer import own_tokenizer

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 120.0
SPARD = [sys.executable, "-m", "spard.commands"]
PIPED: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


@pytest.fixture
def train(tmp_path: Path) -> str:
    path = tmp_path / "train.jsonl"
    path.write_bytes(rows(10))
    return str(path)


@pytest.mark.parametrize("noun", ["files", "jobs", "models", "webhooks"])
def test_an_id_like_a_path_deletes_nothing_of_another_kind(run: Any, train: str, noun: str) -> None:
    file = json.loads(run("files", "upload", train, "--json")[1])["id"]
    for wrong in (f"../files/{file}", f"../../v1/files/{file}", f"../../files/{file}", f"./../files/{file}", ""):
        code, printed = run(noun, "delete", wrong)
        assert (code, "An id is neither" in printed) == (1, True), printed
    assert file in run("files", "list")[1]


def test_a_provider_sets_up_and_a_customer_goes_on(run: Any, tmp_path: Path, train: str) -> None:
    model = tmp_path / "tiny"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(NO_WEIGHTS)
    (tmp_path / "pool.jsonl").write_bytes(pool())
    (tmp_path / "suite.jsonl").write_bytes(jsonl({"prompt": "a"}))
    for command in (
        ["models", "add", "tiny", str(model), "--no-try"],
        ["pool", "import", str(tmp_path / "pool.jsonl"), "--name", "general"],
        ["suites", "import", str(tmp_path / "suite.jsonl"), "--name", "attacks", "--kind", "harmful"],
    ):
        assert run(*command)[0] == 0
    create = ("jobs", "create", "--model", "tiny", "--file")
    code, printed = run(*create, train, "--epochs", "2", "--json", "--keep", "best", "--patience", "1")
    job = json.loads(printed)
    assert (code, job["hyperparameters"]["n_epochs"], job["safety"]["defense"]["type"]) == (0, 2, "spard")
    assert job["safety"]["ending"] == {"keep": "best", "patience": 1, "prompts": 40}
    assert job["id"] in run("jobs", "list")[1]
    (tmp_path / "pairs.jsonl").write_bytes(jsonl(*map(preference, range(12))))
    code, printed = run(*create, str(tmp_path / "pairs.jsonl"), "--method", "dpo", "--beta", "0.2", "--json")
    assert (code, json.loads(printed)["method"]["dpo"]["hyperparameters"]["beta"]) == (0, 0.2)
    assert run(*create, train, "--beta", "0.2")[0] == 1
    assert "moving job to queued state" in run("jobs", "events", job["id"])[1]
    assert run("jobs", "adapter", job["id"])[0] == 1
    assert run("jobs", "cancel", job["id"]) == (0, f"{job['id']} cancelled\n")
    assert run("jobs", "follow", job["id"])[0] == 1


PROMPTFOO = """
prompts: ["Capital of {{country}}?"]
tests:
  - {vars: {country: France}, assert: [{type: equals, value: Paris}]}
  - {vars: {country: Peru}, assert: [{type: llm-rubric, value: names Lima}]}
"""


@pytest.mark.parametrize("ending", ["yaml", "json"])
def test_a_promptfoo_configuration_is_imported_as_a_suite(run: Any, tmp_path: Path, ending: str) -> None:
    config = tmp_path / f"capitals.{ending}"
    config.write_text(PROMPTFOO if ending == "yaml" else json.dumps(yaml.safe_load(PROMPTFOO)))
    command = ("suites", "import", str(config), "--name", "capitals", "--kind", "utility")
    code, printed = run(*command, "--dry-run")
    assert (code, "llm-rubric" in printed, "left out: 1 x" in printed) == (0, True, True), printed
    assert json.loads(run("suites", "list", "--json")[1]) == []
    assert run(*command)[0] == 0
    (suite,) = json.loads(run("suites", "list", "--json")[1])
    assert (suite["name"], suite["kind"], suite["rows"]) == ("capitals", "utility", 1)


def test_nothing_is_imported_of_a_configuration_with_faults(run: Any, tmp_path: Path) -> None:
    config = tmp_path / "bad.yaml"
    command = ("suites", "import", str(config), "--name", "bad", "--kind", "benign")
    config.write_text("prompts: [file://a.txt]\ntests: [b.csv]\n")
    code, printed = run(*command)
    assert (code, printed.splitlines()[0]) == (1, "spard: 2 faults in bad.yaml; nothing is imported.")
    assert [name in line for name, line in zip(("a.txt", "b.csv"), printed.splitlines()[1:], strict=True)] == [True] * 2
    config.write_text("prompts: ['{{ q | upper }}']\ntests: [{vars: {q: a}}]\n")
    code, printed = run(*command)
    assert (code, "{{ q | upper }}" in printed) == (1, True)
    assert json.loads(run("suites", "list", "--json")[1]) == []


def test_lists_are_json_for_those_who_ask(run: Any, provider_with_model: TestClient, train: str) -> None:
    assert run("files", "upload", train)[0] == 0
    for command, column in (
        (["models", "list"], "owned_by"),
        (["pool", "list"], "held_out"),
        (["suites", "list"], None),
        (["files", "list"], "filename"),
        (["jobs", "list"], None),
    ):
        code, printed = run(*command, "--json")
        assert code == 0
        assert (column in json.loads(printed)[0]) if column else json.loads(printed) == []


def test_a_key_is_made_with_its_owner_and_shown_once(run: Any) -> None:
    code, printed = run("keys", "create", "org-provider", "laptop", "--owner", "Ada", "--admin", "--json")
    made = json.loads(printed)
    assert (code, made["key"]["owner"], made["key"]["scopes"]) == (0, "Ada", ["admin", "customer"])
    assert re.search(r"sk-spard-\S{51}", run("keys", "create", "org-provider", "laptop")[1])


def test_a_key_that_only_reads_is_made(run: Any) -> None:
    code, printed = run("keys", "create", "org-provider", "board", "--read-only", "--json")
    assert (code, json.loads(printed)["key"]["scopes"]) == (0, ["read"])
    assert run("keys", "create", "org-provider", "board", "--read-only", "--admin")[0] != 0


@pytest.mark.parametrize("end", ["", "/"])
def test_the_address_needs_no_version(run: Any, url: str, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARD_BASE_URL", url.removesuffix("/v1") + end)
    assert run("jobs", "list")[0] == 0


def test_versions_are_deleted(run: Any, tmp_path: Path) -> None:
    content = tmp_path / "pool.jsonl"
    for group, row, options in (
        ("pool", {"prompt": "a", "safe": "b"}, ()),
        ("suites", {"prompt": "a"}, ("--kind", "harmful")),
    ):
        content.write_bytes(jsonl(row))
        made = json.loads(run(group, "import", str(content), "--name", "own", *options, "--json")[1])
        assert run(group, "delete", made["id"])[0] == 0
        assert made["id"] not in run(group, "list", "--json")[1]


def test_a_bad_file_is_shown_line_by_line(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(rows(10) + jsonl(chat("a", "")))
    code, printed = run("files", "upload", str(path))
    assert code == 1
    assert "missing_content" in printed


def test_a_finding_shows_the_piece_of_the_row_that_has_the_fault(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(rows(10) + b'{"messages": [{"role": "User", "content": "rain"}]}\n')
    code, printed = run("files", "upload", str(path))
    assert code == 1
    assert '"User"' in printed


def test_a_refusal_is_one_line(run: Any, train: str) -> None:
    code, printed = run("jobs", "create", "--model", "gpt-7", "--file", train)
    assert (code, printed.count("\n")) == (1, 1)
    assert "gpt-7" in printed
    assert json.loads(run("files", "list", "--json")[1]) == []  # what was uploaded for it is gone


def test_a_wrong_key_is_one_line(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARD_API_KEY", "sk-spard-wrong")
    code, printed = run("jobs", "list")
    assert (code, printed.count("\n")) == (1, 1)
    monkeypatch.delenv("SPARD_API_KEY")
    assert "SPARD_API_KEY" in run("jobs", "list")[1]


def test_a_service_that_is_away_is_one_line(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARD_BASE_URL", "http://127.0.0.1:1/v1")
    code, printed = run("jobs", "list")
    assert (code, printed.count("\n")) == (1, 1)
    assert "spard up" in printed


def test_a_port_in_use_is_one_line(run: Any, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, printed = run("up", "--data", str(tmp_path / "data"), "--port", port, "--no-worker")
    assert (code, printed.count("\n")) == (1, 1)
    assert "--port" in printed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_serves_until_it_is_told_to_stop(number: signal.Signals, tmp_path: Path) -> None:
    with start_service(tmp_path) as service:
        url, key = _read_announcement(service)
        with OpenAI(base_url=url, api_key=key, max_retries=0) as client:
            assert client.models.list().data == []
        service.send_signal(number)
        assert service.wait(timeout=PATIENCE_S) == 0
    assert (tmp_path / "data" / "spard.db").exists()


def test_a_second_start_on_a_folder_names_the_first_one(tmp_path: Path) -> None:
    with start_service(tmp_path) as service:
        url, _ = _read_announcement(service)
        with start_service(tmp_path) as second:
            printed, _ = second.communicate(timeout=PATIENCE_S)
        service.kill()
        service.wait(timeout=PATIENCE_S)
    assert (second.returncode, printed.count("\n")) == (1, 1)
    assert f"already, at {url.removesuffix('/v1')}. Stop it with `spard down" in printed
    with start_service(tmp_path) as service:  # no lock outlives a process that was killed
        assert _read_announcement(service)


def test_the_first_key_is_shown_once(tmp_path: Path) -> None:
    for shown in (True, False):
        with start_service(tmp_path) as service:
            assert (_read_announcement(service)[1] is not None) == shown


def test_the_key_stands_in_a_box_and_among_no_log(tmp_path: Path) -> None:
    with start_service(tmp_path) as service:
        assert service.stdout
        shown = "".join(line for line, _ in zip(service.stdout, range(12), strict=False))
    key = re.search(r"│ +first key +(sk-spard-\S+) +│", shown)
    assert key, shown
    assert f"SPARD_API_KEY={key.group(1)}\n" in shown
    assert "logger=" not in shown


@pytest.mark.parametrize("command", [["audit-log", "verify"], ["objects", "check"], ["keys", "first"]])
def test_a_folder_without_a_database_is_one_line_and_stays_empty(
    command: list[str], run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, printed = run(*command)
    assert (code, printed.count("\n")) == (1, 1)
    assert "There is no database at" in printed
    assert list(tmp_path.glob("data*")) == []


def test_the_worker_is_started_again_and_dies_with_the_service(tmp_path: Path) -> None:
    with start_service(tmp_path, "--worker", PYTHONPATH=_sleeper(tmp_path)) as service:
        first = _child(service)
        first.kill()
        second = _child(service, other_than=first.pid)
        service.kill()
        service.wait(timeout=PATIENCE_S)
        second.wait(timeout=PATIENCE_S)


@contextmanager
def start_service(folder: Path, worker: str = "--no-worker", **environment: str) -> Iterator[subprocess.Popen[str]]:
    """`spard up` in a folder, killed at the end if it still runs."""
    command = [*SPARD, "up", "--data", str(folder / "data"), "--port", "0", worker]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SPARD_")}
    clean["PYTHONPATH"] = str(ROOT)
    with subprocess.Popen(command, **PIPED, cwd=folder, env=clean | environment) as service:
        try:
            yield service
        finally:
            service.kill()


def _read_announcement(service: subprocess.Popen[str]) -> tuple[str, str | None]:
    """The address and the key that it shows, once it listens."""
    assert service.stdout
    lines = []
    for line in service.stdout:
        lines.append(line)
        if "jobs create" in line:
            break
    text = "".join(lines)
    url, key = re.search(r"http://\S+/v1", text), re.search(r"first key +(sk-spard-\S+) +│$", text, re.MULTILINE)
    assert url, text
    return url.group(), key and key.group(1)


def _sleeper(tmp_path: Path) -> str:
    """A package `worker` before ours, which only waits."""
    package = tmp_path / "path" / "worker"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("import time; time.sleep(600)\n")
    return f"{package.parent}{os.pathsep}{ROOT}"


def _child(service: subprocess.Popen[str], other_than: int = 0) -> psutil.Process:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for child in psutil.Process(service.pid).children():
            with suppress(psutil.Error):
                if child.pid != other_than and child.cmdline()[-2:] == ["-m", "worker"]:
                    return child
        time.sleep(0.05)
    raise AssertionError("no worker was started")


def test_a_model_is_tried_before_it_is_offered(run: Any, tmp_path: Path, provider_with_model: TestClient) -> None:
    """By a process of its own: the API, which has no torch, would take a folder without `tokenizer.json`."""
    model = write_model(tmp_path / "tiny")
    code, printed = run("models", "add", "tiny", str(model), "--json")
    assert code == 0, printed
    assert "Trying the model" in printed
    assert "a forward pass" in printed
    assert re.search(r"^LoRA default: q_proj, k_proj, v_proj, o_proj; reaches 2 of 2 layers, [\d.]+ %", printed, re.M)
    assert re.search(r"^  one turn:\n    .*\[It is four\.<\|end\|>\]", printed, re.M)
    (model / "tokenizer.json").unlink()
    code, printed = run("models", "add", "bad name!", "gone/away")
    assert (code, "The name of a model has letters" in printed, "Tried" in printed) == (1, True, False)
    assert "^[A-Za" not in printed
    code, printed = run("models", "add", "other", str(model))
    assert (code, "Traceback" in printed, "The model is not offered" in printed.splitlines()[-1]) == (1, False, True)
    assert "other" not in run("models", "list")[1]


def test_all_weights_are_not_offered_where_transformers_would_read_the_trained_folder_otherwise(
    run: Any, tmp_path: Path, provider_with_model: TestClient
) -> None:
    model = write_model(tmp_path / "tiny", "qwen2", vocab_size=400)
    own_tokenizer().save_pretrained(model)
    code, printed = run("models", "add", "tiny", str(model), "--allow-full-fine-tuning")
    assert (code, "rules of Qwen2Tokenizer, not as in training; leave --allow" in printed) == (1, True), printed
    assert run("models", "add", "tiny", str(model))[0] == 0


def test_what_keeps_jobs_from_ending_well_is_a_warning(
    run: Any, tmp_path: Path, provider_with_model: TestClient
) -> None:
    shutil.rmtree(tmp_path / "model" / "calibration")  # what is known of the judge on this model
    code, printed = run("models", "add", "again", str(tmp_path / "model"), "--no-try")
    assert (code, "warning: The error rate of the judge refusal" in printed) == (0, True)
