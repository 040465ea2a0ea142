"""Describe a job's outcome by its own counts, in one headline; never as "safe".

A job that the gate held back is explained by the decisive figure, and by next steps for its owner or the provider.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from app.db.tables import JobStatus
from app.db.tables.job_records import GateJson
from app.help import job_cure
from app.jobs.reports.plots import percent
from app.jobs.schemas import JobOut
from spard.evaluation.results import ATTACKS, HARMLESS, Figure, SuiteResult
from spard.evaluation.statistics import wilson
from spard.release.report import GateRecord, SafetyReport

HELD_BACK = "safety_gate_failed"
_SHORT = {
    "attacks": "attacks",
    "refusals": "harmless requests refused",
    "harm": "harm in replies to harmless requests",
    "right_answers": "right answers",
}
Look = Literal["good", "bad", "doubt", "plain"]


def is_held_back(job: JobOut) -> bool:
    """Return True if the job trained a model that did not pass the gate."""
    return job.status == JobStatus.failed and job.error is not None and job.error["code"] == HELD_BACK


@dataclass(frozen=True, slots=True)
class StoppingFigure:
    """The figure that held a job back: `number` is the share that stopped it, `words` say of what."""

    number: str
    words: str

    def __str__(self) -> str:
        """Return the figure in one phrase."""
        return f"{self.number} {self.words}"


def stopping_figure(gate: GateJson | None) -> StoppingFigure | None:
    """Return the figure that decided, in few words; None if the gate names none, as in earlier versions.

    That is the first figure above its limit. Where all are open, it is the one that `undecided_sentence` tells, with
    the bound that hung: the share itself may be 0.
    """
    found = GateRecord.from_json(gate or {}).figures
    if not found:
        return None
    figure = next((each for each in found if not each.is_open), None) or _furthest(found)
    about = f" about {figure.category!r}" if figure.category is not None else ""
    later = " after a further fine-tuning" if figure.after_tuning else ""
    words = f"{_SHORT[figure.finding]}{about}{later}, suite “{figure.suite}”"
    if not figure.is_open or figure.exceeds_limit:
        return StoppingFigure(percent(figure.share), words)
    bound = f"{_ABOVE[figure.measure]}, limit {percent(figure.limit)}"
    return StoppingFigure(f"up to {percent(figure.high)}", f"{words}{bound}")


def _furthest(figures: Sequence[Figure]) -> Figure:
    """Return the figure that is furthest above its limit, or nearest to it."""
    return max(figures, key=lambda each: each.value - each.limit)


_COUNTED = {
    "attacks": "attacks succeed",
    "refusals": "harmless requests are refused",
    "harm": "replies to harmless requests do harm",
    "right_answers": "answers are right",
}
_ABOVE = {"share": "", "rise": ", above the base model's", "drop": ", below the base model's"}
_BOUNDED = {"share": "the share", "rise": "its rise above the base model's", "drop": "its drop below the base model's"}


def undecided_sentence(gate: GateRecord) -> str:
    """Return a sentence on the figure that an audit left open, its limit, the base model, and who has to act.

    Of several open figures it is the one furthest above its limit, or nearest to it. Empty if no reason names one.
    """
    figures = [each for each in gate.figures if each.is_open]
    if not figures:
        return ""
    found = _furthest(figures)
    about = f" about {found.category!r}" if found.category is not None else ""
    later = " after a further fine-tuning" if found.after_tuning else ""
    base = "was not asked" if found.base_share is None else f"has {found.base_share:.1%}"
    actors = dict.fromkeys(each.actor for each in islice(_gate_steps(gate), _STEPS_SHOWN))
    return (
        f"What is open: {found.hits} of {found.n} {_COUNTED[found.finding]}{about}{later}, {found.share:.1%}, on the "
        f"suite “{found.suite}”, where the base model {base}; {_BOUNDED[found.measure]} may be at most "
        f"{found.limit:.1%}, and the audit leaves room for up to {found.high:.1%}; {' or '.join(actors)} can act."
    )


_STEPS_SHOWN = 2


@dataclass(frozen=True, slots=True)
class _Step:
    """A next step, and who has to take it."""

    actor: Literal["you", "your provider"]
    text: str


def gate_cure(gate: GateRecord) -> str:
    """Return what to do about a gate that did not pass: at most two sentences, which end the job's error message."""
    return " ".join(each.text for each in islice(_gate_steps(gate), _STEPS_SHOWN))


def next_steps(job: JobOut, report: SafetyReport | None) -> tuple[str, ...]:
    """Return at most two next steps for a job that made no model; each says who has to act."""
    return tuple(_steps(job, report))[:_STEPS_SHOWN]


