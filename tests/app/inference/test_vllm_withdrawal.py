"""What is erased, paused or revoked is unloaded from a vLLM server, and its unpacked files are removed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import NotFoundError

from app import db
from app.db.tables import Job, ServedAdapter
from app.objects import served_adapters
from tests.app.inference.conftest import Clock, Lab
from tests.app.inference.vllm_stub import Vllm, serve_by_stub

ASK: Any = {"messages": [{"role": "user", "content": "Hello there"}], "temperature": 0, "max_tokens": 4}
WAIT_S = 60.0


@pytest.fixture
def server(served_lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vllm]:
    with serve_by_stub(served_lab, tmp_path, monkeypatch) as state:
        yield state


def delete_model(lab: Lab, model: str) -> None:
    lab.client().models.delete(model)


def erase_job(lab: Lab, model: str) -> None:
    with db.read(lab.app.state.engine) as session:
        job_id = session.query(Job).filter_by(fine_tuned_model=model).one().id
    answer = httpx2.delete(f"{lab.url}/fine_tuning/jobs/{job_id}", headers={"authorization": f"Bearer {lab.key()}"})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("remove", [delete_model, erase_job])
def test_nobody_is_told_deleted_before_the_server_has_forgotten_it(
    served_lab: Lab, server: Vllm, tmp_path: Path, remove: Callable[[Lab, str], None]
) -> None:
    model, other = served_lab.release(71), served_lab.release(72)
    for each in (model, other):
        served_lab.client().chat.completions.create(model=each, **ASK)
    kept = server.names[1]
    remove(served_lab, model)
    assert server.names == [kept]
    (folder,) = (each for each in (tmp_path / "adapters").iterdir() if (each / "manifest.json").is_file())
    assert kept == f"spard-{folder.name[:24]}"
    with db.read(served_lab.app.state.engine) as session:
        assert [row.model for row in session.query(ServedAdapter).filter_by(server=server.url)] == [other]


def test_a_pause_unloads_and_its_end_loads_again(served_lab: Lab, server: Vllm) -> None:
    client: Any = served_lab.client()
    model = served_lab.release(73)
    before = client.chat.completions.create(model=model, **ASK).choices
    admin = {"authorization": f"Bearer {served_lab.key('org-provider', 'admin')}"}
    url = f"{served_lab.url}/admin/policies"
    assert httpx2.post(url, headers=admin, json={"serving": {"paused": [model]}}).status_code == 200
    with pytest.raises(NotFoundError):
        client.chat.completions.create(model=model, **ASK)
    wait_until(lambda: not server.names)
    assert httpx2.post(url, headers=admin, json={"serving": {"paused": []}}).status_code == 200
    assert client.chat.completions.create(model=model, **ASK).choices == before


def test_a_waiver_that_ends_by_the_clock_unloads(served_lab: Lab, server: Vllm, clock: Clock) -> None:
    model = served_lab.release(74, safety=clock.waiver(hours=1))
    served_lab.client().chat.completions.create(model=model, **ASK)
    clock.ahead += timedelta(hours=2)
    wait_until(lambda: not server.names)


def test_an_erasure_while_the_server_is_away_is_not_told_as_done(
    served_lab: Lab, server: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = served_lab.release(75)
    served_lab.client().chat.completions.create(model=model, **ASK)
    monkeypatch.setattr(served_adapters.require_unloaded, "__defaults__", (0.05,))
    engine: Any = served_lab.app.state.serving.engines
    monkeypatch.setattr(engine, "unload_withdrawn", _away)
    answer = httpx2.delete(f"{served_lab.url}/models/{model}", headers={"authorization": f"Bearer {served_lab.key()}"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "still_loaded")


async def _away() -> None:
    raise ConnectionError


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)
