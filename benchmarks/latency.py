"""Measure the latency of reading and of creating jobs while another job trains, at a constant request rate.

    python -m benchmarks.latency [--seconds 30] [--reads 100] [--submits 20]

The load is an open loop: each request is sent at its scheduled time, and its latency runs from that time, so a slow
answer neither delays nor hides another. The service is `spard up` on PostgreSQL (fsync off) with one worker of one
thread; the client runs on the same machine.
"""

from __future__ import annotations

import argparse
import gc
import http.client
import json
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import local
from urllib.parse import urlsplit

from benchmarks.service import KEY, Service, rows, service

THREADS = 32
JOBS = "/v1/fine_tuning/jobs"
PLAIN = {"safety": {"defense": {"type": "none"}}}
Send = Callable[[int], None]


def main() -> None:
    """Measure reads, then creations of jobs, while one job trains; print VOID if it ends too early."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--reads", type=int, default=100, help="a second")
    parser.add_argument("--submits", type=int, default=20, help="a second")
    asked = parser.parse_args()
    print(f"{os.cpu_count()} cores, {platform.platform()}, {asked.seconds:.0f} s each")
    with service(WORKER_THREADS=1, MAX_RUN_S=86_400) as found:
        file = found.client.files.create(file=("rows.jsonl", rows(2000)), purpose="fine-tune").id
        job = {"model": "tiny", "training_file": file, "hyperparameters": {"n_epochs": 50}, **PLAIN}
        training = found.post(JOBS, job)["id"]
        _await_steps(found, training)
        gc.collect()
        gc.freeze()  # the client's own pauses are not the service's
        _report("read", asked.reads, asked.seconds, _sender(found, "GET", f"{JOBS}/{training}"))
        _report("submit", asked.submits, asked.seconds, _sender(found, "POST", JOBS, json.dumps(job)))
        is_training = found.client.fine_tuning.jobs.retrieve(training).status == "running"
        print("the job trained all the time" if is_training else "VOID: the job did not train to the end")
        found.client.fine_tuning.jobs.cancel(training)


def _await_steps(found: Service, job: str) -> None:
    while not any(event.type == "metrics" for event in found.client.fine_tuning.jobs.list_events(job).data):
        time.sleep(0.2)


def _report(name: str, rate: int, seconds: float, send: Send) -> None:
    """Send requests at a constant rate (per second) and print the p50 and p99 of their latencies."""
    began, times = time.perf_counter() + 0.5, list[float]()

    def one(i: int) -> None:
        due = began + i / rate
        time.sleep(max(0.0, due - time.perf_counter()))
        send(i)
        times.append(time.perf_counter() - due)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(one, range(int(rate * seconds))))
    times.sort()
    p50, p99 = (1000 * times[int(share * (len(times) - 1))] for share in (0.5, 0.99))
    load = os.getloadavg()[0]
    print(f"{name}: {len(times)} at {rate}/s, p50 {p50:.1f} ms, p99 {p99:.1f} ms, load {load:.1f}", flush=True)


def _sender(found: Service, method: str, path: str, body: str | None = None) -> Send:
    """Return a function that sends one request over its thread's persistent connection and asserts status 200."""
    own, host = local(), urlsplit(found.url).netloc
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}

    def send(i: int) -> None:
        if not hasattr(own, "connection"):
            own.connection = http.client.HTTPConnection(host, timeout=30)
        own.connection.request(method, path, body, headers)
        answer = own.connection.getresponse()
        text = answer.read()
        assert answer.status == 200, text

    return send


if __name__ == "__main__":
    main()
