"""`spard backup` and `spard restore`: an embedded service, saved while it runs and put back elsewhere."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.commands import embedded
from app.main import create_app
from app.settings import Settings
from app.signing import signing_key
from spard.commands import main
from tests.app.http.conftest import FILES, Service, rows


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Have no other service named, and the folder that commands set taken back."""
    for name in ("SPARD_DATABASE_URL", "SPARD_STORAGE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPARD_DATA_DIR", str(tmp_path / "nowhere"))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir(mode=0o700)
    settings = Settings(data_dir=folder)
    embedded.migrate(settings)
    signing_key(settings)
    return folder


@pytest.fixture
def running(home: Path) -> Iterator[tuple[Service, str]]:
    """A service that runs on the folder, and the id of a file in it."""
    app = create_app(Settings(data_dir=home))
    with TestClient(app) as http:
        service = Service(app, http)
        customer = service.client("org-customer", "customer")
        sent = customer.post(FILES, data={"purpose": "fine-tune"}, files={"file": ("train.jsonl", rows(12))}).json()
        yield service, sent["id"]


@pytest.fixture
def backup(home: Path, running: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert run(capsys, "backup", str(tmp_path / "backup"), "--data", str(home), "--json")[0] == 0
    return tmp_path / "backup"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out + printed.err


def test_what_is_put_back_serves_the_same_bytes(
    running: tuple[Service, str], home: Path, backup: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service, file = running
    secret = service.add_key("org-late", "customer")  # after the backup
    target = tmp_path / "restored"
    code, printed = run(capsys, "restore", str(backup), "--data", str(target), "--json")
    assert (code, json.loads(printed)["schema"], json.loads(printed)["objects"]) == (0, "current", 1)
    assert (target / "signing_key.pem").read_bytes() == (home / "signing_key.pem").read_bytes()
    assert [each.name for each in target.iterdir() if each.name.startswith(".")] == []
    app = create_app(Settings(data_dir=target))
    with TestClient(app) as http:
        again = Service(app, http)
        customer = again.client("org-customer", "customer")
        assert customer.get(f"{FILES}/{file}/content").content == rows(12)
        assert http.get(FILES, headers={"authorization": f"Bearer {secret}"}).status_code == 401
    assert run(capsys, "objects", "check", "--data", str(target))[0] == 0
    assert run(capsys, "audit-log", "verify", "--data", str(target))[0] == 0
    assert run(capsys, "migrate", "--data", str(target))[0] == 0


def test_nothing_is_overwritten(backup: Path, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = run(capsys, "restore", str(backup), "--data", str(home))
    assert (code, "is not overwritten" in " ".join(printed.split())) == (1, True)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "signing_key.pem").write_text("another")
    assert run(capsys, "restore", str(backup), "--data", str(tmp_path / "half"))[0] == 1
    assert [each.name for each in (tmp_path / "half").iterdir()] == ["signing_key.pem"]
    assert run(capsys, "backup", str(backup), "--data", str(home))[0] == 1


def test_a_database_alone_is_put_back_beside_objects(
    backup: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "copied").mkdir()
    (backup / "objects").rename(tmp_path / "copied" / "objects")
    assert run(capsys, "restore", str(backup / "spard.db"), "--data", str(tmp_path / "copied"))[0] == 0
    assert run(capsys, "objects", "check", "--data", str(tmp_path / "copied"))[0] == 0


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096:12288] = bytes(8192)
    path.write_bytes(content)


def newer(path: Path) -> None:
    change(path, "UPDATE alembic_version SET version_num = '9999'")


def another_program(path: Path) -> None:
    path.unlink()
    change(path, "CREATE TABLE notes (id)")


def no_database(path: Path) -> None:
    path.write_bytes(b"nothing that SQLite wrote, at some length" * 100)


def change(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(statement)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (damage, "database"),
        (newer, "newer than this version"),
        (another_program, "none of SPARD's"),
        (no_database, "cannot be read"),
        (Path.unlink, "holds no spard.db"),
    ],
)
def test_a_backup_that_cannot_be_used_is_refused(
    fault: Any, words: str, backup: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fault(backup / "spard.db")
    code, printed = run(capsys, "restore", str(backup), "--data", str(tmp_path / "new"))
    assert (code, words in " ".join(printed.split())) == (1, True), printed
    assert list((tmp_path / "new").glob("*")) + list((tmp_path / "new").glob(".*")) == []


def test_a_service_on_servers_is_sent_to_their_own_commands(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPARD_DATABASE_URL", "postgresql+psycopg://localhost/spard")
    code, printed = run(capsys, "backup", str(tmp_path / "backup"), "--data", str(home))
    assert (code, "PostgreSQL" in printed) == (1, True)
