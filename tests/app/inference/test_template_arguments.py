"""Both engines ask a model with the template arguments of its base model, as they were when its job was created."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from openai import InternalServerError, OpenAI
from pydantic import SecretStr

from app import db
from app.db.tables import ApiKey, BaseModelEntry
from app.db.tables.job_spec import JobSpec, ModelRef, ObjectRef, PolicyRef
from app.inference.unattested import UnattestedEngines
from app.policies import service as policies
from app.policies.schemas import Policy
from tests.app.http.test_template_arguments import EFFORT
from tests.app.inference.conftest import Lab, serve_lab
from tests.app.inference.vllm_stub import serve_by_stub
from tests.spard.parts import write_model

ASK: Any = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 4}
EFFORTS = {"tiny": "medium", "high": "high", "highest": "the highest of all"}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One folder that is offered three times."""
    model = write_model(tmp_path_factory.mktemp("served") / "tiny")
    (model / "chat_template.jinja").write_text(EFFORT)
    with serve_lab(tmp_path_factory.mktemp("serving"), model, serving_models=4) as lab:
        with db.transaction(lab.app.state.engine) as session:
            for alias, effort in list(EFFORTS.items())[1:]:
                session.add(BaseModelEntry(alias=alias, source=str(model), rendering={"arguments": {"effort": effort}}))
        yield lab


def release(lab: Lab, seed: int, effort: str) -> str:
    """Publish an adapter of a job whose base model had this effort."""
    spec = JobSpec(
        model=ModelRef(alias="tiny", source=str(lab.model), rendering={"arguments": {"effort": effort}}),
        training_file=ObjectRef(id="file-1", sha256="0", storage_key="files/1"),
        policy=PolicyRef(),
        judge="refusal",
    )
    return lab.release(seed, spec=spec)


def prompt_tokens(client: OpenAI, model: str) -> int:
    found: int = client.chat.completions.create(model=model, **ASK).usage.prompt_tokens
    return found


def longer(lab: Lab, models: dict[str, str]) -> dict[str, int]:
    """Return how many tokens longer each model's prompt is than with the effort "medium"; each byte is a token."""
    client = lab.client()
    usual = prompt_tokens(client, "tiny")
    return {model: prompt_tokens(client, model) - usual for model in models}


def count_longer(models: dict[str, str]) -> dict[str, int]:
    return {model: len(effort) - len("medium") for model, effort in models.items()}


def test_models_of_one_folder_are_asked_each_with_its_own_arguments(lab: Lab) -> None:
    models = EFFORTS | {release(lab, 1, "low"): "low", lab.release(2): "medium"}
    assert longer(lab, models) == count_longer(models)
    assert longer(lab, models) == count_longer(models)  # engines that run already


def test_a_vllm_server_is_sent_the_same_prompts(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = {"tiny": "medium", release(lab, 3, "low"): "low"}
    with serve_by_stub(lab, tmp_path, monkeypatch):
        assert longer(lab, models) == count_longer(models)


@contextmanager
def recording(bodies: list[dict[str, Any]]) -> Iterator[str]:
    """A server that notes what it is asked and answers nothing."""

    class Recording(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(500)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Recording) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()


def test_a_server_that_renders_by_itself_is_told_them(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[dict[str, Any]] = []
    serving = lab.app.state.serving
    with recording(bodies) as url:
        settings = lab.settings.model_copy(
            update={"unattested_api_key": SecretStr("sk-none"), "unattested_urls": (url,)}
        )
        monkeypatch.setattr(serving, "_unattested", UnattestedEngines(settings, serving.clients))
        client = lab.client()
        with db.transaction(lab.app.state.engine) as session:
            named = [{"model": name, "base_url": url, "served_as": name} for name in ("tiny", "high")]
            key = session.query(ApiKey).first()
            assert key
            policies.add(session, key.id, Policy.model_validate({"serving": {"unattested": named}}))
        for model in ("tiny", "high"):
            with pytest.raises(InternalServerError):
                client.chat.completions.create(model=model, **ASK)
        with pytest.raises(InternalServerError):
            client.completions.create(model="high", prompt="Hello")
    told = {(body["model"], "messages" in body): body.get("chat_template_kwargs") for body in bodies}
    assert told == {("tiny", True): None, ("high", True): {"effort": "high"}, ("high", False): None}
