"""Measure the CPU time of one read, layer by layer, with the API in this process and without a server.

    python -m benchmarks.layers [--requests 500]

Each arm adds one layer to the arm before it; the difference is that layer's cost in microseconds of CPU time. The arms
alternate in rounds. `benchmarks.api` measures the whole request, with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from fastapi import FastAPI
from pydantic import SecretStr
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import Message

from app import db
from app.callers import Answers
from app.jobs import rows, schemas
from app.main import served_app
from app.ops import logs
from app.settings import Settings
from benchmarks.api import JOBS, _fill

ROUNDS = 9
JOB = "ftjob-00011"  # a job that has ended
_EMPTY = "{}"
_BARE = "routing, dependencies, middleware"
Step = Callable[[Answers], str]


def main() -> None:
    """Measure all arms and print the time that each layer adds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layers", description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=500, help="of each arm, all rounds together")
    asked = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w") as log:
        app, key = _service(Path(folder))
        logs.set_up()
        logging.getLogger().handlers[0].setStream(log)  # type: ignore[attr-defined]
        _print(asyncio.run(_measure_layers(app, key, asked.requests // ROUNDS)))


def _service(folder: Path) -> tuple[FastAPI, str]:
    url = f"sqlite:///{folder}/spard.db"
    db.upgrade_schema(url)
    engine = db.make_engine(url)
    key, _ = _fill(engine, 1000, folder)
    engine.dispose()
    return served_app(Settings(database_url=SecretStr(url), data_dir=folder, requests_per_minute=1_000_000_000)), key


def _open_session(answers: Answers) -> str:
    with db.look(answers.request.app.state.engine):
        return _EMPTY


def _recognize_caller(answers: Answers) -> str:
    with db.look(answers.request.app.state.engine) as connection:
        answers._recognize(connection)
        return _EMPTY


def _row(answers: Answers, then: Callable[[rows.JobRow], str] = lambda row: _EMPTY) -> str:
    with db.look(answers.request.app.state.engine) as connection:
        row = rows.find(connection, answers._recognize(connection).principal.project_id, JOB)
        return then(row) if row else _EMPTY


def _object(answers: Answers) -> str:
    return _row(answers, lambda row: schemas.job_response(row, None).id)


def _json(answers: Answers) -> str:
    return _row(answers, lambda row: schemas.job_response(row, None).model_dump_json())


_LAYERS: dict[str, Step] = {
    "a thread": lambda answers: _EMPTY,
    "a connection and its transaction": _open_session,
    "the key, its limits": _recognize_caller,
    "the row": _row,
    "its object": _object,
    "its JSON": _json,
}


async def _measure_layers(app: FastAPI, key: str, requests: int) -> dict[str, list[float]]:
    """Return for each arm its mean CPU microseconds per request, one value for each round."""
    arms: dict[str, Step | None] = {"/healthz": None, _BARE: None, "its line of the log": None, **_LAYERS}
    found: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(ROUNDS):
        for name, step in arms.items():
            path = name if name == "/healthz" else f"{JOBS}/{JOB}"
            logging.disable(logging.INFO if name == _BARE else logging.NOTSET)
            with patch.object(Answers, "respond", _answering(step)):
                await _ask(app, key, path)
                began = time.process_time()
                for _ in range(requests):
                    await _ask(app, key, path)
                found[name].append(1e6 * (time.process_time() - began) / requests)
    return found


def _answering(step: Step | None) -> Callable[..., object]:
    async def respond(self: Answers, work: object) -> Response:
        text = _EMPTY if step is None else await run_in_threadpool(step, self)
        return Response(text, media_type="application/json")

    return respond


async def _ask(app: FastAPI, key: str, path: str) -> None:
    headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {key}".encode())]
    scope: dict[str, object] = {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
    }
    scope |= {
        "query_string": b"",
        "http_version": "1.1",
        "scheme": "http",
        "root_path": "",
        "headers": headers,
        "state": {},
    }
    scope |= {"asgi": {"version": "3.0"}, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)}

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        if message.get("status", 200) != 200:
            raise SystemExit(f"{path}: {message['status']}")

    await app(scope, receive, send)


def _print(found: dict[str, list[float]]) -> None:
    print(f"{'':36}{'in all':>8}{'adds':>8}")
    middle = {name: statistics.median(times) for name, times in found.items()}
    before = 0.0
    for name, whole in middle.items():
        print(f"{name:36}{whole:8.0f}{whole - before:8.0f}")
        before = 0.0 if name == "/healthz" else whole


if __name__ == "__main__":
    main()
