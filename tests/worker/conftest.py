"""Real small parts of a worker's tests: a random model, and a service with jobs to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.conftest import Place
from tests.spard.parts import write_model
from tests.worker.shop import Shop


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformers folder with a random Llama."""
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def shop(tmp_path: Path, database_url: str, local_place: Place, model: Path) -> Iterator[Shop]:
    """On SQLite and on PostgreSQL; at its end nothing runs and no folder is left."""
    yield from _shop(Shop(tmp_path / "data", database_url, local_place, model))


@pytest.fixture
def light_shop(tmp_path: Path, sqlite_url: str, local_place: Place, model: Path) -> Iterator[Shop]:
    """On SQLite only, for what does not depend on the database."""
    yield from _shop(Shop(tmp_path / "data", sqlite_url, local_place, model))


@pytest.fixture
def cloud_shop(tmp_path: Path, postgres_url: str, moto_place: Place, model: Path) -> Iterator[Shop]:
    """On PostgreSQL and S3."""
    yield from _shop(Shop(tmp_path / "data", postgres_url, moto_place, model))


def _shop(shop: Shop) -> Iterator[Shop]:
    before = {process.pid for process in psutil.process_iter()}
    yield shop
    shop.engine.dispose()
    left = [command(p) for p in psutil.Process().children(recursive=True) if p.pid not in before]
    assert [line for line in left if "worker" in line] == []
    assert list(shop.work_dir.glob("*/")) == []


def command(process: psutil.Process) -> str:
    """The command line of a process; empty when it has ended meanwhile."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""
