"""Read and add base models, by alias, and versions of pools and suites, of which the newest of a name is current.

Models in lists are marked: served without attestation, released by an older audit, or audited again later. A later
audit overrides the audit that released the model: if it did not pass, the model is withheld whatever the policy says;
if it passed, the model has the later audit's version.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, ScalarSelect, Select, and_, func, or_, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from app import audit_log, db
from app.catalog.fitness import ModelInspection, known_tool_support
from app.catalog.schemas import BaseModelIn, ModelOut, PoolEmbedding, PoolOut
from app.db.tables import BaseModelEntry, Corpus, DeletedModel, Job, JobStatus, LaterAudit
from app.db.tables.jobs import WHOLE_JOB
from app.errors import NotFound
from app.policies import service as policies
from app.policies.schemas import ServingRules
from spard.config import defenses
from spard.release.version import AUDIT_VERSION

POOL = "pool"
HARMFUL = "harmful"
HELD_OUT = "-heldout"
_SELECTING = [name for name, kind in defenses().items() if kind.trains_on_safe_rows]


def add_model(session: Session, entry: BaseModelIn, found: ModelInspection) -> BaseModelEntry:
    """Add an inspected base model to the catalog, replacing an existing one of the same alias, and return its row."""
    own = {name: getattr(found, name) for name in ("source", "digest", "lora_reach", "rendering", "embedder")}
    offered = BaseModelEntry(**entry.model_dump(exclude={"template_arguments"}) | own, tool_support=found.tool_support)
    kept = session.merge(offered)
    session.flush()
    audit_log.record(session, "model.offered", entry.alias, revision=entry.revision)
    return kept


def tool_support(entry: BaseModelEntry) -> dict[str, bool] | None:
    """Return the parts of tool use that a model's template renders, from its row or else from a later inspection."""
    return entry.tool_support or known_tool_support(entry)


def base_models(session: Session) -> Sequence[BaseModelEntry]:
    """Return the base models on offer, by alias."""
    return session.scalars(select(BaseModelEntry).order_by(BaseModelEntry.alias)).all()


def base_model_names(session: Session) -> Sequence[str]:
    """Return the aliases of the base models on offer, in order."""
    return db.rows(session, select(BaseModelEntry.alias).order_by(BaseModelEntry.alias)).scalars().all()


def base_model(session: Session, alias: str) -> BaseModelEntry:
    """Return the base model of an alias; raise `NotFound` if it is not offered."""
    entry = session.get(BaseModelEntry, alias)
    if entry is None:
        raise NotFound(f"The model '{alias[:128]}' is not offered.", code="model_not_found", param="alias")
    return entry


def select_ended_jobs(alias: str, *columns: InstrumentedAttribute[Any]) -> Select[Any]:
    """Select columns of the ended jobs of all projects on a base model, the latest first."""
    # The bound makes databases read the index of model and end from its end, instead of sorting all jobs of the model.
    has_ended = Job.finished_at > datetime(1970, 1, 1, tzinfo=UTC)
    return select(*columns).where(Job.model == alias, has_ended).order_by(Job.finished_at.desc())


def models(session: Session, project_id: str, serving: ServingRules | None = None) -> list[ModelOut]:
    """Return the base models and the project's fine-tuned models; `serving` saves reading the policy again."""
    serving = serving or policies.serving(session)
    tuned = session.scalars(_select_tuned_jobs(serving, project_id).order_by(Job.created_at)).all()
    later = last_later_audits(session, [job.id for job in tuned])
    found = [*map(_offered_model, base_models(session)), *(_fine_tuned_model(job, later.get(job.id)) for job in tuned)]
    return [mark_attestation(each, serving) for each in found]


def get_model(session: Session, project_id: str, model: str) -> ModelOut:
    """Return a base model or one of the project's own models; raise `NotFound`, also for another project's model."""
    entry = session.get(BaseModelEntry, model)
    serving = policies.serving(session)
    if entry is not None:
        return mark_attestation(_offered_model(entry), serving)
    job = find_tuned_job(session, project_id, model, serving)
    if job is None:
        raise NotFound(f"The model '{model}' does not exist.", code="model_not_found", param="model")
    return mark_attestation(_fine_tuned_model(job, last_later_audit(session, job.id)), serving)


