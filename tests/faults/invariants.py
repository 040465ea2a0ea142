"""What must hold after any fault: found by one look at the tables and one walk over the published bytes.

I1 no accepted job is missing                      I4 every claim raised the token, after a hand-back or a pause
I2 at most one adapter, its bytes as recorded,     I5 nothing is published that did not pass the gate
   of the newest token; its files' rows once       I6 every job has ended, or waits because somebody paused it
I3 an ended job has one last word                  I7, I8, I10 the books: see `books`
                                                   I9 no process is left (the harness and the fixture see to it)
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

from sqlalchemy import func, select

from app.db import read
from app.db.tables import TERMINAL, File, Job, JobEvent, JobStatus
from app.storage import StorageError
from tests.faults import books
from tests.worker.shop import Shop

_LAST = ("The job has successfully completed", "Fine-tuning job cancelled")


class Broken(AssertionError):
    """An invariant does not hold."""


def check(shop: Shop, accepted: Iterable[str]) -> None:
    """Raise `Broken` with everything that is wrong."""
    with read(shop.engine) as session:
        jobs = {job.id: job for job in session.scalars(select(Job))}
        rows = session.execute(select(JobEvent.job_id, JobEvent.level, JobEvent.message).order_by(JobEvent.seq)).all()
        files = session.scalar(select(func.count()).where(File.purpose == "fine-tune-results"))
    told: dict[str, list[tuple[str, str]]] = {job_id: [] for job_id in jobs}
    for job_id, level, message in rows:
        told[job_id].append((level, message))
    wrong = [f"I1 {job_id} is missing" for job_id in accepted if job_id not in jobs]
    for job in jobs.values():
        wrong += [f"{what}: {job.id}" for what in (*_published(shop, job), *_history(job, told[job.id]))]
    if files != sum(len(job.result_files or []) for job in jobs.values()):
        wrong.append("I2 result files without a job")
    wrong += books.wrong(shop, jobs)
    if wrong:
        raise Broken("\n".join(wrong))


def _published(shop: Shop, job: Job) -> list[str]:
    if job.status != JobStatus.succeeded or job.adapter is None:
        return ["I2 an adapter that is not published"] if job.adapter or job.fine_tuned_model else []
    wrong = []
    if f"/a{job.lease_token}/" not in job.adapter["storage_key"]:
        wrong.append("I2 published by a worker that was replaced")
    try:
        if sha256(shop.content(job.adapter["storage_key"])).hexdigest() != job.adapter["sha256"]:
            wrong.append("I2 other bytes than recorded")
    except StorageError:
        wrong.append("I2 published without bytes")
    if (job.safety or {}).get("gate", {}).get("decision") != "pass":
        wrong.append("I5 published without a passed audit")
    return wrong


def _history(job: Job, told: list[tuple[str, str]]) -> list[str]:
    """The job's events against its row."""
    wrong, messages = [], [message for _, message in told]
    starts = sum(message.startswith("Fine-tuning job started") for message in messages)
    returns = sum(message.startswith(("Fine-tuning job moved back", "Fine-tuning job paused")) for message in messages)
    last_words = sum(level == "error" or message in _LAST for level, message in told)
    if starts != job.lease_token or starts > 1 + returns:
        wrong.append(f"I4 {starts} starts, {returns} returns, token {job.lease_token}")
    if last_words != (job.status in TERMINAL):
        wrong.append(f"I3 {last_words} last words")
    if job.status not in TERMINAL and job.status != JobStatus.paused:
        wrong.append(f"I6 still {job.status}")
    return wrong
