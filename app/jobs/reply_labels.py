"""People of the provider label replies of a base model's jobs, so that a judge can be measured on them.

Replies are drawn from the transcripts of the model's latest jobs (`spard.evaluation.calibration.labeling`). These are
customers' data: only keys with the scope `admin` read them, each access is logged, and texts stay in the transcripts
and are deleted with their job.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, Field
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app import audit_log
from app.catalog import service as catalog
from app.db import Begin
from app.db.base import utc_now
from app.db.tables import ApiKey, BaseModelEntry, Job, ReplyLabel, SampledReply
from app.errors import HasNone, NotFound
from app.http.schemas import Body
from app.jobs import transcripts
from app.jobs.reports.service import read_json
from app.keys import Principal
from app.storage import Storage
from spard.data.jsonl import numbered_texts
from spard.evaluation.calibration.labeling import (
    DRAWN,
    Exchange,
    Label,
    decide_label,
    disputed_replies,
    draw_replies,
    group_labels,
    labeled_row,
    labeler_agreement,
    stratum_weights,
)
from spard.release.figures import TRANSCRIPTS

MOST_DRAWN = 2000
_JOBS = 20  # latest jobs of a model whose replies are drawn from
_TRIED = 20  # replies that are looked for, one after the other, where transcripts were deleted


class _SampledRow(NamedTuple):
    """A row of `sampled_replies` with the storage key of its job's report."""

    id: str
    model: str
    place: int
    job_id: str
    number: int
    stratum: str
    population: int
    report_key: str

    @property
    def key(self) -> str:
        """The storage key of the job's transcripts."""
        return _transcript_key(self.report_key)


class DrawCreate(Body):
    """The base model whose replies people are to label, and how many."""

    model: Annotated[str, Field(min_length=1, max_length=128)]
    count: Annotated[int, Field(ge=1, le=MOST_DRAWN)] = DRAWN


class LabelCreate(Body):
    """A person's score of a reply, from 1 (refuses or is harmless) to 5 (complies fully).

    `settles`: the score settles a disagreement.
    """

    score: Annotated[int, Field(ge=1, le=5)]
    settles: bool = False


class Score(BaseModel):
    """One person's score of a reply."""

    labeler: str
    score: int
    settles: bool


class ReplyOut(BaseModel):
    """A drawn reply to be labeled; `labels` are the scores of others, shown only while a disagreement is settled."""

    object: Literal["reply"] = "reply"
    id: str
    model: str
    place: int
    suite: str
    category: str | None
    prompt: str
    reply: str
    labels: list[Score]


class AgreementOut(BaseModel):
    """How two people agree on harm or no harm, with 95 % intervals; `kappa` is null if chance alone explains it."""

    labelers: tuple[str, str]
    same: int
    n: int
    low: float
    high: float
    kappa: float | None
    kappa_low: float | None
    kappa_high: float | None


class LabelWork(BaseModel):
    """How far the labeling of a base model's replies is, and the next reply for the caller, null if none is left.

    `people` counts each person's labels. `harmful` and `safe` count the replies with a decided label.
    """

    object: Literal["reply_labels"] = "reply_labels"
    model: str
    drawn: int
    people: dict[str, int]
    harmful: int
    safe: int
    disputed: int
    agreement: AgreementOut | None
    next: ReplyOut | None


def draw(begin: Begin, storage: Storage, ask: DrawCreate) -> LabelWork:
    """Draw replies from the transcripts of a model's latest jobs; earlier draws stay, and none is drawn twice.

    Raises `NotFound` for an unknown model, and `HasNone` if there is no further reply.
    """
    with begin() as session:
        keys = _transcript_keys(session, catalog.base_model(session, ask.model))
    # No transaction is open while the storage is read.
    found = [
        (job_id, line, _exchange(text))
        for job_id, key in keys.items()
        if storage.exists(key)
        for line, text in numbered_texts(storage.chunks(key))
    ]
    with begin() as session:
        session.get_one(BaseModelEntry, ask.model, with_for_update=True)  # draws of one model wait for each other
        before = _sampled_replies(session, ask.model)
        known = {(each.job_id, each.number) for each in before}
        left = [each for each in found if each[:2] not in known]
        drawn = draw_replies([exchange for _, _, exchange in left], ask.count)
        if not drawn:
            message = f"The last {_JOBS} jobs on {ask.model} have no transcript that was not drawn yet; a policy with "
            raise HasNone(f"{message}`transcripts` keeps those of later jobs.", code="no_transcripts", param="model")
        last = before[-1].place if before else 0
        for place, each in enumerate(drawn, last + 1):
            job_id, number, _ = left[each.place]
            # The last place before the draw distinguishes its strata from those of other draws.
            own = {"stratum": f"{last} {each.stratum}", "population": each.population}
            session.add(SampledReply(model=ask.model, place=place, job_id=job_id, number=number, **own))
        session.flush()
        audit_log.record(session, "replies.drawn", ask.model, count=len(drawn))
        return _work(session, ask.model, None)


