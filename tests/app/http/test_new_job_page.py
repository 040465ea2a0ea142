"""The page of a new job: the example file, the files that it offers, and a conversion on the way to a job."""

# ruff: noqa: F811 - fixtures are asked for by the names that they are imported under

from __future__ import annotations

import json
import re
from importlib.resources import files as resources
from pathlib import Path

from fastapi.testclient import TestClient

from app import db
from app.db.tables import BaseModelEntry, Job
from tests.app.http.conftest import FILES, Service, Upload, chat, jsonl, rows
from tests.app.http.test_common_mistakes import SHAREGPT
from tests.app.http.test_dashboard import SignIn, sign_in, token  # noqa: F401 - a fixture
from tests.spard.parts import byte_tokenizer


def test_the_example_file_can_be_trained_on(
    sign_in: SignIn, provider_with_model: TestClient, customer: TestClient, upload: Upload
) -> None:
    page = sign_in().get("/jobs/new").text
    assert 'download="example.jsonl"' in page
    made = upload((resources("app.dashboard") / "static" / "example.jsonl").read_bytes()).json()
    found = customer.get(f"{FILES}/{made['id']}/validation").json()
    assert (found["status"], found["rows"], found["findings"]) == ("processed", 12, [])


def test_only_files_that_can_be_trained_on_are_offered(
    sign_in: SignIn, provider_with_model: TestClient, upload: Upload
) -> None:
    good = upload(rows(10), name="good.jsonl").json()["id"]
    upload(rows(9), name="short.jsonl")
    upload(rows(10) + jsonl(chat("a", "")), name="faulty.jsonl")
    upload(rows(10), name="made-by-a-job.jsonl", purpose="evals")
    page = sign_in().get("/jobs/new").text
    assert f'href="/jobs/new?file={good}"' in page
    assert page.count('href="/jobs/new?file=') == 1


def test_a_file_is_converted_on_the_way_to_a_job(
    sign_in: SignIn, provider_with_model: TestClient, upload: Upload
) -> None:
    file_id, browser = upload(jsonl(*SHAREGPT)).json()["id"], sign_in()
    page = browser.get(f"/jobs/new?file={file_id}")
    assert "Press Convert" in page.text
    form = {"form_token": token(page), "then": "job"}
    made = browser.post(f"/files/{file_id}/convert", data=form)
    assert made.url.path == "/jobs/new"
    assert made.url.params["file"] != file_id
    assert "Start the job" in made.text


def test_the_form_says_what_the_model_is_and_takes_rows_to_measure_on(
    sign_in: SignIn, service: Service, provider_with_model: TestClient, upload: Upload, tmp_path: Path
) -> None:
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 2048}')
    (tmp_path / "model" / "model.safetensors").write_bytes(_weights(1200, 1000))
    file, short = upload(rows(12)).json()["id"], upload(rows(3), name="validation.jsonl").json()["id"]
    browser = sign_in()
    page = browser.get(f"/jobs/new?file={file}")
    assert "lab/tiny-1 (1.2M parameters, context of 2,048 tokens)" in page.text
    assert "validation.jsonl (3 rows" in page.text
    form = {"form_token": token(page), "model": "lab/tiny-1", "training_file": file, "defense": "spard"}
    refused = browser.post("/jobs/new", data=form | {"held_out_rows": "some"})
    assert 'id="held_out_rows-fault"' in refused.text
    wanted = {"off": 0, "7": 7, "auto": 100, "": 100}
    for words, held_out in wanted.items():
        made = browser.post("/jobs/new", data=form | {"held_out_rows": words, "validation_file": short})
        job_id = made.url.path.removeprefix("/jobs/")
        with db.transaction(service.app.state.engine) as session:
            job = session.get_one(Job, job_id)
            assert (job.spec.held_out_rows, job.validation_file) == (held_out, short), words
    again = browser.get(f"/jobs/new?from={job_id}").text
    assert f'<option value="{short}" selected>' in again
    assert 'name="held_out_rows" value="100"' in again


def test_the_estimate_names_every_stage(
    sign_in: SignIn, service: Service, provider_with_model: TestClient, upload: Upload, tmp_path: Path
) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "model")
    file = upload(rows(60)).json()["id"]
    with db.transaction(service.app.state.engine) as session:
        entry = session.get_one(BaseModelEntry, "lab/tiny-1")
        entry.rates = {"generated_per_s": 100.0, "reply_tokens": 20.0, "trained_per_s": 1000.0, "load_s": 2.0}
    path = f"/jobs/new/preview?file={file}&model=lab/tiny-1"
    part = sign_in().get(path, headers={"hx-request": "true"}).text
    assert re.search(r'<section class="estimate" id="estimate"[^>]* hx-swap-oob="true">', part)
    assert "Asking requests of your own rows" in part
    assert re.search(r"About [1-9]", part)


def test_without_a_tokenizer_the_estimate_is_shown_all_the_same(
    sign_in: SignIn, provider_with_model: TestClient, upload: Upload
) -> None:
    file = upload(rows(60)).json()["id"]
    page = sign_in().get(f"/jobs/new/preview?file={file}&model=lab/tiny-1").text
    assert "steps over about" in page
    assert "tokenizer" in page


def _weights(*shape: int) -> bytes:
    """The header of a safetensors file with one tensor, and its zeros."""
    size = 2 * shape[0] * shape[1]
    header = json.dumps({"w": {"dtype": "BF16", "shape": shape, "data_offsets": [0, size]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)
