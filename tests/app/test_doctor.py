"""`spard doctor`: each fault that is planted is named, with its cure, and a sound deployment has none."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import boto3
import pytest
from pydantic import SecretStr
from sqlalchemy import Engine, text, update

from app import keys, signing
from app.commands import data_folder
from app.commands.doctor import Finding, deployment, machine
from app.commands.doctor import client as client_side
from app.db import downgrade_schema, make_engine, transaction
from app.db.base import utc_now
from app.db.tables import ApiKey, BaseModelEntry, Corpus, Job, Outbox
from app.jobs import fleet
from app.ops import gpus, preflight
from app.settings import Settings
from spard.commands import main
from spard.config import JudgeSpec, cpu
from spard.evaluation.calibration.errors import JudgeError
from spard.evaluation.calibration.record import JudgeRecord
from spard.evaluation.statistics import rate
from spard.isolation import sandbox
from tests.app.parts import SPEC
from tests.place import Place
from tests.spard.parts import write_model

NOBODY = "http://127.0.0.1:9"


@dataclass
class Home:
    """A deployment that is sound, in a folder."""

    settings: Settings
    folder: Path
    monkeypatch: pytest.MonkeyPatch

    @contextmanager
    def rows(self) -> Iterator[Any]:
        engine = make_engine(self.settings.database())
        with transaction(engine) as session:
            yield session
        engine.dispose()

    def change(self, **settings: Any) -> None:
        self.settings = self.settings.model_copy(update=settings)

    def run(self, statement: str) -> None:
        with self.rows() as session:
            session.execute(text(statement))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def home(sqlite_url: str, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    folder = tmp_path / "data"
    folder.mkdir(mode=0o700)
    few = rate(0, 200, 0)
    measured = f"llm:{JudgeSpec().model}:0a1b2c3d"  # as the judge names itself: with its model and its instructions
    JudgeRecord(measured, (JudgeError("en", few, few),), gamed=few).write(tmp_path / "judge.json")
    settings = Settings(
        data_dir=folder,
        database_url=SecretStr(sqlite_url),
        judge=JudgeSpec(name="llm", base_url="http://127.0.0.1:1/v1"),
        judge_errors=tmp_path / "judge.json",
    )
    monkeypatch.setattr(deployment, "_unreachable", lambda url: None)
    home = Home(settings, folder, monkeypatch)
    signing.signing_key(settings)
    with home.rows() as session:
        keys.ensure_first(session, None)
        session.add(BaseModelEntry(alias="tiny", source=str(model)))
        for kind in ("pool", "harmful"):
            facts = {"kind": kind, "name": kind, "version": 1, "rows": 90, "bytes": 9, "sha256": kind}
            session.add(Corpus(storage_key=f"corpora/{kind}", **facts))
    return home


def findings(home: Home) -> list[Finding]:
    return [*machine.store_checks(home.settings), *deployment.checks(home.settings)]


def test_a_judge_at_openai_that_nobody_named_is_noted(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARD_JUDGE_API_KEY", "sk-1")
    home.change(judge=JudgeSpec(name="llm"))
    (found,) = [each for each in deployment.judge(home.settings) if each.name == "judge"]
    assert (found.state, "api.openai.com" in found.text) == ("note", True)


def test_a_sound_deployment_has_no_problem(home: Home) -> None:
    found = findings(home)
    assert [each for each in found if each.state == "problem"] == []
    assert {each.name for each in found} >= {"folder", "database", "schema", "storage", "signing key", "models", "pool"}


def offer_copy(home: Home, weights: Callable[[bytes], bytes]) -> None:
    """Offer a copy of the model instead, without what it says of its judge."""
    folder = home.folder / "copy"
    folder.mkdir()
    with home.rows() as session:
        whole = Path(session.query(BaseModelEntry).one().source)
        session.query(BaseModelEntry).update({"source": str(folder)})
    for path in whole.iterdir():
        if path.is_file():
            content = path.read_bytes()
            (folder / path.name).write_bytes(weights(content) if path.suffix == ".safetensors" else content)


def no_folder(home: Home) -> None:
    home.change(data_dir=home.folder / "gone", database_url=None)


def open_folder(home: Home) -> None:
    home.folder.chmod(0o755)


def full_disk(home: Home) -> None:
    home.monkeypatch.setattr(preflight, "_MIN_FREE_BYTES", 1 << 62)


def leftover(home: Home) -> None:
    job = home.settings.work_dir() / "ftjob-1"
    job.mkdir(parents=True)
    (job / "lock").touch()


def no_database(home: Home) -> None:
    home.change(database_url=None)


def database_away(home: Home) -> None:
    home.change(database_url=SecretStr("postgresql://spard:hunter2@127.0.0.1:9/spard"))


def old_schema(home: Home) -> None:
    downgrade_schema(home.settings.database(), "0001")


def new_schema(home: Home) -> None:
    home.run("UPDATE alembic_version SET version_num = '9999'")


def other_clock(home: Home) -> None:
    home.monkeypatch.setattr("app.commands.doctor.machine.time.time", lambda: 1.0)


def storage_in_a_file(home: Home) -> None:
    (home.folder / "objects").write_text("")


def no_storage(home: Home) -> None:
    home.change(storage_url="ftp://somewhere")


def no_broker(home: Home) -> None:
    home.change(broker_url=SecretStr("redis://127.0.0.1:9/0"))


def no_signing_key(home: Home) -> None:
    (home.folder / "signing_key.pem").unlink()


def key_for_everybody(home: Home) -> None:
    (home.folder / "signing_key.pem").chmod(0o644)


def no_key_at_all(home: Home) -> None:
    (home.folder / "signing_key.pem").write_text("nonsense")


def revoked_key(home: Home) -> None:
    old = (home.folder / "signing_key.pem").read_bytes()
    revoked = signing.public_keys(home.settings).current
    signing.rotate(home.settings)
    signing.revoke(home.settings, revoked, "lost")
    (home.folder / "signing_key.pem").write_bytes(old)


def unset_judge(home: Home) -> None:
    home.change(judge=JudgeSpec(name="classifier"))


def judge_away(home: Home) -> None:
    home.monkeypatch.undo()
    home.change(judge=JudgeSpec(name="llm", base_url=f"{NOBODY}/v1"))


def other_judge(home: Home) -> None:
    home.change(judge=JudgeSpec(name="refusal"))


def other_model_of_judge(home: Home) -> None:
    home.change(judge=replace(home.settings.judge, model="another"))


def judge_not_measured(home: Home) -> None:
    offer_copy(home, lambda content: content)
    home.change(judge_errors=None)


def no_admin(home: Home) -> None:
    with home.rows() as session:
        session.query(ApiKey).update({"revoked_at": utc_now()})


def no_model(home: Home) -> None:
    home.run("DELETE FROM base_models")


def model_gone(home: Home) -> None:
    home.run("UPDATE base_models SET source = '/nowhere/tiny'")


def model_cut(home: Home) -> None:
    offer_copy(home, lambda content: content[:-1])


def no_pool(home: Home) -> None:
    home.run("DELETE FROM corpora WHERE kind = 'pool'")


def no_suite(home: Home) -> None:
    home.run("DELETE FROM corpora WHERE kind = 'harmful'")


def job_nobody_takes(home: Home) -> None:
    with home.rows() as session:
        key = session.query(ApiKey).first()
        asked = {"model": "tiny", "training_file": "file-1", "recipe": {}, "spec": SPEC, "request_hash": "0"}
        at = utc_now() - timedelta(hours=1)
        session.add(Job(project_id=key.project_id, key_id=key.id, created_at=at, **asked))


def worker_lost(home: Home) -> None:
    job_nobody_takes(home)
    home.run("UPDATE jobs SET status = 'running', lease_expires_at = 1.0")


def worker_in_trouble(home: Home) -> None:
    with home.rows() as session:
        fleet.note(session, fleet.Presence("worker-1", "gpu-7", "1.0.0", [], ["the disk is full"]))


def add_stuck_outbox_row(home: Home) -> None:
    with home.rows() as session:
        session.add(Outbox(topic="t", payload={}, created_at=utc_now() - timedelta(hours=1)))


PLANTED: dict[Callable[[Home], None], tuple[str, str]] = {  # fault -> which check finds it, and a word of its cure
    no_folder: ("folder", "spard up --data"),
    open_folder: ("folder", "chmod 700"),
    full_disk: ("disk", "free some"),
    leftover: ("leftovers", "start a worker"),
    no_database: ("database", "SPARD_DATABASE_URL"),
    database_away: ("database", "that the server runs"),
    old_schema: ("schema", "spard migrate"),
    new_schema: ("schema", "install the version"),
    other_clock: ("database clock", "synchronize the clocks"),
    storage_in_a_file: ("storage", "SPARD_STORAGE_URL"),
    no_storage: ("storage", "SPARD_STORAGE_URL"),
    no_broker: ("broker", "SPARD_BROKER_URL"),
    no_signing_key: ("signing key", "SPARD_SIGNING_KEY"),
    key_for_everybody: ("signing key", "chmod 600"),
    no_key_at_all: ("signing key", "openssl genpkey"),
    revoked_key: ("signing key", "make another key"),
    unset_judge: ("judge", "set what is named"),
    judge_away: ("judge", "SPARD_JUDGE_BASE_URL"),
    other_judge: ("judge's errors", "spard judge --json"),
    other_model_of_judge: ("judge's errors", "spard judge --json"),
    judge_not_measured: ("models", "SPARD_JUDGE_ERRORS"),
    no_admin: ("admin key", "spard keys first"),
    no_model: ("models", "spard models add NAME"),
    model_gone: ("models", "spard models add tiny"),
    model_cut: ("models", "spard models add tiny"),
    no_pool: ("pool", "spard pool import"),
    no_suite: ("suites", "spard suites import"),
    job_nobody_takes: ("workers", "python -m worker"),
    worker_lost: ("workers", "workers' logs"),
    worker_in_trouble: ("workers", "fix it on that machine"),
    add_stuck_outbox_row: ("wake-ups", "start an API process"),
}


def test_a_bucket_that_keeps_what_is_deleted_is_told(moto_place: Place) -> None:
    settings = Settings(storage_url=moto_place.url, s3_endpoint_url=moto_place.endpoint_url)
    before = {each.name for each in machine.storage(settings)}
    client = boto3.client("s3", endpoint_url=moto_place.endpoint_url, region_name="us-east-1")
    bucket = moto_place.url.split("/")[2]
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    (found,) = [each for each in machine.storage(settings) if each.name == "versions"]
    assert (before & {"storage", "versions"}, found.state) == ({"storage"}, "problem")
    assert "Versions" in client.list_object_versions(Bucket=bucket)  # the probe was deleted
    client.close()


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_named_with_its_cure(plant: Callable[[Home], None], home: Home) -> None:
    name, cure = PLANTED[plant]
    plant(home)
    found = [each for each in findings(home) if each.state == "problem"]
    assert [each.name for each in found] == [name], found
    assert cure in found[0].cure
    assert "\n" not in found[0].text
    assert "hunter2" not in found[0].text


@pytest.mark.parametrize("ahead_s", [-7200.0, 7200.0])
def test_leases_and_waits_are_judged_by_the_database_s_clock(
    home: Home, ahead_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One job has lost its worker, one has not, and none waits long, whatever this machine's clock says."""
    real = utc_now().timestamp()
    with home.rows() as session:
        key = session.query(ApiKey).first()
        asked = {"model": "tiny", "training_file": "file-1", "recipe": {}, "spec": SPEC, "request_hash": "0"}
        for state in ({"status": "running", "lease_expires_at": real + 60}, {"status": "queued"}):
            session.add(Job(project_id=key.project_id, key_id=key.id, **asked, **state))
        session.add(Outbox(topic="t", payload={}))
    monkeypatch.setattr("time.time", lambda: real + ahead_s)

    class Wrong(datetime):
        @classmethod
        def now(cls, tz: object = None) -> Wrong:
            return cls.fromtimestamp(real + ahead_s, UTC)

    monkeypatch.setattr("app.db.base.datetime", Wrong)
    with home.rows() as session:
        told = {each.name: (each.state, each.text) for each in deployment.work(session, home.settings)}
        assert told["workers"] == ("ok", "0 running, 1 jobs in progress, 0 waiting")
        assert told["wake-ups"] == ("ok", "none is stuck")
        session.execute(update(Job).where(Job.status == "running").values(lease_expires_at=real - 60))
        (lost,) = [each for each in deployment.work(session, home.settings) if each.name == "workers"]
        assert (lost.state, "1 running jobs have had no heartbeat" in lost.text) == ("problem", True)


