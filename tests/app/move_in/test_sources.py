"""Accounts at Azure and Together: their addresses, headers and names, read into the same folder as OpenAI's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AzureOpenAI

from app.move_in.filing import map_request, notes
from app.move_in.ledger import open_read_only
from app.move_in.read import convert_job, find_source
from tests.app.move_in.conftest import Run
from tests.app.move_in.openai_stub import Json, Stub, row, serve_stub

VERSION = "2025-03-01-preview"
MODEL = "gpt-4o-mini-2024-07-18.ft-0e208cf33a6a466994aff31a08aba678"


def fill(stub: Stub) -> None:
    train = stub.add_file("train.jsonl", b"".join(row(f"What is {i}?", f"It is {i}.") for i in range(5)))
    stub.add_job("ftjob-a", train, fine_tuned_model=MODEL)
    stub.events["ftjob-a"] = [{"id": f"ftevent-{i}", "message": f"Step {i}"} for i in range(3)]


def root(stub: Stub) -> str:
    return stub.url.removesuffix(stub.prefix)


@pytest.fixture(params=[None, VERSION], ids=["v1", "version"])
def azure(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    stub = Stub(prefix="/openai" if request.param else "/openai/v1", header="api-key", api_version=request.param)
    fill(stub)
    stub.deployments = {"shop": MODEL}
    with serve_stub(stub):
        monkeypatch.setenv("AZURE_OPENAI_API_KEY", stub.key)
        monkeypatch.setenv("AZURE_OPENAI_ENDPOINT", root(stub))
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        if request.param:
            monkeypatch.setenv("OPENAI_API_VERSION", request.param)
        yield stub


def test_an_account_at_azure_is_read_and_asked(azure: Stub, run: Run, folder: Path) -> None:
    code, printed = run("read", "--source", "azure")
    assert (code, "1 jobs, 1 files" in printed) == (0, True), printed
    with open_read_only(folder) as ledger:
        assert ledger.all("job") == azure.jobs
        assert ledger.get("history", "ftjob-a")["events"] == azure.events["ftjob-a"]
        assert ledger.get("account", "url") == azure.url
    code, printed = run("golden", "--source", "azure", "--replies", "1", "--deployment", f"{MODEL}=shop")
    assert (code, "5 of 5 replies" in printed) == (0, True), printed
    assert {body["model"] for body in azure.bodies} == {"shop"}
    assert azure.key not in (folder / "ledger.sqlite3").read_bytes().decode(errors="replace")


def test_the_stub_is_what_the_sdk_of_azure_speaks_to(azure: Stub) -> None:
    if azure.api_version is None:
        return
    with AzureOpenAI(azure_endpoint=root(azure), api_version=VERSION, api_key=azure.key, max_retries=0) as client:
        assert [job.fine_tuned_model for job in client.fine_tuning.jobs.list()] == [MODEL]
        assert [file.filename for file in client.files.list()] == ["train.jsonl"]
        messages: Any = [{"role": "user", "content": "Hi"}]
        reply = client.chat.completions.create(model="shop", messages=messages)
        assert reply.choices[0].message.content == "reply to Hi"


def test_an_endpoint_and_the_right_key_are_asked_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AZURE_OPENAI_API_KEY", "AZURE_OPENAI_ENDPOINT", "TOGETHER_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    assert "Set AZURE_OPENAI_API_KEY" in run("read", "--source", "azure")[1]
    assert "Set TOGETHER_API_KEY" in run("read", "--base-url", "https://api.together.xyz/v1")[1]
    monkeypatch.setenv("AZURE_OPENAI_API_KEY", "a-key-of-tests")
    assert "--base-url https://NAME.openai.azure.com" in run("read", "--source", "azure")[1]


@pytest.mark.parametrize(
    ("url", "source"),
    [
        ("https://api.openai.com/v1", "openai"),
        ("https://mine.openai.azure.com", "azure"),
        ("https://mine.services.ai.azure.com/openai/v1/", "azure"),
        ("https://api.together.xyz/v1", "together"),
        ("https://api.together.ai/v1", "together"),
        ("https://together.ai.example/v1", "openai"),
        ("http://127.0.0.1:8000/v1", "openai"),
    ],
)
def test_the_host_tells_whose_api_it_is(url: str, source: str) -> None:
    assert find_source(url) == source


class TogetherStub(Stub):
    """Together's lists, with the fields of the types of its SDK."""

    def get(self, path: str, query: dict[str, list[str]]) -> Json | bytes | None:
        match path.strip("/").split("/"):
            case ["fine-tunes"]:
                return {"data": [*self.jobs.values()]}
            case ["fine-tunes", key, "events"]:
                return {"data": self.events[key]}
            case ["fine-tunes", key, "checkpoints"]:
                return {"data": self.checkpoints[key]}
            case ["files"]:
                return {"data": [*self.files.values()]}
            case ["files", key]:
                return self.files.get(key)
            case ["files", key, "content"]:
                return self.contents.get(key)
        return None  # such as /fine_tuning/jobs and /models

    def chat(self, body: Json) -> Json | None:
        reply = super().chat(body)
        return reply and reply | {"prompt": []}


