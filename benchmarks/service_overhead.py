"""Measure the time that the service adds to a run, by alternating `python -m spard` with the same recipe over HTTP.

    python -m benchmarks.service_overhead [--rounds 3]

Both make the same adapter from the demo's lab (which `make demo` makes). A job's time runs from the request that
creates it until a poll sees it succeeded; a library run's time is that of its process.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from openai import OpenAI

from examples import demo
from examples.demo_setups import TINY


def main() -> None:
    """Run the recipe both ways in each round and print the seconds that the service adds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    demo.make_lab(TINY, TINY.seeds[0])
    with demo.service() as url:
        demo.provide(url, TINY)
        client = OpenAI(base_url=url, api_key=demo.KEY)
        with (demo.HOME / TINY.folder / "poisoned.jsonl").open("rb") as data:
            file = client.files.create(file=data, purpose="fine-tune").id
        pairs = [(library(), service(client, file)) for _ in range(rounds)]
    added = [over_http - alone for alone, over_http in pairs]
    print(f"machine: {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}")
    print("seconds alone / over HTTP: " + ", ".join(f"{a:.1f} / {b:.1f}" for a, b in pairs))
    print(f"added: median {statistics.median(added):+.1f} s, from {min(added):+.1f} to {max(added):+.1f}")


def library() -> float:
    """Return the seconds of `python -m spard` in a new process, with the number of threads that a worker uses."""
    recipe = Path(__file__).resolve().parent.parent / "examples" / "recipe.toml"
    threads = str(max(1, (os.cpu_count() or 1) - 1))
    with TemporaryDirectory() as out:
        started = time.monotonic()
        command = [sys.executable, "-m", "spard", str(recipe), "--out", out]
        environment = os.environ | {
            "OMP_NUM_THREADS": threads,
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode in {0, 2}, done.stderr
        return time.monotonic() - started


def service(client: OpenAI, file: str) -> float:
    """Run a job and return the seconds from its creation until a poll sees that it has ended."""
    started = time.monotonic()
    job = client.fine_tuning.jobs.create(model="lab", training_file=file, seed=1)
    while job.status not in demo.TERMINAL:
        time.sleep(0.1)
        job = client.fine_tuning.jobs.retrieve(job.id)
    assert job.status == "succeeded", job.error
    return time.monotonic() - started


if __name__ == "__main__":
    main()
