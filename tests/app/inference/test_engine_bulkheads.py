"""What one project fetches or breaks keeps no other from its engine."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from app.errors import TooManyRequests, Unavailable
from app.inference import embedded, released
from app.inference.embedded import EmbeddedEngines
from app.inference.engine_process import EngineProcess
from app.inference.released import Archive, ReleasedModel
from app.settings import Settings
from app.storage import open_storage
from spard.isolation import sandbox
from tests.spard.parts import write_model

ANSWERS = """
import json, sys
print(json.dumps({"kind": "ready", "digest": "0", "positions": 1}), flush=True)
for line in sys.stdin:
    if line.startswith("{") and json.loads(line).get("op") == "generate":
        print(json.dumps({"kind": "started", "id": json.loads(line)["id"], "prompt_tokens": 1}), flush=True)
"""
ASK: Any = {"adapter": None, "messages": [], "json_schema": None}


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedEngines]:
    """Engines whose processes say that they are ready, and begin each reply."""
    monkeypatch.setattr(sandbox, "isolated_command", lambda *order: [sys.executable, "-c", ANSWERS])
    monkeypatch.setattr(embedded, "_LOOK_S", 0.01)
    found = EmbeddedEngines(Settings(data_dir=tmp_path, serving_reserve_mb=0), open_storage(f"file://{tmp_path}"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> ReleasedModel:
    return ReleasedModel("tiny", "tiny", str(write_model(tmp_path_factory.mktemp("base") / "model")), None)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch, base: ReleasedModel) -> Iterator[Event]:
    """A storage that sends no bytes before the event is set."""
    thawed = Event()

    def fetch(storage: object, settings: object, archive: object, folder: Path) -> None:
        thawed.wait()
        write_model(folder)

    monkeypatch.setattr(released, "fetch_archive", fetch)
    yield thawed
    thawed.set()


def whole(number: int) -> ReleasedModel:
    """A model of which all weights were trained."""
    return ReleasedModel(f"ft:{number}", "tiny", "", None, Archive("key", f"{number}", "ftjob-1", is_lora=False))


def test_a_fetch_that_hangs_keeps_nobody_from_an_engine(
    engines: EmbeddedEngines, base: ReleasedModel, storage: Event
) -> None:
    async def ask() -> None:
        fetched = asyncio.create_task(engines.start(whole(1), "org-loud", ASK))
        joined = asyncio.create_task(engines.start(whole(1), "org-loud", ASK))
        await asyncio.sleep(0)
        await engines.start(base, "org-quiet", ASK)  # started while the fetch hangs
        await engines.start(base, "org-quiet", ASK)  # warm
        assert not fetched.done()
        with pytest.raises(TooManyRequests, match="Another model of this project"):
            await engines.start(whole(2), "org-loud", ASK)
        other = asyncio.create_task(engines.start(whole(3), "org-other", ASK))
        await asyncio.sleep(0)
        storage.set()
        found = await asyncio.gather(fetched, joined, other, return_exceptions=True)
        refused = [isinstance(each, TooManyRequests) and "memory" in each.message for each in found]
        # Two engines may run, and replies are being written: the fetch that comes second finds no room.
        assert refused in ([False, False, True], [True, True, False]), found

    asyncio.run(ask())
    assert len(engines.pids()) == 2


def test_an_engine_that_has_just_started_waits_for_the_requests_that_it_was_started_for(
    engines: EmbeddedEngines, base: ReleasedModel
) -> None:
    """They are resumed by the event loop, while another thread may look for an engine that nobody needs."""

    async def ask() -> None:
        started = await engines._ready(base, "org-quiet")
        assert not started.is_idle
        stream = started.generate("org-quiet", ASK, 8)
        assert (await stream.next(60))["kind"] == "started"
        stream.cancel()
        assert started.is_idle

    asyncio.run(ask())


def test_a_warm_engine_is_found_without_the_thread_that_starts_engines(
    engines: EmbeddedEngines, base: ReleasedModel
) -> None:
    blocked = Event()

    async def ask() -> None:
        await engines.start(base, "org-quiet", ASK)
        engines._keeper.submit(blocked.wait)
        await engines.start(base, "org-quiet", ASK)

    try:
        asyncio.run(ask())
    finally:
        blocked.set()


def test_who_waits_for_a_fetch_is_told_to_come_back(
    engines: EmbeddedEngines, storage: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines._settings, "serving_start_s", 0.05)

    async def ask() -> None:
        for _ in range(2):
            with pytest.raises(Unavailable) as waits:
                await engines.start(whole(1), "org-loud", ASK)
            assert waits.value.code == "engine_timeout"

    asyncio.run(ask())


def test_an_engine_that_does_not_step_is_replaced_and_its_requests_hear_of_it(
    engines: EmbeddedEngines, base: ReleasedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask() -> None:
        stream, _, _ = await engines.start(base, "org-loud", ASK)
        (stalled,) = engines._engines.values()
        stalled._process.send_signal(signal.SIGSTOP)  # as a loop that does not come round, which a kill ends too
        loading = stalled.load("0", lambda folder: "0")
        monkeypatch.setattr(engines._settings, "serving_step_s", 0.2)
        for waits in (stream.next(60), asyncio.wrap_future(loading)):
            with pytest.raises(Unavailable) as told:
                await waits
            assert told.value.code == "engine_stalled"
        monkeypatch.setattr(engines._settings, "serving_step_s", 90.0)
        await engines.start(base, "org-quiet", ASK)
        assert not stalled.is_alive
        assert not stalled.folder.exists()

    asyncio.run(ask())


def test_an_engine_that_waits_for_work_is_not_taken_for_stalled(engines: EmbeddedEngines, base: ReleasedModel) -> None:
    engine: EngineProcess = engines._start_engine(base)
    assert engine.silent_s == 0 or engine.ready.done()
    engine.ready.result(60)
    engine.heard_at -= 80
    engine._hear({"kind": "stepped"})
    assert engine.silent_s < 80
