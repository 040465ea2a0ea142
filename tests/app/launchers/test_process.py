"""python -m app.launchers: what a person sees of it, and how it ends."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from time import sleep
from typing import Any

import certifi
import httpx2
import pytest
from pydantic import SecretStr
from sqlalchemy import Engine

from app.errors import Unfit
from app.launchers import __main__ as process
from app.launchers import kubernetes, reconcile
from app.launchers.kubernetes import KubernetesLauncher
from app.launchers.reconcile import Bounds
from app.ops import logs
from app.settings import Settings
from tests.app.conftest import AddJob
from tests.app.launchers.cluster import Cluster

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pod's service account, with certificates of real authorities."""
    folder = tmp_path / "account"
    folder.mkdir()
    (folder / "token").write_text("right")
    (folder / "ca.crt").write_bytes(Path(certifi.where()).read_bytes())
    monkeypatch.setattr(kubernetes, "ACCOUNT", folder)
    return folder


@pytest.fixture
def quiet_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the log settings of the test run."""
    monkeypatch.setattr(logs, "set_up", lambda format: None)
    yield
    logging.getLogger("httpx2").setLevel(logging.NOTSET)


def make_settings(engine: Engine, **changes: Any) -> Settings:
    url = SecretStr(engine.url.render_as_string(hide_password=False))
    return Settings(**{"database_url": url, "launcher": "kubernetes", "launch_s": 0.05, **changes})


def test_it_launches_what_is_queued_and_ends_with_a_signal(
    engine: Engine,
    add_job: AddJob,
    account: Path,
    quiet_log: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    job_id, cluster = add_job(), Cluster()
    monkeypatch.setattr(kubernetes, "client", cluster.http)
    caplog.set_level(logging.INFO)

    def end() -> None:
        while not cluster.made:
            sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    ending = Thread(target=end)
    ending.start()
    process.run(make_settings(engine))
    ending.join()

    assert cluster.made == [f"{job_id}-0"]
    assert f"{job_id}: attempt 0 is given to the cluster" in caplog.messages
    assert caplog.messages[-1] == "ends; what the cluster has goes on"
    assert not [each for each in caplog.records if each.name == "httpx2"]


def test_what_is_missing_is_told_before_it_looks(engine: Engine, account: Path, tmp_path: Path) -> None:
    with pytest.raises(Unfit, match="SPARD_LAUNCHER is 'workers'"):
        process.run(make_settings(engine, launcher="workers"))
    with pytest.raises(Unfit, match=f"There is no database at {tmp_path}/none"):
        process.run(make_settings(engine, database_url=SecretStr(f"sqlite:///{tmp_path}/none")))
    (account / "ca.crt").write_text("no certificate")
    with pytest.raises(Unfit, match=r"certificate .*ca.crt cannot be read"):
        process.run(make_settings(engine))
    (account / "ca.crt").unlink()
    with pytest.raises(Unfit, match=r"certificate .*ca.crt cannot be read: .*No such file"):
        process.run(make_settings(engine))
    (account / "token").unlink()
    with pytest.raises(Unfit, match="no service account's token"):
        process.run(make_settings(engine))


def test_jobs_on_several_nodes_need_a_cluster_that_knows_jobsets(
    engine: Engine, account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "client", Cluster(knows_sets=False).http)
    with pytest.raises(Unfit, match=r"SPARD_LAUNCH_NODES is 2, but the cluster knows no JobSet \(jobset.x-k8s.io"):
        process.run(make_settings(engine, launch_nodes=2))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (httpx2.ConnectError("verify failed"), "The cluster does not answer: ConnectError: verify failed"),
        (FileNotFoundError(2, "No such file", "token"), "The service account's token cannot be read: [Errno 2]"),
    ],
)
def test_why_the_cluster_is_away_stands_in_the_log(
    engine: Engine, caplog: pytest.LogCaptureFixture, error: Exception, told: str
) -> None:
    def refuse(request: httpx2.Request) -> httpx2.Response:
        raise error

    with httpx2.Client(base_url="https://cluster", transport=httpx2.MockTransport(refuse)) as http:
        reconcile.look(engine, KubernetesLauncher(http, "spard"), Bounds())
    assert told in caplog.messages[-1]