def show(
    begin: Begin,
    storage: Storage,
    caller: Principal,
    model: str,
    after: int = 0,
    reply_id: str | None = None,
    *,
    settle: bool = False,
) -> LabelWork:
    """Return how far the labeling is, with the first reply after the place `after` that the caller has not labeled.

    With `settle` it is the first one on which people disagree, with their scores; `reply_id` names one. Replies whose
    transcripts were deleted are passed over. The access is logged.
    """
    with begin() as session:
        catalog.base_model(session, model)
        labels = _labels(session, model)
        waiting = _waiting(session, caller, model, labels, after, reply_id, settle=settle)
    tried = (_describe_reply(storage, each, labels if settle else ()) for each in islice(waiting, _TRIED))
    shown = next((each for each in tried if each is not None), None)
    with begin() as session:
        work = _work(session, model, shown)
        for each in waiting:
            if shown is not None and each.id == shown.id:
                audit_log.record(session, transcripts.SHOWN, each.job_id, indices=[each.number])
        return work


def add_label(session: Session, caller: Principal, reply_id: str, ask: LabelCreate) -> Score:
    """Store the caller's score of a reply, in place of an earlier one; raise `NotFound` for an unknown reply."""
    # The lock makes a person who sends the same score twice at once change one row.
    reply = session.get(SampledReply, reply_id, with_for_update=True)
    if reply is None:
        raise _unknown(reply_id)
    labeler = labeler_name(session, caller)
    own = {"reply_id": reply.id, "labeler": labeler, "settles": ask.settles}
    session.merge(ReplyLabel(**own, job_id=reply.job_id, score=ask.score, created_at=utc_now()))
    session.flush()
    audit_log.record(session, "reply.labeled", reply.id, score=ask.score, settles=ask.settles)
    return Score(labeler=labeler, score=ask.score, settles=ask.settles)


def export(begin: Begin, storage: Storage, model: str) -> str:
    """Return the decided labels as JSONL for `spard judge --labeled`, without replies that were deleted; it is logged.

    Each label names the base model of its job by its digest, so that a judge's errors on these replies count for no
    other model. Raises `HasNone` if there are none.
    """
    with begin() as session:
        catalog.base_model(session, model)
        decided = _decisions(_labels(session, model))
        replies = [each for each in _sampled_replies(session, model) if each.id in decided]
    found = [(each, text) for each in replies if (text := _read(storage, each)) is not None]
    if not found:
        message = f"No reply of {model} has a decided label; label some first."
        raise HasNone(message, code="no_labels", param="model")
    weights = stratum_weights((reply.stratum, reply.population) for reply, _ in found)
    bases = {key: _base_digest(storage, key) for key in {reply.report_key for reply, _ in found}}
    rows = [
        labeled_row(
            text.prompt,
            text.reply,
            decided[reply.id],
            reply.stratum,
            weights[reply.stratum],
            bases[reply.report_key],
        )
        for reply, text in found
    ]
    with begin() as session:
        audit_log.record(session, "reply_labels.exported", model, count=len(rows))
    return "".join(json.dumps(row) + "\n" for row in rows)


def drawn_counts(session: Session) -> dict[str, int]:
    """Return the number of drawn replies of each base model on offer."""
    counts = Counter(session.scalars(select(SampledReply.model)))
    return {entry.alias: counts[entry.alias] for entry in catalog.base_models(session)}


def latest_label(session: Session, caller: Principal, model: str) -> str | None:
    """Return the id of the reply that the caller has labeled last, to go back to it; None without a label."""
    query = select(ReplyLabel.reply_id).join(SampledReply, SampledReply.id == ReplyLabel.reply_id)
    own = (SampledReply.model == model) & (ReplyLabel.labeler == labeler_name(session, caller))
    newest = ReplyLabel.created_at.desc(), SampledReply.place.desc()
    return session.scalar(query.where(own, ReplyLabel.settles.is_(False)).order_by(*newest).limit(1))


def labeler_name(session: Session, caller: Principal) -> str:
    """Return the name under which a caller labels: the owner of the key, or the id of a key without one."""
    return session.get_one(ApiKey, caller.key_id).owner or caller.key_id


def _transcript_keys(session: Session, entry: BaseModelEntry) -> dict[str, str]:
    """Return the storage keys of the transcripts of the model's latest jobs, by job; a changed model's are left out."""
    is_kept = Job.report_key.is_not(None) & Job.spec["transcripts"].as_boolean()
    latest = catalog.select_ended_jobs(entry.alias, Job.id, Job.report_key, Job.spec).where(is_kept)
    return {
        job_id: _transcript_key(report_key)
        for job_id, report_key, spec in session.execute(latest.limit(_JOBS))
        if None in (entry.digest, spec.model.digest) or entry.digest == spec.model.digest
    }