def _steps(job: JobOut, report: SafetyReport | None) -> Iterator[str]:
    if job.status != JobStatus.failed or job.error is None:
        return
    if not is_held_back(job):
        yield from _EARLY.get(job.error["code"], ())
        return
    if report and report.task_check and report.task_check.is_unfamiliar:
        yield (
            "Choose another base model: this one has not read text like your file's, and expects its answers no better "
            "than by chance."
        )
    yield from (each.text for each in _gate_steps(report.gate if report else None))


def _gate_steps(gate: GateRecord | None) -> Iterator[_Step]:
    """Yield what helps against the reasons of a gate that did not pass, the most helpful step first."""
    figures = gate.figures if gate else ()
    kinds = {each.finding for each in (gate.findings if gate else None) or ()}
    if "unmeasured_judge" in kinds:
        yield _Step(
            "your provider",
            "Your provider has to measure the judge for this base model (`spard judge`): until then no job passes.",
        )
        yield _Step(
            "your provider",
            "Nothing in your file is known to be wrong; start the job again when the judge was measured.",
        )
        return
    if "refusals" in kinds:
        yield _Step(
            "you",
            "Add rows that answer ordinary requests as you want them answered, under the system prompt of your rows.",
        )
    if "attacks" in kinds or any(each.stays_above_limit for each in figures):
        yield _Step("you", "Look at the riskiest rows, and start the job again without them.")
    if any(each.is_open and each.prompts is not None for each in figures):
        yield _Step("your provider", "Your provider can import a larger suite: more prompts would decide this figure.")
    yield _Step("you", "Try fewer epochs or a lower learning rate.")
    yield _Step("your provider", "Your provider can release the model for a time by a waiver of two people.")


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


@dataclass(frozen=True, slots=True)
class Words:
    """A part of a headline; `look` is the style of a highlighted figure, "" for plain text."""

    text: str
    look: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The pill, the headline, a sentence below it, and the reasons of the gate or the failure."""

    look: Look
    pill: str
    headline: tuple[Words, ...]
    sentence: str = ""
    reasons: tuple[str, ...] = ()


_PILLS: Mapping[str, tuple[Look, str]] = {
    "pass": ("good", "Passed the safety gate"),
    "fail": ("bad", "Stopped by the safety gate"),
    "inconclusive": ("doubt", "The safety gate could not decide"),
    "waived": ("doubt", "Released by the provider, not by the gate"),
}

_BY_EARLIER_VERSION = "An earlier version audited this model, so its figures are in the reasons only."

_PHASES = {
    "validate": "Checking the files",
    "embed": "Reading your rows",
    "select": "Choosing safe examples",
    "train": "Training",
    "audit": "Asking the trained model the audit's questions",
    "package": "Proving and signing the adapter",
}


def verdict(job: JobOut, report: SafetyReport | None, undefended: SafetyReport | None) -> Verdict:
    """Describe a job's status and, once it was audited, its measurements and the gate's decision.

    `undefended` is the report of its undefended twin, which the headline compares with.
    """
    if report is None or not report.adapter:
        return _unmeasured_verdict(job, report)
    look, pill = _PILLS[_decision(job, report)]
    return Verdict(
        look,
        pill,
        tuple(_headline(report, undefended, look)),
        " ".join((*_rejection_text(job, report), *_sentences(report, undefended))),
        tuple(_merge_reasons(report.gate)),
    )


def _merge_reasons(gate: GateRecord) -> Iterator[str]:
    """Yield the gate's reasons; reasons about the same counts of a suite are merged into one sentence."""
    beginnings = {each.reason: each.beginning for each in gate.figures}
    found: dict[str, list[str]] = {}
    for reason in gate.reasons:
        found.setdefault(beginnings.get(reason, reason), []).append(reason)
    for said, alike in found.items():
        demands = (each[len(said) :].lstrip(";: ").removesuffix(".") for each in alike)
        yield alike[0] if len(alike) == 1 else f"{said}: {'; '.join(demands)}."


def _rejection_text(job: JobOut, report: SafetyReport) -> Iterator[str]:
    """Yield why an audited job failed, without the gate's reasons and the next steps, which the page lists below."""
    if job.status == JobStatus.failed and job.error:
        without_cure = job.error["message"].removesuffix(gate_cure(report.gate)).rstrip()
        yield without_cure.removesuffix(" ".join(report.gate.reasons)).rstrip()
        if report.gate.findings is None:
            yield _BY_EARLIER_VERSION
    if report.gate.decision == "inconclusive" and (said := undecided_sentence(report.gate)):
        yield said


def _decision(job: JobOut, report: SafetyReport) -> str:
    return "waived" if "waiver" in job.safety else report.gate.decision


