"""What must hold after any fault: found by one look at the tables and one walk over the published bytes.

I1 no accepted job is missing                      I4 every claim raised the token, after a hand-back or a pause
I2 at most one adapter, its bytes as recorded,     I5 nothing is published that did not pass the gate
   of the newest token; its files' rows once       I6 every job has ended, or waits because somebody paused it
I3 an ended job has one last word                  I7, I8, I10 the books: see `books`
I11 events are numbered without a gap, and none    I9 no process is left (the harness and the fixture see to it)
    is told twice between two starts or resumes;
    nothing is held of a job that has ended
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
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
        events = session.scalars(select(JobEvent).order_by(JobEvent.seq)).all()
        files = session.scalar(select(func.count()).where(File.purpose == "fine-tune-results"))
    told: dict[str, list[JobEvent]] = {job_id: [] for job_id in jobs}
    for event in events:
        told[event.job_id].append(event)
    wrong = [f"I1 {job_id} is missing" for job_id in accepted if job_id not in jobs]
    for job in jobs.values():
        found = *_check_published(shop, job), *_history(job, told[job.id]), *_numbering(job, told[job.id])
        wrong += [f"{what}: {job.id}" for what in found]
    if files != sum(len(job.result_files or []) for job in jobs.values()):
        wrong.append("I2 result files without a job")
    wrong += books.wrong(shop, jobs)
    if wrong:
        raise Broken("\n".join(wrong))


def _check_published(shop: Shop, job: Job) -> list[str]:
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


def _numbering(job: Job, told: Sequence[JobEvent]) -> list[str]:
    """Find gaps and repetitions in the job's events, and what is still held of a job that has ended."""
    wrong = [] if [event.seq for event in told] == list(range(1, len(told) + 1)) else ["I11 a gap between its events"]
    of_attempt = Counter[tuple[int, str]]()
    attempt = 0
    for event in told:
        attempt += event.message.startswith(("Fine-tuning job started", "Fine-tuning job resumed"))
        of_attempt[attempt, event.message] += 1
    wrong += [f"I11 told {times} times: {message}" for (_, message), times in of_attempt.items() if times > 1]
    if job.status in TERMINAL and (job.lease_owner or job.lease_expires_at or job.waiting_for):
        wrong.append("I11 it has ended and is held")
    return wrong


def _history(job: Job, told: Sequence[JobEvent]) -> list[str]:
    """The job's events against its row."""
    wrong, messages = [], [event.message for event in told]
    starts = sum(message.startswith("Fine-tuning job started") for message in messages)
    returns = sum(message.startswith(("Fine-tuning job moved back", "Fine-tuning job paused")) for message in messages)
    last_words = sum(event.level == "error" or event.message in _LAST for event in told)
    if starts != job.lease_token or starts > 1 + returns:
        wrong.append(f"I4 {starts} starts, {returns} returns, token {job.lease_token}")
    if last_words != (job.status in TERMINAL):
        wrong.append(f"I3 {last_words} last words")
    if job.status not in TERMINAL and job.status != JobStatus.paused:
        wrong.append(f"I6 still {job.status}")
    return wrong
