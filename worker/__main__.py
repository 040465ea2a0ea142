"""python -m worker: serve jobs until SIGTERM or SIGINT; polls the table, so no broker is needed.

python -m worker --job ID [--token N]: claim that job alone, serve it and end with a code of `worker.worker.Exit`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

from app.errors import Unfit
from app.ops import logs, tracing
from app.ops.lifecycle import until_told
from app.ops.supervisor import announce_ready
from app.settings import get_settings
from worker.worker import Worker

Result = TypeVar("Result")


def main() -> None:
    """Serve jobs until a signal ends the worker; exit with a message if this machine is not fit to serve any.

    With `--job` the exit code is the `worker.worker.Exit` of that one job.
    """
    asked = _parse_arguments()
    try:
        logs.set_up(get_settings().log_format)
        tracing.set_up("spard-worker")
        if asked.job is None and get_settings().nodes_per_job > 1:
            raise Unfit("SPARD_NODES_PER_JOB is for `--job`: a launcher gives one job its machines.")
        worker = Worker(get_settings())
        if asked.job is None:
            serve(worker, worker.run)
        else:
            raise SystemExit(serve(worker, lambda: worker.run_one(asked.job, asked.token)))
    except Unfit as error:
        raise SystemExit(f"spard: {error}") from None


def serve(worker: Worker, work: Callable[[], Result]) -> Result:
    """Run `work` and return its result; SIGTERM and SIGINT end the worker.

    The supervisor learns that the process is ready only after the signal handlers are installed.
    """

    def begin() -> Result:
        announce_ready()
        return work()

    return until_told(begin, worker.end)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m worker", description="Serve jobs until SIGTERM or SIGINT.")
    parser.add_argument("--job", metavar="ID", help="serve this job alone; exits 0 done, 1 failed, 3 nothing to claim")
    parser.add_argument("--token", type=int, metavar="N", help="only while its lease's token is N")
    asked = parser.parse_args()
    if asked.token is not None and asked.job is None:
        parser.error("--token needs --job")
    return asked


if __name__ == "__main__":
    main()
