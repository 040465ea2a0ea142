"""Engines give way to others when nobody waits for them, and leave nothing on the disk."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.errors import TooManyRequests
from app.inference import released
from app.inference.embedded import EmbeddedEngines
from app.inference.engine_process import EngineProcess
from app.inference.protocol import Proof, busy
from app.inference.released import Archive, ReleasedModel
from app.settings import Settings
from app.storage import open_storage
from spard.isolation import sandbox
from tests.spard.parts import write_model

PROOF: Proof = {"tensor_digest": "sha256:0", "max_difference": 0.0, "difference_to_base": 1.0}
WAITS = [sys.executable, "-c", "import sys; sys.stdin.read()"]


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedEngines]:
    """Engines whose processes say nothing and wait; one at a time."""
    monkeypatch.setattr(sandbox, "isolated_command", lambda *order: WAITS)
    settings = Settings(data_dir=tmp_path / "data", serving_models=1, serving_reserve_mb=0)
    found = EmbeddedEngines(settings, open_storage(settings.storage()))
    yield found
    found.close()


def start_engine(engines: EmbeddedEngines, source: Path) -> EngineProcess:
    return engines._start_engine(ReleasedModel("tiny", "tiny", str(source), None))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def test_one_that_is_being_started_does_not_give_way(engines: EmbeddedEngines, model: Path) -> None:
    engine = start_engine(engines, model)
    with pytest.raises(TooManyRequests):
        engines._make_room(1)
    engine._hear({"kind": "ready", "digest": "0", "positions": 1})
    with pytest.raises(TooManyRequests):  # the requests that waited are about to come
        engines._make_room(1)
    engine._expected_until = 0.0  # they have gone
    engines._make_room(1)
    assert not engine.is_alive


def test_one_that_loads_an_adapter_does_not_give_way(engines: EmbeddedEngines, model: Path) -> None:
    engine = start_engine(engines, model)
    engine._hear({"kind": "ready", "digest": "0", "positions": 1})
    engine.load("0", lambda folder: "0")
    with pytest.raises(TooManyRequests):
        engines._make_room(1)
    engine._expected_until = 0.0
    engine._hear({"kind": "loaded", "adapter": "0", "proof": PROOF})
    with pytest.raises(TooManyRequests):
        engines._make_room(1)
    engine._expected_until = 0.0
    engines._make_room(1)
    assert not engine.is_alive


def test_who_waits_for_its_start_is_told_why_it_was_ended(engines: EmbeddedEngines, model: Path) -> None:
    engine = start_engine(engines, model)
    engine.end(busy("The memory is needed."))
    with pytest.raises(TooManyRequests, match="needed"):
        engine.ready.result()


def test_one_that_was_not_started_leaves_no_model(
    engines: EmbeddedEngines, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_engine(engines, model)
    monkeypatch.setattr(released, "fetch_archive", lambda storage, settings, archive, folder: write_model(folder))
    whole = ReleasedModel("ft:tiny", "tiny", str(model), None, Archive("key", "1", "ftjob-1", is_lora=False))
    before = folders(engines)
    for _ in range(2):
        with pytest.raises(TooManyRequests):
            engines._fetch_and_start(whole)
    assert folders(engines) == before


def test_one_that_has_died_leaves_nothing(
    engines: EmbeddedEngines, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_supervise", lambda: None)
    first: Any = start_engine(engines, model)
    first._process.kill()
    first._process.wait()
    second = start_engine(engines, model)
    assert second is not first
    assert folders(engines) == {second.folder.name}


def folders(engines: EmbeddedEngines) -> set[str]:
    return {each.name for each in engines._folders.own_folder().iterdir() if each.is_dir()}


def test_a_project_that_fills_the_queue_keeps_no_other_out(engines: EmbeddedEngines, model: Path) -> None:
    engine = start_engine(engines, model)
    rows = engines._settings.serving_rows

    async def fill_queue() -> None:
        ask: Any = {"messages": []}
        for _ in range(2 * rows):
            engine.generate("org-loud", ask, 2 * rows)
        with pytest.raises(TooManyRequests):
            engine.generate("org-loud", ask, 2 * rows)
        for _ in range(rows):
            assert engine.generate("org-quiet", ask, 2 * rows)
        with pytest.raises(TooManyRequests):
            engine.generate("org-quiet", ask, 2 * rows)

    asyncio.run(fill_queue())
