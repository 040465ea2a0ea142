"""The page of a new job: the example file, the files that it offers, and a conversion on the way to a job."""

# ruff: noqa: F811 - fixtures are asked for by the names that they are imported under

from __future__ import annotations

from importlib.resources import files as resources

from fastapi.testclient import TestClient

from tests.app.http.conftest import FILES, Upload, chat, jsonl, rows
from tests.app.http.test_common_mistakes import SHAREGPT
from tests.app.http.test_dashboard import SignIn, sign_in, token  # noqa: F401 - a fixture


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
