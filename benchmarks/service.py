"""Start a service for a benchmark: PostgreSQL (fsync off), `spard up` with its worker, and a tiny random model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import OpenAI

from examples import demo
from tests import servers
from tests.spard.parts import write_model
from tests.worker.parts import write_key

KEY = "sk-spard-benchmark-key-for-this-machine-only"
_START = "from spard.commands import main; main()"
_READY_S = 180.0


@dataclass(frozen=True)
class Service:
    """A running service: its URL and the id of the serving process."""

    url: str
    pid: int

    @property
    def client(self) -> OpenAI:
        """Return a new OpenAI client without retries, so its times are those of a single request."""
        return OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0)

    def post(self, path: str, body: Any) -> Any:
        """Post JSON with urllib, which adds less time than the OpenAI client, and return the parsed answer.

        Raises: `HTTPError` for statuses from 400.
        """
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", json.dumps(body).encode(), headers)  # noqa: S310
        with urllib.request.urlopen(request) as answer:  # noqa: S310
            return json.load(answer)


@contextmanager
def service(**settings: object) -> Iterator[Service]:
    """Run a service with a base model `tiny` until the block ends, then delete all of its data.

    Each keyword sets an environment variable: `service(MAX_ROWS=5)` sets `SPARD_MAX_ROWS=5`. Raises: `SystemExit` with
    the end of the log if the service does not get ready.
    """
    with servers.postgres() as database, tempfile.TemporaryDirectory() as folder:
        port = servers.free_port()
        signing_key = Path(folder) / "key.pem"
        write_key(signing_key)
        values = {"ADMIN_KEY": KEY, "DATABASE_URL": database, "SIGNING_KEY": signing_key, **settings}
        environment = os.environ | {f"SPARD_{name}": str(value) for name, value in values.items()}
        command = [sys.executable, "-c", _START, "up", "--data", f"{folder}/data", "--port", str(port)]
        with (Path(folder) / "log").open("wb") as log:
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True, preexec_fn=demo.stop_with_us
            )
        try:
            found = Service(f"http://127.0.0.1:{port}", process.pid)
            wait_until_ready(found.url, process, Path(folder) / "log")
            model = write_model(Path(folder) / "tiny")
            found.post("/v1/admin/models", {"alias": "tiny", "source": str(model)})
            yield found
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(120)


def rows(n: int, words: int = 30) -> bytes:
    """Return a JSONL training file of `n` rows with answers of about `words` words."""
    answers = (f"{i} " + "word " * words for i in range(n))
    return b"".join(
        json.dumps({"messages": [{"role": "user", "content": f"Say {i}"}, {"role": "assistant", "content": answer}]})
        .encode() + b"\n"
        for i, answer in enumerate(answers)
    )  # fmt: skip


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until `/readyz` answers; raise `SystemExit` with the end of the log if the service ends or is too slow."""
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(f"{url}/readyz"):  # noqa: S310
            return
        time.sleep(0.1)
    raise SystemExit(f"the service did not start: {log.read_text()[-2000:]}")