def together_job(key: str, training_file: str, **fields: Any) -> Json:
    return {
        "id": key,
        "created_at": "2026-03-01T10:00:00Z",
        "updated_at": "2026-03-01T11:00:00Z",
        "status": "completed",
        "user_id": "user-1",
        "model": "meta-llama/Llama-3.2-3B-Instruct",
        "model_output_name": f"org/Llama-3.2-3B-Instruct-shop-{key}",
        "training_file": training_file,
        "validation_file": "",
        "n_epochs": 3,
        "batch_size": 8,
        "learning_rate": 1e-5,
        "random_seed": 7,
        "suffix": "shop",
        "training_method": {"method": "sft", "train_on_inputs": "auto"},
        "training_type": {"type": "Lora", "lora_r": 8, "lora_alpha": 16},
        **fields,
    }


def fill_together(stub: Stub) -> None:
    train = stub.add_file("train.jsonl", b"".join(row(f"What is {i}?", f"It is {i}.") for i in range(5)))
    for file in stub.files.values():
        file |= {"FileType": "jsonl", "processing_status": "COMPLETED"}
    stub.jobs = {"ft-a": together_job("ft-a", train), "ft-b": together_job("ft-b", train, status="error")}
    event = {"object": "fine-tune-event", "created_at": "2026-03-01T10:30:00Z", "type": "epoch_complete"}
    stub.events["ft-a"] = [event | {"message": "Epoch 1", "level": "info"}]
    checkpoint = {"checkpoint_type": "Final", "created_at": "2026-03-01T11:00:00Z", "path": "p", "step": 9}
    stub.checkpoints["ft-a"] = [checkpoint]
    stub.models = [stub.jobs["ft-a"]["model_output_name"]]


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    stub = TogetherStub()
    fill_together(stub)
    with serve_stub(stub):
        monkeypatch.setenv("OPENAI_BASE_URL", stub.url)
        monkeypatch.setenv("TOGETHER_API_KEY", stub.key)
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        yield stub


def test_an_account_at_together_is_read_asked_and_filed(together: Stub, service: Stub, run: Run, folder: Path) -> None:
    code, printed = run("read", "--source", "together")
    assert (code, "2 jobs, 1 files" in printed) == (0, True), printed
    with open_read_only(folder) as ledger:
        jobs = ledger.all("job")
        assert [job["status"] for job in jobs.values()] == ["succeeded", "failed"]
        assert jobs["ft-a"]["together"] == together.jobs["ft-a"]
        history = ledger.get("history", "ft-a")
        assert (history["events"], history["checkpoints"]) == (together.events["ft-a"], together.checkpoints["ft-a"])
        assert ledger.get("account", "offered") == together.models
    code, printed = run("golden", "--source", "together", "--replies", "1")
    assert (code, "5 of 5 replies" in printed) == (0, True), printed
    assert [("max_tokens" in body, "max_completion_tokens" in body) for body in together.bodies] == [(True, False)] * 5
    code, printed = run("file", "--model", "meta-llama/Llama-3.2-3B-Instruct=mine")
    assert code == 0, printed
    (body,) = service.bodies
    assert body["method"] == {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 3, "batch_size": 8}}}
    assert (body["model"], body["suffix"], body["seed"]) == ("mine", "shop", 7)
    assert body["metadata"] == {"moved_from": "ft-a"}


def test_a_page_that_is_no_list_of_together_s_is_an_error(together: Stub, run: Run) -> None:
    together.faults = {"GET /fine-tunes": lambda: (200, {"data": None}, {})}
    code, printed = run("read", "--source", "together")
    assert (code, "/fine-tunes sends no list" in printed) == (1, True)


def test_a_job_of_together_s_is_converted_and_the_rest_is_noted() -> None:
    dpo = together_job("ft-c", "file-1", training_method={"method": "dpo", "dpo_beta": 0.2}, status="compressing")
    found = convert_job(dpo)
    assert (found["status"], found["fine_tuned_model"], found["created_at"]) == ("running", None, 1772359200)
    assert map_request(found, "mine", {"training_file": "file-1"})["method"] == {
        "type": "dpo",
        "dpo": {"hyperparameters": {"n_epochs": 3, "batch_size": 8, "beta": 0.2}},
    }
    full = convert_job(together_job("ft-d", "file-1", training_type={"type": "Full"}, from_checkpoint="ft-c:3"))
    (numbers, weights, start) = notes(full)
    assert re.search("not carried over: learning_rate$", numbers)
    assert ["all weights" in weights, "checkpoint" in start] == [True, True]
    assert "lora_r, lora_alpha" in notes(found)[0]
