"""Databases, brokers and storages that tests run on: real ones, a fresh one for each test."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

import boto3
import pytest
import redis
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from playwright.sync_api import Browser
from sqlalchemy import Engine, NullPool, create_engine, make_url, text

from app.db import make_engine, upgrade_schema
from app.storage import Storage, open_storage
from spard.isolation import sandbox
from tests import levels, servers, surroundings
from tests.file_order import FileOrder
from tests.place import Place
from tools.chromium import chromium, place

# Before `tests/spard/conftest.py` imports torch, which reads once how many threads it takes. pytest calls
# `pytest_configure` only after the conftest files of the paths that it is given.
surroundings.settle(os.environ)

# The same examples on every machine, however long one takes there.
hypothesis_settings.register_profile(
    "steady", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
hypothesis_settings.load_profile("steady")


class SaysFailuresAtOnce:
    """Print each failure when it happens: a run that is stopped early never prints its summary."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self.terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.terminal.write_line(f"\n{report.nodeid} ({report.when}) failed:\n{report.longreprtext}")


def pytest_addoption(parser: pytest.Parser) -> None:
    levels.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    levels.register(config)
    config.pluginmanager.register(FileOrder(config))


def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    terminal = config.pluginmanager.getplugin("terminalreporter")
    if terminal is not None and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(SaysFailuresAtOnce(terminal))


def pytest_collection_finish() -> None:
    # Half a million objects of libraries stay: collections that look at them again are a tenth of the tests' time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Playwright leaves an event loop running in its thread: tests that run one of their own come before it starts.
    in_browser = {item.path for item in items if "browser" in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: item.path in in_browser)
    if os.environ.get("SPARD_SOAK") == "1":  # such runs are as long as they are asked to be
        for item in items:
            item.add_marker(pytest.mark.timeout(0))


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """`tests/spard/fake_vllm.py` installed as vLLM, for this process and those that it starts.

    Called with the name of a fault, every engine that is started later has it; the file that is returned gets a line of
    JSON for each engine, with what it was told.
    """
    site = tmp_path / "site"
    (site / "vllm" / "lora").mkdir(parents=True)
    (site / "vllm-0.24.0.dist-info").mkdir()
    (site / "vllm-0.24.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.24.0\n")
    for source, name in (("fake_vllm", "__init__"), ("plain_llama", "llama")):
        shutil.copy(Path(__file__).parent / "spard" / f"{source}.py", site / "vllm" / f"{name}.py")
    (site / "vllm" / "lora" / "__init__.py").touch()
    (site / "vllm" / "lora" / "request.py").write_text("from vllm import LoRARequest\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{os.environ['PYTHONPATH']}")
    sandbox.program_paths.cache_clear()

    def install(fault: str) -> Path:
        monkeypatch.setenv("VLLM_FAKE_FAULT", fault)
        monkeypatch.setenv("VLLM_FAKE_CALLS", str(tmp_path / "engines.jsonl"))
        return tmp_path / "engines.jsonl"

    install("")
    yield install
    sandbox.program_paths.cache_clear()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium, once for all tests of a process: Playwright starts no second time beside itself."""
    found = place()
    if found is None:
        pytest.skip("no Chromium on this machine")
    with chromium(found) as started:
        yield started


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    with servers.postgres() as url:
        yield url


@pytest.fixture(scope="session")
def postgres_template(postgres_server: str) -> Iterator[str]:
    """A database with our schema, to be copied."""
    with _postgres_database(postgres_server, "template0") as url:
        upgrade_schema(url)
        yield make_url(url).database or ""


@pytest.fixture
def postgres_url(postgres_server: str, postgres_template: str) -> Iterator[str]:
    """A PostgreSQL database of this test's own, with our schema."""
    with _postgres_database(postgres_server, postgres_template) as url:
        yield url


@pytest.fixture
def empty_postgres_url(postgres_server: str) -> Iterator[str]:
    with _postgres_database(postgres_server, "template0") as url:
        yield url


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sqlite") / "template.db"
    upgrade_schema(f"sqlite:///{path}")
    return path


@pytest.fixture
def sqlite_url(sqlite_template: Path, tmp_path: Path) -> str:
    """An SQLite database of this test's own, with our schema."""
    path = tmp_path / "spard.db"
    shutil.copy(sqlite_template, path)
    return f"sqlite:///{path}"


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = make_engine(database_url)
    yield engine
    engine.dispose()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[str]:
    with servers.redis() as url:
        yield url


@pytest.fixture
def redis_url(redis_server: str) -> str:
    """An empty Redis database."""
    with redis.Redis.from_url(redis_server) as client:
        client.flushdb()
    return redis_server


@pytest.fixture(scope="session")
def moto_server() -> Iterator[str]:
    with servers.moto() as url:
        yield url


@pytest.fixture(scope="session")
def rclone_server() -> Iterator[str]:
    with servers.rclone() as url:
        yield url


@pytest.fixture
def local_place(tmp_path: Path) -> Place:
    return Place(f"file://{tmp_path / 'objects'}")


@pytest.fixture
def moto_place(moto_server: str, s3_credentials: None) -> Place:
    return _bucket(moto_server)


@pytest.fixture
def rclone_place(rclone_server: str, s3_credentials: None) -> Place:
    return _bucket(rclone_server)


@pytest.fixture(params=["local", "moto", "rclone"])
def storage_place(request: pytest.FixtureRequest) -> Place:
    place: Place = request.getfixturevalue(f"{request.param}_place")
    return place


@pytest.fixture
def storage(storage_place: Place) -> Storage:
    return open_storage(storage_place.url, storage_place.endpoint_url)


@pytest.fixture
def s3_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", servers.ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", servers.SECRET_KEY)


@contextmanager
def _postgres_database(server: str, template: str) -> Iterator[str]:
    name = f"test_{token_hex(6)}"
    admin = create_engine(server, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {template}"))
    yield make_url(server).set(database=name).render_as_string(hide_password=False)
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))


def _bucket(endpoint_url: str) -> Place:
    name = f"test-{token_hex(6)}"
    client = boto3.client("s3", endpoint_url=endpoint_url, region_name="us-east-1")
    client.create_bucket(Bucket=name)
    client.close()
    return Place(f"s3://{name}/spard", endpoint_url)
