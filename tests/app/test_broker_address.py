"""One address of the broker means the same to Celery, to rate limits, to the doctor and at the start."""

from __future__ import annotations

import gc
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from pydantic import SecretStr
from sqlalchemy import Engine

from app.broker_address import BrokerAddress, read_broker_address
from app.commands.doctor import Finding
from app.commands.doctor.machine import broker
from app.db import make_engine, transaction
from app.errors import Unfit
from app.http.rate_limit import RateLimits
from app.ops.broker import Dispatcher, wake
from app.ops.preflight import check_broker
from app.settings import Settings
from tests import servers
from tests.certificates import Certificates, make_certificates

# redis-py leaves a socket open whose handshake failed.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")


@pytest.fixture
def engine(sqlite_url: str) -> Iterator[Engine]:
    """One kind of database: it has no part in this."""
    found = make_engine(sqlite_url)
    yield found
    found.dispose()


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://", BrokerAddress()),
        ("redis://host", BrokerAddress("host")),
        ("redis://[::1]:7000/2", BrokerAddress("::1", 7000, database=2)),
        ("redis://me:p%2Fw%40%23@host/", BrokerAddress("host", username="me", password="p/w@#")),
        ("redis://host?db=3", BrokerAddress("host", database=3)),
        ("redis://host/3?db=3", BrokerAddress("host", database=3)),
        ("redis://host/0?socket_timeout=5", BrokerAddress("host", timeouts={"socket_timeout": 5.0})),
        ("unix:///run/valkey.sock?db=1", BrokerAddress(socket_path="/run/valkey.sock", database=1)),
    ],
)
def test_an_address_is_read(url: str, address: BrokerAddress) -> None:
    assert read_broker_address(url) == address


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("localhost:6379", "no address of Redis"),
        ("sentinel://:hunter2@host", "no address of Redis"),
        ("redis://:hunter2#@host", "write / as %2F"),
        ("redis://:hunter2/@host:6379/0", "no address of Redis"),
        ("redis://:1234?hunter2@host:6379/0", "? as %3F"),
        ("redis://:1234/hunter2@host:6379/0", "/ as %2F"),
        ("redis://:hunter2@host:port", "no address of Redis"),
        ("redis://:hunter2@host/name", "numbers them"),
        ("redis://:hunter2@host/1/2", "numbers them"),
        ("redis://:hunter2@host?db=name", "numbers them"),
        ("redis://:hunter2@host/1?db=2", "leave one"),
        ("redis://:hunter2@host?db=1&db=2", "db twice"),
        ("redis://:hunter2@host?protocol=3", "'protocol'"),
        ("redis://host?password=hunter2", "before the host"),
        ("redis://:hunter2@host?socket_tmeout=3", "known are db, health_check_interval"),
        ("redis://:hunter2@host?socket_timeout=0.5", "at least 2"),
        ("redis://:hunter2@host?health_check_interval=often", "number of seconds"),
        ("redis://:hunter2@host?ssl_cert_reqs=required", "rediss://"),
        ("rediss://:hunter2@host?ssl_cert_reqs=perhaps", "one of required, optional, none"),
        ("rediss://:hunter2@host?ssl_check_hostname=perhaps", "true or false"),
        ("rediss://:hunter2@host?ssl_ca_certs=/nowhere.pem", "no file /nowhere.pem"),
        ("unix://host/hunter2", "names no socket"),
        ("unix://", "names no socket"),
    ],
)
def test_an_address_that_not_all_can_use_is_refused_at_the_start(url: str, reason: str) -> None:
    settings = Settings(broker_url=SecretStr(url))
    with pytest.raises(Unfit) as refused:
        check_broker(settings)
    assert reason in refused.value.message
    assert "hunter2" not in refused.value.message
    assert reason in broker(settings).text