def _unmeasured_verdict(job: JobOut, report: SafetyReport | None) -> Verdict:
    match job.status:
        case JobStatus.succeeded:
            reasons = report.gate.reasons if report else ()
            return Verdict("doubt", "Not measured", (Words("This model was not audited."),), reasons=reasons)
        case JobStatus.failed:
            message = job.error["message"] if job.error else "The service does not say why."
            if job.error and job.error["code"] in _EARLY:  # the page lists what to do
                message = message.removesuffix(job_cure(job.error["code"])).rstrip()
            return Verdict("bad", "Failed", (Words("This job made no model."),), message)
        case JobStatus.cancelled:
            return Verdict("plain", "Cancelled", (Words("This job was cancelled."),))
        case JobStatus.paused:
            return Verdict("plain", "Paused", (Words("This job waits until you resume it."),))
        case JobStatus.running:
            return Verdict("plain", "Running", (Words(f"{_PHASES.get(job.safety['phase'], job.safety['phase'])}."),))
        case _:
            place = job.safety["progress"]["queue_position"]
            if reason := job.safety["progress"].get("queue_reason"):
                return Verdict("doubt", "Queued", (Words("No worker can take this job."),), reason)
            sentence = f"Number {place} in your queue." if place else "It begins when a worker is free."
            return Verdict("plain", "Queued", (Words("Waiting for a worker."),), sentence)


def _headline(report: SafetyReport, undefended: SafetyReport | None, look: Look) -> Iterator[Words]:
    attacks = count_kind(report.adapter, "harmful")
    if attacks is None:
        yield Words("No attack was tried on this model.")
        return
    elsewhere = _other_failed_suites(report, attacks)
    yield Words(f"{attacks.hits} of {attacks.n}", "" if elsewhere else look)
    attack, succeed = "attack" if attacks.n == 1 else "attacks", "succeeds" if attacks.hits == 1 else "succeed"
    yield Words(f" {attack} {succeed} on this model")
    worst = max((each for each in elsewhere if each.kind in ATTACKS), key=_share, default=None)
    if worst is not None:
        yield Words(f"; of the suite “{worst.suite}”, ")
        yield Words(f"{worst.hits} of {worst.n}", look)
        yield Words(" do")
    elif refusals := [each for each in elsewhere if each.kind in HARMLESS]:
        refused = max(refusals, key=_share)
        yield Words(f"; of the harmless requests “{refused.suite}”, it refuses ")
        yield Words(f"{refused.hits} of {refused.n}", look)
    yield Words(".")
    before = count_kind(undefended.adapter, "harmful") if undefended else None
    if before is not None:
        yield Words(" Undefended, the same file let ")
        yield Words(str(before.hits) if before.n == attacks.n else f"{before.hits} of {before.n}", "undefended")
        yield Words(" through.")


def _other_failed_suites(report: SafetyReport, attacks: Count) -> Sequence[SuiteResult]:
    """Return the suites that the gate's reasons name.

    Empty if the plain attacks, which the headline counts, explain the decision.
    """
    limits, named = report.thresholds, report.named_suites
    tells = any(each.kind == "harmful" for each in named) or (limits is not None and attacks.share > limits.max_asr)
    return [] if tells else named


def _share(result: SuiteResult) -> float:
    return result.hits / max(result.n, 1)


def _sentences(report: SafetyReport, undefended: SafetyReport | None) -> Iterator[str]:
    task, refused = count_kind(report.adapter, "utility"), count_kind(report.adapter, "benign")
    if task is not None:
        others = [
            (found, words)
            for words, results in (
                ("undefended", undefended.adapter if undefended else ()),
                ("before fine-tuning", report.base),
            )
            if (found := count_kind(results, "utility"))
        ]
        compared = " and ".join(f"{percent(found.share)} {words}" for found, words in others)
        yield f"It answers {percent(task.share)} of the task right{', ' + compared if compared else ''}."
    if refused is not None:
        yield f"It refuses {refused.hits} of {refused.n} harmless requests."
    if (attacks := count_kind(report.adapter, "harmful")) is not None:
        low, high = attacks.interval
        yield f"95 % interval of the attack rate: {percent(low)} to {percent(high)}, on the prompts that were asked."


# Sum the counts of an audit over all suites of a kind.


@dataclass(frozen=True, slots=True)
class Count:
    """Attacks that succeeded, harmless requests refused, or right answers: `hits` of `n` scored replies; n > 0."""

    hits: int
    n: int

    @property
    def share(self) -> float:
        """The share of hits, from 0 to 1."""
        return self.hits / self.n

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % Wilson interval of the share."""
        return wilson(self.hits, self.n)


def count_kind(results: Sequence[SuiteResult], kind: str) -> Count | None:
    """Return the counts of all suites of a kind; None if nothing was scored."""
    found = [each for each in results if each.kind == kind]
    n = sum(each.n for each in found)
    return Count(sum(each.hits for each in found), n) if n else None
