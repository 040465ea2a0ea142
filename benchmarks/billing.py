"""Compare billed with used amounts: tokens when API processes are killed, GPU seconds when storage or judge fail.

    python -m benchmarks.billing [--kills 200] [--engine words|tiny] [--outages 20]

kills    An API process answers four streaming and two whole requests at a time and is killed with SIGKILL at a random
         moment. The ledger entries of the dead process are completed, and each row in the database is compared with
         the tokens that its client received. With `words` a fake engine in the API process writes a word every few
         milliseconds; with `tiny` a real engine runs a tiny random model.
outages  A job runs while the storage hangs or the judge answers 503 for a few seconds at a random moment. The GPU
         seconds of the job's row are compared with the seconds that its child process reports as computed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import socket
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Lock, Thread
from typing import Any

import httpx2
import uvicorn
from sqlalchemy import Engine, select

from app import keys
from app.db import make_engine, read, transaction, upgrade_schema
from app.db.tables import BaseModelEntry, InferenceCall, Project, Quota
from app.http.connections import BoundedHttp
from app.inference.call_leases import complete_lost, ledger_folder
from app.inference.engine_process import Stream
from app.inference.protocol import Ask, EngineMessage, Proof
from app.inference.released import ReleasedModel
from app.main import served_app
from app.settings import Settings
from benchmarks import billing_outages
from tests.spard.parts import write_model

STREAMS, WHOLE = 4, 2  # clients at once
START_S = 300.0
PROJECT = "org-billing"


def main() -> None:
    """Run the kills, then the outages, and print how far the billed amounts differ from the used ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--engine", choices=["words", "tiny"], default="words")
    parser.add_argument("--outages", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    print(f"{os.cpu_count()} cores, {platform.platform()}, load {os.getloadavg()[0]:.1f}", flush=True)
    rng = random.Random(asked.seed)
    if asked.kills:
        measure_kills(asked.kills, asked.engine, rng)
    if asked.outages:
        billing_outages.measure(asked.outages, rng)


def make_settings(folder: Path) -> Settings:
    """Return the settings that all processes of the benchmark share."""
    return Settings(data_dir=folder, lease_s=60.0, heartbeat_s=2.0)


class Words:
    """A fake engine inside the API process that writes a word every few milliseconds."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, model: ReleasedModel, project: str, ask: Ask) -> tuple[Stream, int, Proof | None]:
        """Start writing `max_tokens` words; return the stream, a prompt length of 3 tokens, and no proof."""
        stream = Stream(1, lambda number: None)
        task = asyncio.get_running_loop().create_task(self._write(stream, ask["max_tokens"] or 1))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream, 3, None

    def pids(self) -> list[int]:
        """Return an empty list, because this engine has no process of its own."""
        return []

    async def unload_withdrawn(self) -> None:
        """Do nothing, because this engine holds no adapters."""

    def close(self) -> None:
        """Do nothing, because the engine ends with the API process."""

    async def _write(self, stream: Stream, most: int) -> None:
        for i in range(1, most + 1):
            await asyncio.sleep(random.uniform(0.001, 0.01))
            piece: EngineMessage = {
                "kind": "piece",
                "id": 1,
                "index": 0,
                "text": "on ",
                "reply_tokens": i,
                "finish": None,
            }
            piece["tokens"] = [{"token": "on ", "logprob": -1.0, "bytes": [], "top_logprobs": []}]
            piece["finish"] = "length" if i == most else None
            stream.put(piece)
        stream.put({"kind": "done", "id": 1, "reply_tokens": most})


def serve(folder: Path, port: int, engine: str) -> None:
    """Run the API in this process until it is killed."""
    app = served_app(make_settings(folder))
    if engine == "words":
        app.state.serving.engines = Words()
    uvicorn.run(app, port=port, log_level="error", http=BoundedHttp)


class Clients:
    """Client threads that send requests until they are stopped, and count the tokens received for each request."""

    def __init__(self, url: str, key: str) -> None:
        self._url, self._headers = url, {"authorization": f"Bearer {key}"}
        self._lock, self._stop = Lock(), Event()
        self.received: dict[str, int] = {}
        streams = [True] * STREAMS + [False] * WHOLE
        self._threads = [Thread(target=self._run, args=(is_stream,), daemon=True) for is_stream in streams]

    def start(self) -> None:
        """Start the client threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Send no further requests, and return once every client has read its last answer."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, is_stream: bool) -> None:
        with httpx2.Client(timeout=60.0, trust_env=False) as client:
            while not self._stop.is_set():
                try:
                    self._ask(client, is_stream)
                except httpx2.HTTPError:
                    return  # the API process was killed

    def _ask(self, client: httpx2.Client, is_stream: bool) -> None:
        body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "logprobs": True}
        body |= {"max_tokens": 400 if is_stream else 30, "stream": is_stream}
        asked = client.stream("POST", f"{self._url}/v1/chat/completions", json=body, headers=self._headers)
        with asked as answer:
            answer.raise_for_status()
            if not is_stream:
                whole = json.loads(answer.read())
                self._note(whole["id"], whole["usage"]["completion_tokens"])
                return
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    content = [each["logprobs"]["content"] for each in chunk["choices"] if each["logprobs"]]
                    self._note(chunk["id"], sum(map(len, content)))

    def _note(self, completion: str, tokens: int) -> None:
        call_id = f"call_{completion.removeprefix('chatcmpl-')}"
        with self._lock:
            self.received[call_id] = self.received.get(call_id, 0) + tokens