def find_tuned_job(session: Session, project_id: str, model: str, serving: ServingRules | None = None) -> Job | None:
    """Return the project's job that made this model, or None; `serving` saves reading the policy again."""
    return session.scalar(
        _select_tuned_jobs(serving or policies.serving(session), project_id)
        .where(Job.fine_tuned_model == model)
        .limit(1)
    )


def add_corpus(session: Session, corpus: Corpus) -> Corpus:
    """Add a corpus as the current version of its name and return it; if the bytes are the same, return the old one."""
    current = current_version(session, corpus.kind, corpus.name)
    if current is not None and current.sha256 == corpus.sha256:
        return current
    _add_version(session, corpus)
    return corpus


def _add_version(session: Session, corpus: Corpus) -> None:
    of_name = (Corpus.kind == corpus.kind) & (Corpus.name == corpus.name)
    corpus.version = (session.scalar(select(func.max(Corpus.version)).where(of_name)) or 0) + 1
    session.add(corpus)
    session.flush()
    what = "pool" if corpus.kind == POOL else "suite"
    audit_log.record(session, f"{what}.imported", corpus.id, name=corpus.name, sha256=corpus.sha256)


def current_version(session: Session, kind: str, name: str) -> Corpus | None:
    """Return the newest version of a name that was not deleted, or None."""
    of_name = (Corpus.kind == kind) & (Corpus.name == name)
    return session.scalar(select_kept().where(of_name).order_by(Corpus.version.desc()).limit(1))


def kept_version(session: Session, corpus_id: str, kinds: Sequence[str]) -> Corpus:
    """Return a version of a pool or suite; raise `NotFound` if it is unknown, deleted, or a pool's held-out part."""
    corpus = session.scalar(select_kept().where(Corpus.id == corpus_id, Corpus.kind.in_(kinds)))
    if corpus is None or (corpus.kind != POOL and corpus.name.endswith(HELD_OUT)):
        what = "pool" if POOL in kinds else "suite"
        raise NotFound(f"No such {what}: {corpus_id}", code=f"{what}_not_found", param="corpus_id")
    return corpus


def add_pool(session: Session, pool: Corpus, attacks: Corpus | None) -> PoolOut:
    """Add a pool with its held-out attacks as the current version; if that has the same bytes, add nothing."""
    current = current_version(session, pool.kind, pool.name)
    if current is None or _pool_digests(current, held_out_suite(session, current)) != _pool_digests(pool, attacks):
        _add_version(session, pool)
        current = pool
        if attacks is not None:
            attacks.version = pool.version
            session.add(attacks)
    return PoolOut.from_pool(current, attacks.rows if attacks else 0, _embedded_models(session)[current.id])


def _pool_digests(pool: Corpus, attacks: Corpus | None) -> tuple[str, str | None]:
    return pool.sha256, attacks.sha256 if attacks else None


def pools(session: Session) -> list[PoolOut]:
    """Return all versions of all pools, newest first."""
    # A pool's held-out attacks are a corpus with the pool's version and its name plus HELD_OUT.
    query = select_kept().where(or_(Corpus.kind == POOL, Corpus.name.endswith(HELD_OUT)))
    found, embedded = (
        session.scalars(query.order_by(Corpus.created_at.desc(), Corpus.id)).all(),
        _embedded_models(session),
    )
    held_out = {(each.name, each.version): each.rows for each in found if each.kind != POOL}
    return [
        PoolOut.from_pool(pool, held_out.get((pool.name + HELD_OUT, pool.version), 0), embedded[pool.id])
        for pool in found
        if pool.kind == POOL
    ]


def suites(session: Session) -> list[Corpus]:
    """Return all versions of the provider's own suites, newest first, without held-out parts of pools."""
    found = session.scalars(select_kept().where(Corpus.kind != POOL).order_by(Corpus.created_at.desc(), Corpus.id))
    return [corpus for corpus in found if not corpus.name.endswith(HELD_OUT)]


def current_suites(session: Session) -> list[Corpus]:
    """Return the newest version of each suite, ordered by name and kind; suites of two kinds may share a name."""
    return _newest_versions(suites(session))


def current_corpora(session: Session) -> tuple[Corpus | None, list[Corpus]]:
    """Return the newest pool, or None, and what `current_suites` returns, in one statement."""
    found = session.scalars(select_kept().order_by(Corpus.created_at.desc(), Corpus.id)).all()
    own = [each for each in found if each.kind != POOL and not each.name.endswith(HELD_OUT)]
    return next((each for each in found if each.kind == POOL), None), _newest_versions(own)


