"""A service in the background: `spard up --detach` and `spard down`. Each start is a process of its own: seconds."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import httpx2
import pytest

from app.commands import data_folder, embedded
from app.commands.terminal import CommandFailed
from app.settings import Settings


def test_a_detached_service_answers_at_once_and_ends_with_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(data_dir=tmp_path)
    service = embedded.start_detached(settings, "127.0.0.1", 0, with_worker=False)
    try:
        shown = capsys.readouterr().out
        url, key = (re.search(pattern, shown) for pattern in (r"http://\S+(?=/v1)", r"first key +(sk-spard-\S+)"))
        assert url
        assert key
        models = httpx2.get(f"{url.group()}/v1/models", headers={"authorization": f"Bearer {key.group(1)}"})
        assert models.status_code == 200
        log = tmp_path / embedded.LOG
        assert key.group(1) not in log.read_text()
        assert log.stat().st_mode & 0o077 == 0
        with pytest.raises(CommandFailed, match=f"already, at {re.escape(url.group())}. Stop it with `spard down"):
            embedded.start_detached(settings, "127.0.0.1", 0, with_worker=False)
    finally:
        embedded.stop(tmp_path, embedded.START_S)
        assert service.wait(embedded.START_S) == 0
    assert data_folder.running_service(tmp_path) is None
    with pytest.raises(CommandFailed, match="No service runs on"):
        embedded.stop(tmp_path, 0)


def test_a_service_that_cannot_start_says_why_and_shows_its_key(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(CommandFailed) as failed:
        embedded.start_detached(Settings(data_dir=tmp_path), "127.0.0.1", taken.getsockname()[1], with_worker=False)
    assert "Address already in use" in str(failed.value)
    assert re.search(r"shown only once: sk-spard-\S+", str(failed.value))
    assert data_folder.running_service(tmp_path) is None