def measure_kills(kills: int, engine: str, rng: random.Random) -> None:
    """Kill `kills` API processes one after another, and print how the billed tokens differ from the received ones."""
    received: dict[str, int] = {}
    with TemporaryDirectory() as home:
        folder = Path(home) / "data"
        settings = make_settings(folder)
        folder.mkdir()
        upgrade_schema(settings.database())
        database = make_engine(settings.database())
        key = _prepare(database, write_model(Path(home) / "tiny", eos_token_id=None, max_position_embeddings=2048))
        began = time.monotonic()
        for i in range(kills):
            pid, url = _start(folder, engine)
            clients = _await(url, key)
            clients.start()
            time.sleep(rng.uniform(0.2, 2.0))
            _end(pid)
            clients.stop()
            received |= clients.received
            complete_lost(database, ledger_folder(settings))
            if (i + 1) % 20 == 0 or i + 1 == kills:
                print(
                    f"{i + 1} kills, {time.monotonic() - began:.0f} s: {_compare_counts(database, received)}",
                    flush=True,
                )
        database.dispose()


def _compare_counts(database: Engine, received: dict[str, int]) -> str:
    with read(database) as session:
        rows = session.execute(select(InferenceCall.id, InferenceCall.status, InferenceCall.reply_tokens)).all()
    differences = [row.reply_tokens - received.get(row.id, 0) for row in rows]
    lost = sum(row.status == "process_lost" for row in rows)
    running = sum(row.status == "running" for row in rows)
    over, under = sum(max(0, each) for each in differences), sum(min(0, each) for each in differences)
    wrong = sum(each != 0 for each in differences)
    return (
        f"{len(rows)} requests, {lost} cut off, {running} left running; {sum(received.values())} tokens received, "
        f"billed - received: {over:+d} and {under:+d}, in {wrong} requests"
    )


def _prepare(database: Engine, model: Path) -> str:
    with transaction(database) as session:
        session.add(Project(id=PROJECT, name=PROJECT))
        session.add(BaseModelEntry(alias="tiny", source=str(model), revision=None))
        session.flush()
        session.add(Quota(project_id=PROJECT, max_tokens_per_day=10**9))
        return keys.create(session, PROJECT, "billing", ["customer"])[1]


def _start(folder: Path, engine: str) -> tuple[int, str]:
    """Fork an API process and return its process id and URL.

    A fork starts quickly, because everything is imported already; it is safe, because no other thread runs here then.
    """
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    pid = os.fork()
    if pid == 0:
        try:
            serve(folder, port, engine)
        finally:
            os._exit(1)
    return pid, f"http://127.0.0.1:{port}"


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _await(url: str, key: str) -> Clients:
    """Wait until an API process answers a request, and return clients for it that are not started yet."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    give_up_at = time.monotonic() + START_S
    clients = Clients(url, key)
    while True:
        try:
            headers = {"authorization": f"Bearer {key}"}
            with httpx2.Client(timeout=START_S, trust_env=False) as client:
                answer = client.post(f"{url}/v1/chat/completions", json=body, headers=headers)
            break
        except httpx2.ConnectError:
            if time.monotonic() > give_up_at:
                raise
            time.sleep(0.1)
    answer.raise_for_status()
    found = answer.json()
    clients.received[f"call_{found['id'].removeprefix('chatcmpl-')}"] = found["usage"]["completion_tokens"]
    return clients


if __name__ == "__main__":
    main()
