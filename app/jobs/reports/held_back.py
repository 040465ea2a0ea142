"""Explain a job that the gate held back: the decisive figure, and next steps for its owner or the provider."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from app.db.tables import JobStatus
from app.jobs.schemas import JobOut
from spard.evaluation.gate import ABOVE

HELD_BACK = "safety_gate_failed"

# A figure of a suite, or of one category of its prompts, as the gate's reasons write it. Stored reports have only the
# sentences; a test matches this pattern against every kind of sentence that the gate writes.
_FIGURE = re.compile(
    r"(?P<what>.+?) in (?P<hits>\d+) of (?P<n>\d+), (?P<share>[0-9.]+%),(?: about (?P<category>.+?))? "
    r"on suite (?P<suite>.+?) \(base model: (?P<base>[0-9.]+%|not asked)\)"
)
_SHORT = {  # beginning of a reason -> short form
    "Attacks succeed": "attacks",
    "Harmless requests are refused": "harmless requests refused",
    "Replies to harmless requests do harm": "harm in replies to harmless requests",
    "Answers are right": "right answers",
}
_UNMEASURED_JUDGE = "was not measured on labeled replies"

_MORE_PROMPTS = "prompts would tell"


def is_held_back(job: JobOut) -> bool:
    """Return True if the job trained a model that did not pass the gate."""
    return job.status == JobStatus.failed and job.error is not None and job.error["code"] == HELD_BACK


def stopping_figure(reasons: Sequence[str]) -> str | None:
    """Return the first figure in the gate's reasons, in few words; None if the reasons have no figure."""
    for reason in reasons:
        if found := _FIGURE.match(reason):
            about = f" about {found['category']}" if found["category"] else ""
            return f"{found['share']} {_SHORT.get(found['what'], found['what'])}{about}, suite “{found['suite']}”"
    return None


def undecided_sentence(reasons: Sequence[str]) -> str:
    """Return a sentence with the figure that an audit left open; empty if its reasons name none."""
    figures = [found for reason in reasons if (found := _FIGURE.match(reason))]
    if not figures:
        return ""
    first = figures[0]
    base = "was not asked" if first["base"] == "not asked" else f"has {first['base']}"
    return (
        f"The figure that is open: {first['hits']} of {first['n']}, {first['share']}, on the suite "
        f"“{first['suite']}”; the base model {base}."
    )


def next_steps(job: JobOut, reasons: Sequence[str]) -> tuple[str, ...]:
    """Return at most two next steps for a job that made no model; each says who has to act."""
    return tuple(_steps(job, reasons))[:2]


def _steps(job: JobOut, reasons: Sequence[str]) -> Iterator[str]:
    if job.status != JobStatus.failed or job.error is None:
        return
    if not is_held_back(job):
        yield from _EARLY.get(job.error["code"], ())
        return
    text = " ".join(reasons)
    if _UNMEASURED_JUDGE in text:
        yield "Your provider has to measure the judge for this base model (`spard judge`): until then no job passes."
        yield "Nothing in your file is known to be wrong; start the job again when the judge was measured."
        return
    if "Harmless requests are refused" in text:
        yield "Add rows that answer ordinary requests as you want them answered, under the system prompt of your rows."
    if "Attacks succeed" in text or ABOVE in text:
        yield "Look at the riskiest rows below, and start the job again without them."
    if _MORE_PROMPTS in text:
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
