"""`make clients`: install and run every client and reader of archives; `--write` keeps the table in docs/clients.md."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests import surroundings
from tests.clients import report
from tests.clients.matrix import CLIENTS, CONSUMERS
from tests.clients.running import Outcome, read, run
from tests.clients.service import make_lab, provider_service

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "out" / "clients"


def main() -> int:
    """Return 0 if each client that could be installed found what it expects, but for what is argued."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument(
        "--only", default="", help="of the matrix: clients whose key contains one of these, parted by commas"
    )
    parser.add_argument("--with-inference", action="store_true", help="ask the tuned models too")
    parser.add_argument("--write", action="store_true", help="write the latest figures into docs/clients.md")
    asked = parser.parse_args()
    surroundings.settle(os.environ)
    lab = make_lab(HOME / "lab")
    flags = ["--with-training", *(["--with-inference"] if asked.with_inference else [])]
    outcomes = list[Outcome]()
    with TemporaryDirectory(prefix="service-", dir=HOME) as folder, provider_service(Path(folder), lab) as place:
        for client in (*CLIENTS, *CONSUMERS):
            if any(part in client.key for part in asked.only.split(",")):
                reads = client.runtime == "consumer"
                outcomes.append(read(client, place.base, place.adapter) if reads else run(client, place, *flags))
                report.keep(report.FIGURES, outcomes[-1], with_training=True, with_inference=asked.with_inference)
                sys.stdout.write(report.line(outcomes[-1]) + "\n")
                sys.stdout.flush()
    if asked.write:
        report.write(ROOT / "docs" / "clients.md", report.FIGURES)
    return int(any(outcome.faults for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
