"""A customer's process: it sends jobs as fast as its project's limit lets it, until it is killed.

A job counts as accepted once the database has said so and the customer has noted it; it may die between the two.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from random import Random
from typing import Any

from sqlalchemy.exc import DBAPIError

from app.db import make_engine, transaction
from app.errors import QuotaExceeded
from tests.faults import mutants
from tests.faults.sleeper import note
from tests.worker.shop import submit

QUOTA_REFUSED = "quota refused"


def serve(database_url: str, asked: dict[str, Any], folder: Path, mutant: str | None, seed: int) -> None:
    """Send jobs with the columns `asked`; ids and refusals are noted in files of the folder."""
    mutants.apply(mutant)
    os.setsid()
    engine, rng = make_engine(database_url), Random(seed)
    while True:
        try:
            with transaction(engine) as session:
                job_id = submit(session, asked)
        except QuotaExceeded:
            note(folder / "guards", QUOTA_REFUSED)
        except DBAPIError as error:
            note(folder / "guards", f"customer's {type(error).__name__}")
        else:
            note(folder / "accepted", job_id)
        time.sleep(rng.uniform(0.01, 0.05))


def accepted_jobs(folder: Path) -> list[str]:
    """The ids of the jobs that customers know of."""
    path = folder / "accepted"
    return path.read_text().split() if path.exists() else []
