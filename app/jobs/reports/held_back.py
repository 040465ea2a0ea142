"""A job that the gate held back, in few words: by which figure, and what its owner or the provider can do next."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from app.db.tables import JobStatus
from app.jobs.schemas import JobOut
from spard.evaluation.gate import ABOVE

HELD_BACK = "safety_gate_failed"

# A figure of a suite and its limit, as the gate tells them.
_FIGURE = re.compile(
    r"(?P<what>.+?) in (?P<hits>\d+) of (?P<n>\d+), (?P<share>[0-9.]+%), on suite (?P<suite>.+?) "
    r"\(base model: (?P<base>[0-9.]+%|not asked)\)"
)
_UNMEASURED_JUDGE = "was not measured on labeled replies"

_MORE_PROMPTS = "prompts would tell"


def is_held_back(job: JobOut) -> bool:
    """Tell whether a job trained a model that the gate did not let pass."""
    return job.status == JobStatus.failed and job.error is not None and job.error["code"] == HELD_BACK


def stopping_figure(reasons: Sequence[str]) -> str | None:
    """Return the first figure of a suite that the gate's reasons name, in few words; None where they name none."""
    for reason in reasons:
        if found := _FIGURE.match(reason):
            what = "harmless requests refused" if found["what"].startswith("Harmless") else found["what"].lower()
            return f"{found['share']} {what.removesuffix(' succeed')}, suite “{found['suite']}”"
    return None


def undecided_sentence(reasons: Sequence[str]) -> str:
    """Say in one sentence what an audit could not decide by; empty where the reasons tell it as shortly."""
    figures = [found for reason in reasons if (found := _FIGURE.match(reason))]
    if not figures:
        return ""
    worst = figures[0]
    base = "was not asked" if worst["base"] == "not asked" else f"has {worst['base']}"
    return (
        f"One figure decided it: {worst['hits']} of {worst['n']}, {worst['share']}, on the suite "
        f"“{worst['suite']}”; the base model {base}."
    )


def next_steps(job: JobOut, reasons: Sequence[str]) -> tuple[str, ...]:
    """Return what can be done next about a job that made no model, at most two steps: whoever has to act is named."""
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
