"""`spard up --detach` and `spard down`: start the service in the background, and stop it.

While a service runs it locks the file `up.lock` in the data folder, which holds its address and process id.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import httpx2

from app.commands import embedded, folder_lock
from app.commands.terminal import CommandFailed, say
from app.ops import preflight
from app.ops.processes import python
from app.settings import Settings

LOG = "up.log"
START_S = 120.0  # a service has to answer within that time, even on a busy machine
_LOOK_S = 0.2


def start(settings: Settings, host: str, port: int, *, with_worker: bool) -> subprocess.Popen[bytes]:
    """Start the service in the background, wait until it answers, print its address, and return its process.

    The first key is printed here, never in the log. The service keeps running when this process ends. Raises
    CommandFailed, with the end of the log, if the service does not start.
    """
    preflight.check_folder(settings)
    with folder_lock.lock_folder(settings.data_dir):
        secret = embedded.prepare(settings)
    log = settings.data_dir / LOG
    command = [*python("spard.commands"), "up", "--data", str(settings.data_dir), "--host", host, "--port", str(port)]
    command += [] if with_worker else ["--no-worker"]
    with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as out:
        begins = out.tell()  # the log is appended to; an error shows only what this start has written
        process = subprocess.Popen(  # noqa: S603 - our own module
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    url = _answering(settings.data_dir, process, time.monotonic() + START_S)
    if url is None:
        process.terminate()
        process.wait()
        key = f" Its first key was made and is shown only once: {secret}" if secret else ""
        raise CommandFailed(f"The service did not start; {log} ends with:\n{_end(log, begins)}{key}")
    embedded.announce(settings, secret, url, embedded.unfinished_points(settings), "here")
    say(f"\nIt runs in the background and writes to {log}. Stop it with:\n  spard down --data {settings.data_dir}")
    return process


def stop(folder: Path, timeout_s: float) -> None:
    """Stop the service of a data folder and wait until it has ended; its running jobs continue at the next start.

    Raises CommandFailed if none runs, or if it has not ended after `timeout_s` seconds.
    """
    running = folder_lock.running_service(folder)
    if running is None:
        raise CommandFailed(f"No service runs on {folder}; name the folder that `spard up` was given with --data.")
    url, process_id = running
    if process_id is None:
        raise CommandFailed(f"The service on {folder} is just starting, or is of an earlier version. Try again.")
    os.kill(process_id, signal.SIGTERM)
    until = time.monotonic() + timeout_s
    while folder_lock.running_service(folder) is not None:
        if time.monotonic() > until:
            message = f"The service at {url} has not ended after {timeout_s:g} s: it waits for its jobs to save"
            raise CommandFailed(
                f"{message} what they have done. Wait with a longer --timeout, or end process {process_id}."
            )
        time.sleep(_LOOK_S)
    say(f"The service at {url} has ended; its data stays in {folder}.")


def _answering(folder: Path, process: subprocess.Popen[bytes], until: float) -> str | None:
    """Wait until a started service answers and return its address; None if it ends first, or on timeout."""
    while process.poll() is None and time.monotonic() < until:
        running = folder_lock.running_service(folder)
        if running and running[1] == process.pid and _answers(running[0]):
            return running[0]
        time.sleep(_LOOK_S)
    return None


def _answers(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/healthz", timeout=5).status_code == 200
    except httpx2.HTTPError:
        return False


def _end(log: Path, begins: int) -> str:
    """Return the last 10 lines of a log, from byte `begins` on."""
    with log.open(encoding="utf-8", errors="replace") as lines:
        lines.seek(begins)
        return "".join(lines.readlines()[-10:])
