"""The official client, unmodified, against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import md5
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient
from openai import OpenAI

from tests.app.http.conftest import Service, rows


@pytest.fixture
def client(service: Service, provider_with_model: TestClient, url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=url, api_key=service.add_key("org-customer", "customer"), max_retries=0) as client:
        yield client


@pytest.fixture
def file_id(client: OpenAI) -> str:
    return client.files.create(file=("train.jsonl", rows(10)), purpose="fine-tune").id


def test_files(client: OpenAI, file_id: str) -> None:
    assert client.files.wait_for_processing(file_id).status == "processed"
    assert client.files.retrieve(file_id).filename == "train.jsonl"
    assert [file.id for file in client.files.list(limit=1)] == [file_id]
    assert client.files.content(file_id).content == rows(10)
    assert client.files.delete(file_id).deleted


def test_a_large_file_streams_both_ways(client: OpenAI) -> None:
    content = rows(40_000)
    file = client.files.create(file=("train.jsonl", content), purpose="fine-tune")
    assert client.files.content(file.id).content == content


def test_a_large_file_that_is_refused_is_answered(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.files.create(file=("train.jsonl", b"PK\x03\x04" + b"a" * 10_000_000), purpose="fine-tune")
    assert caught.value.code == "unsupported_format"


def test_a_file_in_parts(client: OpenAI) -> None:
    content = rows(2000)
    upload = client.uploads.upload_file_chunked(
        file=content,
        filename="train.jsonl",
        bytes=len(content),
        mime_type="text/jsonl",
        purpose="fine-tune",
        part_size=20_000,
        md5=md5(content, usedforsecurity=False).hexdigest(),
    )
    assert (upload.status, upload.file and upload.file.bytes) == ("completed", len(content))


def test_jobs(client: OpenAI, file_id: str) -> None:
    extra = {"safety": {"defense": {"type": "spard", "tau": 0.2}}}
    job: Any = client.fine_tuning.jobs.create(model="lab/tiny-1", training_file=file_id, extra_body=extra)
    assert (job.status, job.safety["defense"]["tau"]) == ("queued", 0.2)
    assert client.fine_tuning.jobs.retrieve(job.id).id == job.id
    events = list(client.fine_tuning.jobs.list_events(job.id, limit=2))
    assert [event.message for event in events][-1] == f"Created fine-tuning job: {job.id}"
    assert client.fine_tuning.jobs.cancel(job.id).status == "cancelled"


def test_jobs_are_listed_over_all_pages(client: OpenAI, file_id: str) -> None:
    made = [client.fine_tuning.jobs.create(model="lab/tiny-1", training_file=file_id).id for _ in range(5)]
    assert [job.id for job in client.fine_tuning.jobs.list(limit=2)] == made[::-1]
    assert list(client.fine_tuning.jobs.list(metadata={"a": "b"})) == []


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["lab/tiny-1"]
    assert client.models.retrieve("lab/tiny-1").object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("ft:lab/tiny-1:org-customer::0")


def test_the_list_of_models_may_end_with_a_slash(client: OpenAI) -> None:
    listed = {name: client.get(name, cast_to=object) for name in ("/models", "/models/")}
    assert listed["/models/"] == listed["/models"]


def test_who_comes_with_azures_client_is_told_what_to_take(client: OpenAI) -> None:
    url = str(client.base_url)
    places: list[dict[str, Any]] = [{"azure_endpoint": url.removesuffix("/v1/")}, {"base_url": url}]
    for where in places:
        with (
            openai.AzureOpenAI(api_key=client.api_key, api_version="2024-10-21", max_retries=0, **where) as azure,
            pytest.raises(openai.NotFoundError, match="in place of AzureOpenAI") as error,
        ):
            azure.chat.completions.create(model="lab/tiny-1", messages=[{"role": "user", "content": "x"}])
        assert error.value.code == "unknown_url"


def test_errors_are_of_the_right_class_and_tell_their_code(client: OpenAI, file_id: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.fine_tuning.jobs.create(model="gpt-7", training_file=file_id)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert caught.value.request_id
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="sk-spard-wrong").models.list()