def test_a_database_that_another_process_holds_is_named(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_WAIT_S", 0.0)
    path = home.settings.database().removeprefix("sqlite:///")
    with sqlite3.connect(path, isolation_level=None) as holder:
        holder.execute("BEGIN IMMEDIATE")
        (found,) = [each for each in machine.database(home.settings) if each.state == "problem"]
        holder.execute("ROLLBACK")
    assert (found.name, "fuser" in found.cure) == ("writes", True)


@pytest.mark.parametrize(
    ("variables", "name", "cure"),
    [
        ({"SPARD_BASE_URL": "nonsense"}, "address", "export SPARD_BASE_URL"),
        ({"SPARD_BASE_URL": "http://127.0.0.1:9/api"}, "address", "export SPARD_BASE_URL"),
        ({"SPARD_BASE_URL": NOBODY, "SPARD_API_KEY": "sk-spard-x"}, "service", "spard up"),
        ({"SPARD_BASE_URL": NOBODY, "SPARD_API_KEY": "sk\n"}, "key", "export SPARD_API_KEY"),
        ({"SPARD_BASE_URL": NOBODY}, "key", "export SPARD_API_KEY"),
    ],
)
def test_a_client_s_faults_are_named(
    variables: dict[str, str], name: str, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPARD_API_KEY", raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    found = [each for each in client_side.checks() if each.state == "problem" and each.name == name]
    assert [cure in each.cure for each in found] == [True]


@pytest.mark.parametrize(
    ("flags", "dtype", "words"),
    [
        ("fpu avx512_bf16", "float32", "several times as fast in bfloat16"),
        ("fpu avx512_bf16", "bfloat16", "train on the CPU"),
        ("fpu sse2", "bfloat16", "no instructions for bfloat16"),
        ("fpu sse2", "float32", "train on the CPU"),
        ("fpu sse2", "auto", "train on the CPU"),
        (None, "bfloat16", "train on the CPU"),
    ],
)
def test_a_dtype_that_the_cpu_is_slow_in_is_named(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    flags: str | None,
    dtype: Literal["float32", "bfloat16", "auto"],
    words: str,
) -> None:
    if flags:
        (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr(cpu, "CPU_FACTS", tmp_path / "cpuinfo")
    monkeypatch.setattr(gpus, "count", lambda: 0)
    text = machine.gpu(Settings(cpu_dtype=dtype)).text
    assert words in text
    assert text.endswith("CPU") == (words == "train on the CPU")


def test_what_the_machine_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "count", lambda: 0)
    assert "SPARD_DEVICE=cpu" in machine.gpu(Settings(device="cuda")).cure
    monkeypatch.setattr(gpus, "count", lambda: 1)
    assert "SPARD_GPUS_PER_JOB to 1" in machine.gpu(Settings(gpus_per_job=2)).cure
    assert "worker.gpu_probe" in machine.gpu(Settings()).cure  # which computes on no GPU here
    assert machine.gpu(Settings(device="cpu")).state == "ok"
    monkeypatch.setattr(gpus, "PROBE", [sys.executable, "-c", ""])
    assert machine.gpu(Settings()).state == "ok"
    monkeypatch.setattr(machine, "find_spec", lambda name: None if name == "torch" else name)
    assert "torch not installed" in machine.packages().text
    monkeypatch.setattr(machine, "version", {"spard": "1", "spard-service": "2"}.__getitem__)
    assert "one version" in machine.versions().cure
    monkeypatch.setattr(sandbox, "find_sandbox", lambda: sandbox.Sandbox("none", ("Landlock",)))
    assert "user namespaces" in machine.isolation().cure
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(machine, "_WAIT_S", 0.1)
        assert "--port" in machine.free_port(taken.getsockname()[1]).cure


def test_the_command_prints_a_line_for_each_and_exits_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [each for each in os.environ if each.startswith("SPARD_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPARD_JUDGE", "nobody")
    ends = []
    for arguments in (["doctor"], ["doctor", "--json"], ["doctor", "--only", "service"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        ends.append((ended.value.code, capsys.readouterr().out))
    assert [code for code, _ in ends] == [1, 1, 1]
    assert "problem  settings: SPARD_JUDGE is 'nobody'" in ends[0][1]
    assert json.loads(ends[1][1])["problems"] == len([line for line in ends[0][1].splitlines() if " Cure: " in line])
    assert "address" not in ends[2][1]
    assert list(tmp_path.iterdir()) == []


def test_the_engine_is_none_of_a_database_that_is_not_there(home: Home) -> None:
    no_database(home)
    assert not isinstance(machine.checked_engine(home.settings), Engine)


def test_a_service_that_asks_no_harmless_requests_gets_a_note(home: Home) -> None:
    found = [each for each in findings(home) if each.name == "suites"]
    assert [each.state for each in found] == ["ok", "note", "note"]
    assert ["--kind benign" in found[1].text, "--kind utility" in found[2].text] == [True, True]
    with home.rows() as session:
        facts = {"kind": "benign", "name": "benign", "version": 1, "rows": 9, "bytes": 9, "sha256": "benign"}
        session.add(Corpus(storage_key="corpora/benign", **facts))
    assert [each.state for each in findings(home) if each.name == "suites"] == ["ok", "ok", "note"]


def test_the_port_is_that_of_the_service_on_the_folder(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARD_BASE_URL", raising=False)
    assert machine.own_port(home.settings) == 8000
    monkeypatch.setenv("SPARD_BASE_URL", "http://127.0.0.1:20300/v1")
    assert machine.own_port(home.settings) == 20300
    monkeypatch.setenv("SPARD_BASE_URL", "https://spard.example:8443/v1")
    assert machine.own_port(home.settings) == 8000
    with data_folder.lock_folder(home.folder) as lock:  # as `spard up` holds it
        lock.write("http://127.0.0.1:20301\n")
        lock.flush()
        assert machine.own_port(home.settings) == 20301
    assert machine.own_port(home.settings) == 8000  # it has ended, and its address stays in the file
