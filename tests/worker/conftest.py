"""Real small parts of a worker's tests: a random model, and a service with jobs to do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.clean_processes import pooled_clean_processes
from tests.place import Place
from tests.spard.parts import write_model
from tests.worker.engine_in_process import make
from tests.worker.heard import Heard, Work
from tests.worker.parts import job_folder
from tests.worker.shop import Shop
from worker import pipeline
from worker.protocol import Report
from worker.workdir import Folder


@pytest.fixture(scope="session", autouse=True)
def clean_processes() -> Iterator[None]:
    """One clean process for all pipelines in this process; a worker's child has its own."""
    with pooled_clean_processes():
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformers folder with a random Llama."""
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def adapters(model: Path) -> list[Path]:
    """Return three signed adapters that change the model's replies."""
    return [make(model, model.parent / f"adapter-{seed}", seed) for seed in (1, 2, 3)]


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


@pytest.fixture
def message_pipe(tmp_path: Path) -> Iterator[Heard]:
    heard = Heard(tmp_path / "messages")
    yield heard
    os.close(heard.fd)


@pytest.fixture
def work(message_pipe: Heard) -> Work:
    def run(folder: Folder, should_stop: Callable[[], bool] = lambda: False) -> None:
        pipeline.run(folder, Report(message_pipe.fd), should_stop)

    return run


@pytest.fixture(scope="session")
def finished_job(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Folder, Heard]:
    """One whole job."""
    root = tmp_path_factory.mktemp("done")
    heard = Heard(root / "messages")
    folder = job_folder(root / "job", model, transcripts=True, held_out_rows=100)
    pipeline.run(folder, Report(heard.fd), lambda: False)
    os.close(heard.fd)
    return folder, heard


def _shop(shop: Shop) -> Iterator[Shop]:
    before = {process.pid for process in psutil.process_iter()}
    yield shop
    shop.engine.dispose()
    left = [command(p) for p in psutil.Process().children(recursive=True) if p.pid not in before]
    own = [line for line in left if not line.startswith("postgres: ")]  # the test's server starts workers of its own
    assert [line for line in own if "worker" in line] == []
    assert list(shop.work_dir.glob("*/")) == []


def command(process: psutil.Process) -> str:
    """The command line of a process; empty when it has ended meanwhile."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""