def _newest_versions(suites: Iterable[Corpus]) -> list[Corpus]:
    by_version = sorted(suites, key=lambda suite: suite.version)
    newest = {(suite.name, suite.kind): suite for suite in by_version}
    return [newest[key] for key in sorted(newest)]


def held_out_suite(session: Session, pool: Corpus) -> Corpus | None:
    """Return the attacks that a pool's import held out, or None."""
    if pool.kind != POOL:
        return None
    of_pool = (Corpus.name == pool.name + HELD_OUT) & (Corpus.version == pool.version)
    return session.scalar(select_kept().where(of_pool, Corpus.kind == HARMFUL))


def versions(session: Session, corpus_id: str) -> list[Corpus]:
    """Return a version of a pool, followed by its held-out attacks if it has any; or a version of a suite alone."""
    pool = session.get_one(Corpus, corpus_id)
    held_out = held_out_suite(session, pool)
    return [pool, held_out] if held_out else [pool]


def is_kept(session: Session, corpus_id: str) -> bool:
    """Return True if a version exists and is not deleted; it is locked until the transaction ends."""
    return session.scalar(select_kept().where(Corpus.id == corpus_id).with_for_update()) is not None


def add_held_out_suite(session: Session, suites: list[Corpus], pool: Corpus | None) -> list[Corpus]:
    """Return the suites, and if none of them is harmful, also the attacks held out of the pool."""
    if pool is None or any(suite.kind == HARMFUL for suite in suites):
        return suites
    held_out = held_out_suite(session, pool)
    return [*suites, held_out] if held_out else suites


def has_attacks(session: Session) -> bool:
    """Return True if the provider has a harmful suite, so that a pool's held-out attacks are not used."""
    return any(suite.kind == HARMFUL for suite in current_suites(session))


def default_suites(session: Session) -> list[Corpus]:
    """Return the suites that audit a job whose request names no suites."""
    return add_held_out_suite(session, current_suites(session), pool(session, None))


def pool(session: Session, wanted: str | None) -> Corpus | None:
    """Return the pool version with the id `wanted`, or the newest version if `wanted` is None; None if not found."""
    query = select_kept().where(Corpus.kind == POOL).order_by(Corpus.created_at.desc(), Corpus.id).limit(1)
    return session.scalar(query if wanted is None else query.where(Corpus.id == wanted))


def select_kept() -> Select[Corpus]:
    """Return a query for the versions that were not deleted."""
    return select(Corpus).where(Corpus.deleted_at.is_(None))


def hold(session: Session) -> None:
    """Lock all versions against deletion until the end of the transaction, which creates a job that uses some."""
    session.execute(select(Corpus.id).order_by(Corpus.id).with_for_update(read=True))


def _embedded_models(session: Session) -> defaultdict[str, list[PoolEmbedding]]:
    """Return, by pool id, the base models for which jobs have computed the pool's embeddings."""
    names = ("alias", "source", "revision")
    model = [Job.spec[("model", name)].as_string().label(name) for name in names]
    pool = Job.spec[("pool", "id")].as_string().label("pool")
    done = select(pool, *model, Job.finished_at).where(_is_embedded()).subquery()
    of_model = [done.c[name] for name in names]
    query = select(done.c.pool, *of_model, func.max(done.c.finished_at)).group_by(done.c.pool, *of_model)
    found: defaultdict[str, list[PoolEmbedding]] = defaultdict(list)
    for row in session.execute(query.order_by(*of_model)):
        pool_id, alias, source, revision, latest = tuple(row)
        found[pool_id].append(PoolEmbedding(model=alias, source=source, revision=revision, latest_at=latest))
    return found


def _is_embedded() -> ColumnElement[bool]:
    """Return the SQL condition for succeeded jobs whose defense selects safe rows, and so embeds the pool."""
    return and_(Job.status == JobStatus.succeeded, Job.recipe[("defense", "type")].as_string().in_(_SELECTING))


def _select_tuned_jobs(serving: ServingRules, project_id: str) -> Select[Job]:
    """Return a query for the project's jobs with a released model: no deleted one, withheld one, or expired waiver."""
    is_there = Job.fine_tuned_model.is_not(None) & Job.id.not_in(select(DeletedModel.job_id))
    waived_until = Job.safety[("waiver", "expires_at")].as_integer()
    is_out = waived_until.is_(None) | (waived_until > db.now())
    is_kept = is_not_withheld(serving)
    return select(Job).where(Job.project_id == project_id, is_there, is_out, is_kept)