def _transcript_key(report_key: str | None) -> str:
    return f"{(report_key or '').rpartition('/')[0]}/{TRANSCRIPTS}"


def _exchange(text: str) -> Exchange:
    row = json.loads(text)
    return Exchange(row["prompt"], row["reply"], row["suite"], row["kind"], row["category"], row["score"])


def _sampled_replies(session: Session, model: str) -> list[_SampledRow]:
    """Return the drawn replies of a model in their order."""
    columns = [getattr(SampledReply, name) for name in _SampledRow._fields[:-1]]
    query = select(*columns, Job.report_key).join(Job, Job.id == SampledReply.job_id)
    rows = session.execute(query.where(SampledReply.model == model).order_by(SampledReply.place))
    return [_SampledRow._make((*row[:-1], row[-1] or "")) for row in rows]


def _labels(session: Session, model: str) -> list[Label]:
    """Return the labels of a model's replies, oldest first."""
    query = select(ReplyLabel).join(SampledReply, SampledReply.id == ReplyLabel.reply_id)
    found = session.scalars(
        query.where(SampledReply.model == model).order_by(ReplyLabel.created_at, SampledReply.place)
    )
    return [Label(each.reply_id, each.labeler, each.score, each.settles) for each in found]


def _decisions(labels: Sequence[Label]) -> dict[str, bool]:
    """Return whether each reply with a decided label does harm."""
    decided = {reply: decide_label(of_reply) for reply, of_reply in group_labels(labels).items()}
    return {reply: harmful for reply, harmful in decided.items() if harmful is not None}


def _waiting(
    session: Session,
    caller: Principal,
    model: str,
    labels: Sequence[Label],
    after: int,
    reply_id: str | None,
    *,
    settle: bool,
) -> list[_SampledRow]:
    """Return the replies that may be shown next; raise `NotFound` for an unknown `reply_id`."""
    found = _sampled_replies(session, model)
    if reply_id is not None:
        named = [each for each in found if each.id == reply_id]
        if not named:
            raise _unknown(reply_id)
        return named
    if settle:
        wanted = set(disputed_replies(labels))
    else:
        labeler = labeler_name(session, caller)
        wanted = {each.id for each in found} - {
            each.reply for each in labels if each.labeler == labeler and not each.settles
        }
    return [each for each in found if each.place > after and each.id in wanted]


def _unknown(reply_id: str) -> NotFound:
    return NotFound(f"No such reply to label: {reply_id[:64]}", code="reply_not_found", param="reply_id")


def _read(storage: Storage, reply: _SampledRow) -> transcripts.Transcript | None:
    """Return a reply's transcript; None if it was deleted."""
    try:
        found = transcripts.read(storage, reply.key, reply.number - 1, 1, None, None).data
    except HasNone:
        return None
    return found[0] if found else None


def _base_digest(storage: Storage, report_key: str) -> str | None:
    """Return the digest of a job's base model from its report, which alone knows that of a model from the hub."""
    return read_json(storage, report_key).get("base_digest") if storage.exists(report_key) else None


def _describe_reply(storage: Storage, reply: _SampledRow, labels: Sequence[Label]) -> ReplyOut | None:
    text = _read(storage, reply)
    if text is None:
        return None
    scores = [
        Score(labeler=each.labeler, score=each.score, settles=each.settles) for each in labels if each.reply == reply.id
    ]
    return ReplyOut(
        id=reply.id,
        model=reply.model,
        place=reply.place,
        suite=text.suite,
        category=text.category,
        prompt=text.prompt,
        reply=text.reply,
        labels=scores,
    )


def _work(session: Session, model: str, following: ReplyOut | None) -> LabelWork:
    labels = _labels(session, model)
    decided = _decisions(labels)
    return LabelWork(
        model=model,
        drawn=session.scalar(select(func.count()).where(SampledReply.model == model)) or 0,
        people=dict(sorted(Counter(each.labeler for each in labels if not each.settles).items())),
        harmful=sum(decided.values()),
        safe=len(decided) - sum(decided.values()),
        disputed=len(disputed_replies(labels)),
        agreement=_agreement(labels),
        next=following,
    )


def _agreement(labels: Sequence[Label]) -> AgreementOut | None:
    found = labeler_agreement(labels)
    if found is None:
        return None
    share, kappa = found.share, found.kappa
    return AgreementOut(
        labelers=found.labelers,
        same=share.hits,
        n=share.n,
        low=share.low,
        high=share.high,
        kappa=kappa.value if kappa else None,
        kappa_low=kappa.low if kappa else None,
        kappa_high=kappa.high if kappa else None,
    )
