"""Explain a job that the gate held back: the decisive figure, and next steps for its owner or the provider."""

from __future__ import annotations

from collections.abc import Iterator

from app.db.tables import JobStatus
from app.db.tables.job_records import GateJson
from app.jobs.schemas import JobOut
from spard.release.report import GateRecord

HELD_BACK = "safety_gate_failed"

_SHORT = {
    "attacks": "attacks",
    "refusals": "harmless requests refused",
    "harm": "harm in replies to harmless requests",
    "right_answers": "right answers",
}


def is_held_back(job: JobOut) -> bool:
    """Return True if the job trained a model that did not pass the gate."""
    return job.status == JobStatus.failed and job.error is not None and job.error["code"] == HELD_BACK


def stopping_figure(gate: GateJson | None) -> str | None:
    """Return the first figure that the gate names, in few words; None if it names none, as in earlier versions."""
    for figure in GateRecord.from_json(gate or {}).figures:
        about = f" about {figure.category!r}" if figure.category is not None else ""
        later = " after a further fine-tuning" if figure.after_tuning else ""
        return f"{figure.share:.1%} {_SHORT[figure.finding]}{about}{later}, suite “{figure.suite}”"
    return None


def undecided_sentence(gate: GateRecord) -> str:
    """Return a sentence with the figure that an audit left open; empty if its reasons name none."""
    if not gate.figures:
        return ""
    first = gate.figures[0]
    base = "was not asked" if first.base_share is None else f"has {first.base_share:.1%}"
    return (
        f"The figure that is open: {first.hits} of {first.n}, {first.share:.1%}, on the suite "
        f"“{first.suite}”; the base model {base}."
    )


def next_steps(job: JobOut, gate: GateRecord | None) -> tuple[str, ...]:
    """Return at most two next steps for a job that made no model; each says who has to act."""
    return tuple(_steps(job, gate))[:2]


def _steps(job: JobOut, gate: GateRecord | None) -> Iterator[str]:
    if job.status != JobStatus.failed or job.error is None:
        return
    if not is_held_back(job):
        yield from _EARLY.get(job.error["code"], ())
        return
    figures = gate.figures if gate else ()
    kinds = {each.finding for each in (gate.findings if gate else None) or ()}
    if "unmeasured_judge" in kinds:
        yield "Your provider has to measure the judge for this base model (`spard judge`): until then no job passes."
        yield "Nothing in your file is known to be wrong; start the job again when the judge was measured."
        return
    if "refusals" in kinds:
        yield "Add rows that answer ordinary requests as you want them answered, under the system prompt of your rows."
    if "attacks" in kinds or any(each.stays_above_limit for each in figures):
        yield "Look at the riskiest rows below, and start the job again without them."
    if any(each.is_open and each.prompts is not None for each in figures):
        yield "Your provider can import a larger suite: more prompts would decide this figure."
    yield "Try fewer epochs or a lower learning rate: Again with a change."
    yield "Your provider can release the model for a time by a waiver of two people."


_EARLY = {
    "too_many_rows_dropped": (
        "Start the job again without the rows that are named, or with other answers in them.",
        "Ask your provider whether the rows are rightly taken for harm: the policy's `row_signal` decides what becomes "
        "of them.",
    ),
    "rows_quarantined": (
        "Ask your provider to look at the rows that are named.",
        "Or start the job again without them.",
    ),
    "train_audit_overlap": ("Remove rows that were copied from red-team or benchmark sets.",),
    "provider_data_overlap": ("Your provider has to import the safety pool again; your file can stay as it is.",),
    "invalid_training_file": ("Correct the lines that are named, and upload the file again.",),
}