@pytest.mark.parametrize(
    "ending", ["/3", "?db=3", "/3?health_check_interval=5&socket_timeout=5&socket_connect_timeout=2"]
)
def test_all_use_the_same_database(engine: Engine, redis_url: str, ending: str) -> None:
    server = redis_url.removesuffix("/0")
    with redis.Redis.from_url(f"{server}/3") as client:
        client.flushdb()
        assert _list_users(server + ending, engine, client) == ["celery", "doctor", "rate limits"]
        client.flushdb()


def test_a_socket_is_used_by_all(engine: Engine) -> None:
    with tempfile.TemporaryDirectory() as folder:  # a socket's path is short
        path = Path(folder) / "valkey.sock"
        with servers.redis(socket_path=path), redis.Redis(unix_socket_path=str(path), db=2) as client:
            assert _list_users(f"unix://{path}?db=2", engine, client) == ["celery", "doctor", "rate limits"]


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return make_certificates(tmp_path)


@pytest.fixture
def plain(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.mark.parametrize("verification", ["", "&ssl_cert_reqs=required", "&ssl_cert_reqs=CERT_REQUIRED"])
def test_a_certificate_of_a_known_authority_is_taken_by_all(
    engine: Engine, redis_url: str, plain: redis.Redis, certificates: Certificates, verification: str
) -> None:
    with servers.tls_in_front(redis_url, certificates.server, certificates.key) as (port, _):
        url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificates.authority}{verification}"
        assert _list_users(url, engine, plain) == ["celery", "doctor", "rate limits"]


def test_nobody_tells_the_password_to_an_unknown_authority(
    engine: Engine, redis_url: str, plain: redis.Redis, certificates: Certificates
) -> None:
    with servers.tls_in_front(redis_url, certificates.server, certificates.key) as (port, received):
        assert _list_users(f"rediss://:hunter2@127.0.0.1:{port}/0", engine, plain) == []
    assert received == []


def test_nobody_tells_the_password_to_another_host(
    engine: Engine, redis_url: str, plain: redis.Redis, tmp_path: Path
) -> None:
    elsewhere = make_certificates(tmp_path, "elsewhere.example")
    with servers.tls_in_front(redis_url, elsewhere.server, elsewhere.key) as (port, received):
        url = f"rediss://:hunter2@127.0.0.1:{port}/0?ssl_ca_certs={elsewhere.authority}"
        assert _list_users(url, engine, plain) == []
        assert received == []
        assert _list_users(
            f"rediss://127.0.0.1:{port}?ssl_ca_certs={elsewhere.authority}&ssl_check_hostname=no", engine, plain
        ) == ["celery", "doctor", "rate limits"]


def test_who_asks_for_it_verifies_nothing_and_is_warned(
    engine: Engine, redis_url: str, plain: redis.Redis, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    with servers.tls_in_front(redis_url, certificates.server, certificates.key) as (port, _):
        url = f"rediss://127.0.0.1:{port}/0?ssl_cert_reqs=none"
        assert _list_users(url, engine, plain) == ["celery", "rate limits"]
        assert "is not verified" in _doctor(url).text
    with caplog.at_level(logging.WARNING):
        check_broker(Settings(broker_url=SecretStr(url)))
    assert "ssl_cert_reqs=none" in caplog.text


def _list_users(url: str, engine: Engine, database: redis.Redis) -> list[str]:
    """Return who could use the address; `database` is a connection of our own to where it leads."""
    database.delete("spard:celery")
    RateLimits(url).take("requests", "org-1", 10)
    with transaction(engine) as session:
        wake(session, "ftjob-1")
    Dispatcher(engine, url).send_pending()
    users = {
        "celery": database.llen("spard:celery") > 0,
        "doctor": _doctor(url).state == "ok",
        "rate limits": bool(database.keys("spard*org-1*")),
    }
    gc.collect()  # here, and not in a test that takes no such socket
    return [name for name, is_so in users.items() if is_so]


def _doctor(url: str) -> Finding:
    return broker(Settings(broker_url=SecretStr(url)))
