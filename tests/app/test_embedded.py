"""The embedded mode: strangers' packages in the current folder, a worker that does not run, and small answers."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx2
import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr

from app.commands.embedded import announce, listen, unfinished_points
from app.main import create_app
from app.ops.processes import python, safe_path
from app.settings import Settings

WAIT_S = 120  # for a process to start, on a machine that does other things too


@pytest.fixture
def strangers(tmp_path: Path) -> Path:
    """A folder with packages of our names, each of which leaves a file when it is imported."""
    for name in ("app", "worker", "spard", "migrations"):
        (tmp_path / name).mkdir()
        for module in ("__init__", "__main__"):
            (tmp_path / name / f"{module}.py").write_text(
                f"open({str(tmp_path / 'imported')!r}, 'a').write({name!r})\n"
            )
    return tmp_path


def test_packages_of_the_current_folder_are_never_ours(strangers: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SPARD_", "PYTHON"))}
    command = [sys.executable, "-P", "-m", "spard.commands", "up", "--data", "data", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=strangers, env=clean) as service:
        try:
            assert service.stdout
            address = next(found for line in service.stdout if (found := re.search(r"http://\S+(?=/v1)", line)))
            assert becomes_ready(address.group())
        finally:
            service.terminate()
    assert not (strangers / "imported").exists()


def test_a_start_names_the_dashboard_and_what_an_audit_needs(
    sqlite_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(data_dir=tmp_path, database_url=SecretStr(sqlite_url))
    announce(settings, "sk-spard-1", "http://127.0.0.1:8000", unfinished_points(settings))
    told = capsys.readouterr().out
    assert re.search(r"dashboard\s+http://127\.0\.0\.1:8000/\s", told)
    assert told.index("spard pool import") < told.index("spard suites import") < told.index("spard jobs create")


def becomes_ready(address: str) -> bool:
    """Wait until the service says that it is ready, which includes its worker."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        with suppress(httpx2.TransportError):  # a busy machine may answer late, as long as it does
            if httpx2.get(f"{address}/readyz").status_code == 200:
                return True
        time.sleep(0.2)
    return False


def test_a_service_whose_worker_does_not_run_is_not_ready(sqlite_url: str, tmp_path: Path) -> None:
    class Worker:
        is_at_work = False

    application = create_app(Settings(data_dir=tmp_path, database_url=SecretStr(sqlite_url)))
    with TestClient(application) as client:
        assert client.get("/readyz").status_code == 200
        application.state.worker = Worker()
        answer = client.get("/readyz")
        assert (answer.status_code, "worker" in answer.json()["error"]["message"]) == (503, True)
        Worker.is_at_work = True
        assert client.get("/readyz").status_code == 200


def test_connections_send_small_answers_at_once() -> None:
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_children_do_not_look_into_the_current_folder(strangers: Path) -> None:
    environment = safe_path({**os.environ, "PYTHONPATH": os.pathsep.join(["", ".", str(strangers / "elsewhere")])})
    look = "import sys; sys.exit(any(each in ('', '.') or each == sys.argv[1] for each in sys.path))"
    for command in ([sys.executable, "-c", look], [sys.executable, "-P", "-c", look]):
        assert subprocess.run([*command, str(strangers)], cwd=strangers, env=environment, check=False).returncode == 0
    assert python("worker.child")[1] == "-P"