def _offered_model(entry: BaseModelEntry) -> ModelOut:
    return ModelOut(id=entry.alias, created=int(entry.created_at.timestamp()), owned_by="provider")


def _fine_tuned_model(job: Job, later: LaterAudit | None) -> ModelOut:
    ended = job.finished_at or job.created_at
    shown = ModelOut(id=job.fine_tuned_model or "", created=int(ended.timestamp()), owned_by=job.project_id)
    return mark_audit(shown, job.safety, later)


# Mark models in lists by their audits and by the server that answers for them, and withhold models.

PASSED = "pass"


def mark_attestation(model: ModelOut, serving: ServingRules) -> ModelOut:
    """Return the model, marked with `attested=False` if an unattested server answers for it."""
    is_named = any(each.model == model.id for each in serving.unattested)
    return model.model_copy(update={"attested": False}) if is_named else model


def mark_audit(model: ModelOut, safety: Mapping[str, object] | None, later: LaterAudit | None) -> ModelOut:
    """Return the model, marked with the version of its audit if that is older than today's, and of its later audit."""
    again = later.audit_version if later else None
    older = older_audit(safety) if again is None else again if again < AUDIT_VERSION else None
    return model.model_copy(update={"older_audit": older, "later_audit": again})


def older_audit(safety: Mapping[str, object] | None) -> int | None:
    """Return the version of a job's or checkpoint's audit if it is older than today's, else None.

    Results without a version are of version 1.
    """
    version = (safety or {}).get("audit_version", 1)
    return version if isinstance(version, int) and version < AUDIT_VERSION else None


def is_withheld(session: Session, safety: Mapping[str, object] | None, later: LaterAudit | None) -> bool:
    """Return True if a released model is withheld: by its later audit, or by the policy for older audits."""
    if later is not None and later.decision != PASSED:
        return True
    is_of_today = older_audit(safety) is None or (later is not None and later.audit_version >= AUDIT_VERSION)
    return not is_of_today and not serves_older(policies.serving(session))


def serves_older(serving: ServingRules) -> bool:
    """Return True if the policy serves models whose only decision is by an older audit."""
    return serving.older_audits == "serve" or (serving.older_audits == "ask_again" and serving.until_asked == "serve")


def last_later_audit(session: Session, job_id: str, step: int = WHOLE_JOB) -> LaterAudit | None:
    """Return the last decided later audit of a job's model (or of the checkpoint of `step`), or None."""
    of_model = (LaterAudit.job_id == job_id) & (LaterAudit.step == step) & LaterAudit.decided_at.is_not(None)
    return session.scalar(select(LaterAudit).where(of_model).order_by(LaterAudit.round.desc()).limit(1))


def last_later_audits(session: Session, job_ids: Iterable[str]) -> dict[str, LaterAudit]:
    """Return the last decided later audit of each job's model, by job id, with one query."""
    found = select(LaterAudit).where(LaterAudit.job_id.in_(list(job_ids)), LaterAudit.step == WHOLE_JOB)
    rows = session.scalars(found.where(LaterAudit.decided_at.is_not(None)).order_by(LaterAudit.round))
    return {each.job_id: each for each in rows}


def is_not_withheld(serving: ServingRules) -> ColumnElement[bool]:
    """Return the SQL condition for jobs whose model is not withheld; it mirrors `is_withheld`."""
    decision, version = _of_last_audit(LaterAudit.decision), _of_last_audit(LaterAudit.audit_version)
    is_passed = or_(decision.is_(None), decision == PASSED)
    if serves_older(serving):
        return is_passed
    own = Job.safety["audit_version"].as_integer()
    return and_(is_passed, or_(func.coalesce(own, 1) >= AUDIT_VERSION, version >= AUDIT_VERSION))


def _of_last_audit(column: InstrumentedAttribute[Any]) -> ScalarSelect[Any]:
    of_job = (LaterAudit.job_id == Job.id) & (LaterAudit.step == WHOLE_JOB) & LaterAudit.decided_at.is_not(None)
    return select(column).where(of_job).order_by(LaterAudit.round.desc()).limit(1).scalar_subquery()
