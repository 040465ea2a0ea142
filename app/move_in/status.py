"""Report the progress of a move, from its ledger alone."""

from __future__ import annotations

from app.move_in.ledger import Ledger, Record
from app.move_in.replies import GOLDEN, Plan, missing, model_jobs


def summary(ledger: Ledger) -> Record:
    """Return the move's progress: counts of what was read, and an entry for each job."""
    downloads, jobs = ledger.all("download"), ledger.all("job")
    read = ledger.get("account", "read") or {}
    return {
        "account": ledger.get("account", "url"),
        "read_at": read.get("finished_at"),
        "jobs": len(jobs),
        "files": sum("sha256" in each for each in downloads.values()),
        "bytes": sum(each.get("bytes", 0) for each in downloads.values()),
        "not_downloaded": {key: each["problem"] for key, each in downloads.items() if "problem" in each},
        "moves": [_move(ledger, job) for job in jobs.values()],
        "fine_tuned_models": len(model_jobs(ledger)),
    }


def _move(ledger: Ledger, job: Record) -> Record:
    """Return one job's progress: its model's golden replies, and the job here."""
    old, filing = job.get("fine_tuned_model"), ledger.get("filing", job["id"]) or {}
    here = filing.get("job") or {}
    return {
        "job": job["id"],
        "status": job.get("status"),
        "model": old,
        "golden": _golden(ledger, old) if old else None,
        "here": here.get("id"),
        "status_here": here.get("status") or ("refused" if "refused" in filing else None),
        "why": filing.get("refused") or (here.get("error") or {}).get("message"),
        "model_here": here.get("fine_tuned_model"),
        "notes": filing.get("notes") or [],
    }


def _golden(ledger: Ledger, model: str) -> str | None:
    """Return "N of M" for a model's planned replies, without refused ones; None without a plan."""
    plan: Plan | None = ledger.get("plan", model)
    if plan is None:
        return None
    wanted = len(plan["prompts"]) * plan["replies"]
    return f"{wanted - len(missing(ledger, GOLDEN, model, plan, again=True))} of {wanted}"


def next_step(ledger: Ledger, found: Record) -> str:
    """Return the next command to run, with its reason."""
    folder, moves = ledger.folder, found["moves"]
    if found["read_at"] is None:
        return f"the account is not read to its end: spard move-in read {folder}"
    if any(each["model"] and not each["golden"] for each in moves):
        return f"keep golden replies while the old models answer: spard move-in golden {folder}"
    if any(each["status"] == "succeeded" and not each["here"] for each in moves):
        return f"file the jobs: spard move-in file {folder} --model OLD=NEW --wait"
    return f"compare: spard move-in compare {folder}"
