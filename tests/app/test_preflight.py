"""Bad surroundings: one clear line that says how to mend it, and a non-zero exit."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

from app.commands import serve
from app.db import downgrade_schema, make_engine, schema_state, upgrade_schema
from app.errors import Unfit
from app.ops import preflight
from app.settings import Settings
from spard.config import JudgeSpec
from tests.place import Place

ROOT = Path(__file__).resolve().parents[2]
NOWHERE = "postgresql://spard:hunter2@127.0.0.1:9/spard"
STARTS = {
    "uvicorn": ["-m", "uvicorn", "app.main:checked_app", "--factory", "--port", "0"],
    "up": ["-m", "spard.commands", "up", "--port", "0"],
    "worker": ["-m", "worker"],
    "celery": ["-m", "celery", "-A", "worker.celery_app", "worker", "--pool=solo"],
}


@pytest.fixture
def settings(sqlite_url: str, tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path / "data", database_url=sqlite_url)  # type: ignore[arg-type]


def test_good_surroundings_pass(settings: Settings) -> None:
    preflight.check(settings)


@pytest.mark.parametrize("url", ["mysql://a@b/c", "no url", NOWHERE, "sqlite:////proc/none/spard.db"])
def test_a_database_that_cannot_be_used_is_named_without_its_password(settings: Settings, url: str) -> None:
    message = _refusal(settings, database_url=url)
    assert "SPARD_DATABASE_URL" in message or "SPARD_DATA_DIR" in message
    assert "hunter2" not in message
    assert "\n" not in message


def test_an_sqlite_database_that_cannot_be_read_is_no_server(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "damaged.db").write_bytes(b"no database" * 100)
    message = _refusal(settings, database_url=f"sqlite:///{tmp_path / 'damaged.db'}")
    assert "file is not a database. Restore the file from a backup" in message
    assert "server" not in message


def test_an_sqlite_database_that_cannot_be_written_is_told(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # root may write what nobody may
    assert "cannot be written" in _refusal(settings)


@pytest.mark.parametrize("url", ["ftp://somewhere", "s3://", "file://relative"])
def test_a_storage_url_that_is_none_is_refused(settings: Settings, url: str) -> None:
    assert "SPARD_STORAGE_URL is wrong" in _refusal(settings, storage_url=url)


def test_a_missing_bucket_is_named(settings: Settings, moto_place: Place) -> None:
    message = _refusal(settings, storage_url="s3://no-such-bucket", s3_endpoint_url=moto_place.endpoint_url)
    assert "s3://no-such-bucket" in message
    assert "NoSuchBucket" in message


def test_a_storage_that_does_not_answer_is_named(settings: Settings, s3_credentials: None) -> None:
    message = _refusal(settings, storage_url="s3://spard", s3_endpoint_url="http://127.0.0.1:9")
    assert "SPARD_S3_ENDPOINT_URL" in message


def test_a_data_folder_that_is_a_file_is_named(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "SPARD_DATA_DIR" in _refusal(settings, data_dir=tmp_path / "file")


def test_a_full_disk_is_told(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_MIN_FREE_BYTES", 1 << 62)
    assert "is full" in _refusal(settings)


def test_a_schema_that_is_behind_is_told(settings: Settings) -> None:
    downgrade_schema(settings.database(), "0001")
    assert "spard migrate" in _refusal(settings)


def test_a_schema_that_is_newer_is_told(settings: Settings) -> None:
    _stamp_revision(settings, "9999")
    assert "newer" in _refusal(settings)


def test_a_schema_that_is_newer_is_not_called_current(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPARD_DATABASE_URL", settings.database())
    told = []
    for prepare in (partial(downgrade_schema, settings.database(), "0001"), partial(_stamp_revision, settings, "9999")):
        prepare()
        serve.migrate(as_json=True)
        serve.migrate()
        told.append(capsys.readouterr().out)
    before, after = told
    assert '"current"' in before
    assert "the schema is current" in before
    assert '"ahead"' in after
    assert "newer than this version, and was left" in after


def test_the_schema_s_state_is_read_while_somebody_writes(engine: Engine) -> None:
    with engine.begin() as writer:
        writer.execute(text("UPDATE tenants SET name = 'x'"))
        assert schema_state(engine) == "current"


def test_a_gpu_that_is_asked_for_and_missing_is_told() -> None:
    from worker import gpu

    if gpu.count():
        pytest.skip("this machine has a GPU")
    with pytest.raises(Unfit, match="SPARD_DEVICE=cpu"):
        gpu.check(Settings(device="cuda"))


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"SPARD_DATABASE_URL": NOWHERE}, ["SPARD_DATABASE_URL"]),
        ({"SPARD_BROKER_URL": "redis://:hunt/er2@127.0.0.1/0"}, ["SPARD_BROKER_URL is no address of Redis"]),
        ({"SPARD_BROKER_URL": "localhost:6379"}, ["SPARD_BROKER_URL is no address of Redis"]),
        ({"SPARD_JUDGE_ERRORS": "/nowhere/judge.json"}, ["SPARD_JUDGE_ERRORS is /nowhere/judge.json"]),
        ({"SPARD_JUDGE": "refusa1"}, ["SPARD_JUDGE is 'refusa1'", "refusal", "llm", "classifier", "consensus"]),
    ],
)
def test_every_process_ends_with_one_line(start: str, wrong: dict[str, str], told: list[str], tmp_path: Path) -> None:
    ended = _start(start, tmp_path, {"SPARD_BROKER_URL": "redis://127.0.0.1:9/0", "COLUMNS": "500"} | wrong)
    last = ended.stderr.strip().splitlines()[-1]
    assert (ended.returncode, [word for word in told if word not in last]) == (1, [])
    assert "Traceback" not in ended.stderr
    assert "hunt" not in ended.stderr


@pytest.mark.parametrize(
    ("judge", "setting"),
    [
        (JudgeSpec(name="llm"), "SPARD_JUDGE_API_KEY"),
        (JudgeSpec(name="llm", base_url="judge.example/v1"), "SPARD_JUDGE_BASE_URL"),
        (JudgeSpec(name="llm", base_url="https://me:hunter2@judge.example/v1"), "SPARD_JUDGE_BASE_URL"),
        (JudgeSpec(name="classifier", family="wildguard"), "SPARD_JUDGE_MODEL"),
        (JudgeSpec(name="consensus", members=(JudgeSpec(),)), "SPARD_JUDGE_MEMBERS"),
        (
            JudgeSpec(name="consensus", members=(JudgeSpec(), JudgeSpec(name="classifier"))),
            "SPARD_JUDGE_MEMBERS[1].model",
        ),
    ],
)
def test_a_judge_that_cannot_be_asked_is_refused(settings: Settings, judge: JudgeSpec, setting: str) -> None:
    message = _refusal(settings, judge=judge)
    assert setting in message
    assert "hunter2" not in message


@pytest.mark.parametrize(
    ("judge", "is_warned_of"),
    [
        (JudgeSpec(name="llm"), True),
        (JudgeSpec(name="consensus", members=(JudgeSpec(name="llm"), JudgeSpec())), True),
        (JudgeSpec(name="llm", base_url="https://api.openai.com/v1"), False),
        (JudgeSpec(), False),
    ],
    ids=["llm", "a member", "named", "refusal"],
)
def test_rows_that_go_to_openai_unasked_are_warned_of(
    settings: Settings,
    judge: JudgeSpec,
    is_warned_of: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("SPARD_JUDGE_API_KEY", "sk-1")
    preflight.check(Settings(**settings.model_dump() | {"judge": judge}))
    assert ("are sent there" in caplog.text) is is_warned_of


@pytest.mark.parametrize(
    "judge",
    [
        JudgeSpec(name="llm", base_url="http://127.0.0.1:8001/v1"),
        JudgeSpec(name="llm", api_key_env="OTHER_KEY"),
        JudgeSpec(name="classifier", family="llama_guard", model="/models/guard"),
        JudgeSpec(name="consensus", members=(JudgeSpec(), JudgeSpec(name="classifier", model="/models/guard"))),
    ],
)
def test_a_judge_that_can_be_asked_passes(
    settings: Settings, judge: JudgeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTHER_KEY", "canary")
    preflight.check(Settings(**settings.model_dump() | {"judge": judge}))


def test_a_worker_leaves_a_newer_schema_alone(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'spard.db'}"
    upgrade_schema(url)
    engine = make_engine(url)
    _stamp(engine, "9999")
    engine.dispose()
    ended = _start("worker", tmp_path, {"SPARD_DATABASE_URL": url})
    assert (ended.returncode, "newer than this version" in ended.stderr) == (1, True)


def _refusal(settings: Settings, **changes: Any) -> str:
    changed = Settings(**{**settings.model_dump(), **changes})
    with pytest.raises(Unfit) as caught:
        preflight.check(changed)
    return str(caught.value)


def _stamp_revision(settings: Settings, revision: str) -> None:
    engine = make_engine(settings.database())
    _stamp(engine, revision)
    engine.dispose()


def _stamp(engine: Engine, revision: str) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision})


def _start(start: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    given = {"SPARD_DATA_DIR": str(folder), "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, *STARTS[start]]
    return subprocess.run(
        command, cwd=folder, env=os.environ | given, capture_output=True, text=True, timeout=300, check=False
    )


def test_a_folder_that_takes_a_name_and_no_bytes_keeps_no_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_nothing(path: Path, _: bytes) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_nothing)
    with pytest.raises(Unfit, match="No space left on device"):
        preflight.check_takes_files(tmp_path)
    assert [*tmp_path.iterdir()] == []
