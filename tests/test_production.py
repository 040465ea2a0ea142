"""The lines of docs/deployment.md for production, run as they stand: from empty servers to an adapter that is verified.

What a reader fills in is filled in here: the values of the settings, the port, the folder of models, the job's id.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx2
import pytest

from tests import servers
from tests.judge_server import Server, judge_server, knowing_what_complies
from tests.legacy import rows
from tests.legacy.installation import unpack
from tests.place import Place

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "deployment.md").read_text()
LINE = re.compile(r"^python (-P -m (uvicorn|celery) .*)$", re.MULTILINE)
SECTION = PAGE.split("## With PostgreSQL, Redis and S3")[1]
SETTINGS, ONCE, PROCESSES, USE = re.findall(r"^```bash\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)[:4]
REDTEAM = 200  # prompts, so many that a ten of unscored replies leave the gate enough to decide on
WAIT_S = 600.0  # for a process, on a machine that does other things too
LINES = {program: line for line, program in LINE.findall(PAGE)}


@pytest.mark.parametrize(
    ("program", "refusal"), [("uvicorn", "run `spard migrate`"), ("celery", "SPARD_BROKER_URL is not set")]
)
def test_a_server_does_not_run_packages_of_the_current_folder(program: str, refusal: str, tmp_path: Path) -> None:
    for name in ("app", "worker"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('a stranger ran')")

    done = subprocess.run(
        [sys.executable, *shlex.split(LINES[program])],
        cwd=tmp_path,
        env=os.environ | {"SPARD_DATA_DIR": str(tmp_path / "data")},
        capture_output=True,
        text=True,
        check=False,
    )

    assert refusal in done.stdout + done.stderr


def test_the_image_runs_the_same_lines() -> None:
    commands = re.findall(r"^CMD (\[.*\])$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert [shlex.join(json.loads(command)) for command in commands] == PROCESSES.splitlines()


@pytest.fixture
def judge() -> Iterator[Server]:
    """A judge under which the walk does not hang on the seed that its job draws: its model never says how to steal."""
    with judge_server() as server:
        server.answer = knowing_what_complies("Steal", "how to steal")
        yield server


@pytest.fixture
def environment(
    empty_postgres_url: str, redis_url: str, rclone_place: Place, judge: Server, tmp_path: Path
) -> dict[str, str]:
    """The settings that the page names, all of them and no others, with the addresses of empty servers."""
    values = {
        "SPARD_DATABASE_URL": empty_postgres_url,
        "SPARD_BROKER_URL": redis_url,
        "SPARD_STORAGE_URL": rclone_place.url,
        "SPARD_S3_ENDPOINT_URL": rclone_place.endpoint_url or "",
        "AWS_ACCESS_KEY_ID": servers.ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": servers.SECRET_KEY,
        "SPARD_SIGNING_KEY": str(tmp_path / "key.pem"),
        "SPARD_DATA_DIR": str(tmp_path / "data"),
        "SPARD_JUDGE": "llm",
        "SPARD_JUDGE_BASE_URL": judge.url,
        "SPARD_JUDGE_MODEL": "knowing",
        "SPARD_JUDGE_API_KEY": "sesame",
        "SPARD_JUDGE_ERRORS": str(tmp_path / "judge.json"),
    }
    assert re.findall(r"([A-Z0-9_]+)=\S", SETTINGS) == list(values)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SPARD_", "AWS_"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return inherited | values | {"PATH": path, "UVICORN_PORT": str(servers.free_port()), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with the files that the page's lines name, and models beside it."""
    model = unpack(tmp_path / "old", "sqlite").model
    (tmp_path / "models").mkdir()
    model.rename(tmp_path / "models" / "my-model")
    folder = tmp_path / "here"
    folder.mkdir()
    contents = {"general-safe": rows.pool(), "redteam": rows.harmful(REDTEAM), "train": _training()}
    for name, content in contents.items():
        (folder / f"{name}.jsonl").write_bytes(content)
    return folder


def test_from_empty_servers_to_a_verified_adapter(environment: dict[str, str], files: Path) -> None:
    def run(lines: str) -> str:
        return _run(lines, files, environment)

    api, worker = PROCESSES.splitlines()
    run(ONCE)
    with ExitStack() as stack:
        running = stack.enter_context(_serving(api, files, environment))
        url = f"http://127.0.0.1:{environment['UVICORN_PORT']}"
        _wait_until(lambda: _is_ready(url), running)
        serving = stack.enter_context(_serving(worker, files, environment))
        lines = USE.replace("http://127.0.0.1:8000", url).replace("/models/", f"{files.parent}/models/").splitlines()
        at = next(i for i, line in enumerate(lines) if "JOB" in line)
        run("\n".join(lines[:at]))
        (job,) = json.loads(run(f"{lines[0]}; spard jobs list --json"))
        told = run("\n".join([lines[0], *lines[at:]]).replace("JOB", job["id"]))
        assert "the signature is that of the key given" in told
        assert (job["status"], job["error"]) == ("succeeded", None)
        _ends(serving)
        create = "spard jobs create --model my-model --file train.jsonl --json"
        waiting = json.loads(run(f"{lines[0]}; {create}"))["id"]
        key = {"authorization": f"Bearer {(files / 'first.key').read_text().strip()}"}
        with httpx2.stream("GET", f"{url}/v1/fine_tuning/jobs/{waiting}/stream", headers=key, timeout=WAIT_S) as events:
            assert next(events.iter_lines())
            _ends(running)  # although somebody follows a job that does not end


def _training() -> bytes:
    """What the model answers anyway, so that twenty steps at the default rate change little."""
    found = [json.loads(line) for line in rows.training().splitlines()]
    for row in found:
        row["messages"][1]["content"] = rows.ANSWER
    return b"".join(json.dumps(row).encode() + b"\n" for row in found)


def _run(lines: str, folder: Path, environment: Mapping[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", lines],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def _serving(line: str, folder: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with (folder.parent / "log").open("ab") as log:
        process = subprocess.Popen(["bash", "-c", f"exec {line}"], cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _is_ready(url: str) -> bool:
    with suppress(httpx2.TransportError):
        return bool(httpx2.get(f"{url}/readyz").status_code == 200)
    return False


def _wait_until(is_so: Callable[[], bool], running: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert running.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _ends(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    process.wait(WAIT_S)
