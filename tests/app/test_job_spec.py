"""What jobs of every version keep of their inputs reads alike: on SQLite and on PostgreSQL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import JSON, Engine, column, select, table, update

from app.db import read, transaction
from app.db.tables import Job
from app.db.tables.job_spec import VERSION, CorpusRef, JobSpec, ModelRef, ObjectRef, PolicyRef, StartFrom
from spard.config import GateThresholds, JudgeSpec, RowSignal
from tests.app.conftest import AddJob
from tests.app.parts import SPEC

_JOBS = table("jobs", column("id"), column("spec", JSON))
_DIGEST = "0" * 64
_SUITE = {"id": "corpus-2", "kind": "harmful", "name": "own", "version": 3, "sha256": _DIGEST}
_SUITE |= {"storage_key": "corpora/2", "rows": 40}

# As commit 14c5fa6 writes it, with every optional part.
FULL: dict[str, Any] = {
    "model": {"alias": "tiny", "source": "/models/tiny", "revision": None, "learning_rate": 0.002},
    "start_from": {
        "id": "ftjob-1",
        "model": "ft:tiny:org::1",
        "lineage": ["ftjob-0", "ftjob-1"],
        "storage_key": "jobs/adapter",
        "sha256": _DIGEST,
    },
    "training_file": {"id": "file-1", "sha256": _DIGEST, "storage_key": "files/1", "rows": 12, "bytes": 345},
    "validation_file": {"id": "file-2", "sha256": _DIGEST, "storage_key": "files/2", "rows": 3, "bytes": 45},
    "pool": _SUITE | {"id": "corpus-1", "kind": "pool"},
    "suites": [_SUITE],
    "policy": {
        "max_asr": 0.2,
        "max_asr_rise": 0.1,
        "max_over_refusal_rise": 0.05,
        "max_utility_drop": None,
        "max_unscored": 0.01,
        "version": 4,
        "waivers": True,
    },
    "judge": "llm",
    "waived": False,
    "request_id": "req-1",
    "traceparent": "00-1-2-01",
}
# As the first version wrote it: no lineage, no policy's version, no bytes.
OLDEST: dict[str, Any] = {
    "model": {"alias": "tiny", "source": "/models/tiny", "revision": None, "learning_rate": None},
    "training_file": {"id": "file-1", "sha256": _DIGEST, "storage_key": "files/1", "rows": 12},
    "validation_file": None,
    "pool": None,
    "suites": [],
    "policy": {"max_asr": 0.1, "max_asr_rise": 0.1, "max_over_refusal_rise": 0.05, "max_unscored": 0.01},
    "judge": "refusal",
    "waived": True,
}


def read_stored_spec(engine: Engine, job_id: str, spec: dict[str, Any]) -> JobSpec:
    """What is read of a row that some version has written."""
    with transaction(engine) as session:
        session.execute(update(_JOBS).where(_JOBS.c.id == job_id).values(spec=spec))
    with read(engine) as session:
        return session.get_one(Job, job_id).spec


def test_a_spec_of_14c5fa6_reads_as_it_was_written(engine: Engine, add_job: AddJob) -> None:
    suite = CorpusRef(
        id="corpus-2", kind="harmful", name="own", version=3, sha256=_DIGEST, storage_key="corpora/2", rows=40
    )
    assert read_stored_spec(engine, add_job(), FULL) == JobSpec(
        model=ModelRef(alias="tiny", source="/models/tiny", learning_rate=0.002),
        start_from=StartFrom(
            id="ftjob-1",
            model="ft:tiny:org::1",
            lineage=("ftjob-0", "ftjob-1"),
            storage_key="jobs/adapter",
            sha256=_DIGEST,
        ),
        training_file=ObjectRef(id="file-1", sha256=_DIGEST, storage_key="files/1", rows=12, bytes=345),
        validation_file=ObjectRef(id="file-2", sha256=_DIGEST, storage_key="files/2", rows=3, bytes=45),
        pool=replace(suite, id="corpus-1", kind="pool"),
        suites=(suite,),
        policy=PolicyRef(max_asr=0.2, version=4, waivers=True),
        judge="llm",
        request_id="req-1",
        traceparent="00-1-2-01",
        version=1,
    )


def test_what_the_oldest_version_did_not_write_has_its_meaning_then(engine: Engine, add_job: AddJob) -> None:
    spec = read_stored_spec(engine, add_job(), OLDEST)
    assert (spec.waived, spec.policy.waivers, spec.start_from, spec.judge_spec, spec.version) == (
        True,
        False,
        None,
        None,
        1,
    )
    assert spec.policy.thresholds() == GateThresholds(
        allow_unmeasured_judge=True,
        confidence=0.5,
        max_dressed_refusal_rise=1.0,
        max_shown_asr_rise=1.0,
        max_dressed_asr=1.0,
    )


def test_the_judge_of_a_job_from_before_reads_flagged_rows_alone(engine: Engine, add_job: AddJob) -> None:
    earlier = {"action": "auto", "threshold": 0.1, "max_dropped": 0.25, "max_inverted": 0.1}

    assert read_stored_spec(engine, add_job(), FULL | {"row_signal": earlier}).row_signal == RowSignal("auto", read=0)
    assert read_stored_spec(engine, add_job(), FULL | {"row_signal": earlier | {"read": 9}}).row_signal.read == 9


def test_what_a_newer_version_adds_is_ignored_and_stays(engine: Engine, add_job: AddJob) -> None:
    job_id, added = add_job(), {"color": "blue"}
    newer = FULL | added | {"model": FULL["model"] | added, "policy": FULL["policy"] | added, "version": VERSION + 1}
    assert read_stored_spec(engine, job_id, newer).model.alias == "tiny"
    with transaction(engine) as session:
        session.get_one(Job, job_id).phase = "train"
    with read(engine) as session:
        assert session.scalar(select(_JOBS.c.spec).where(_JOBS.c.id == job_id)) == newer


def test_a_spec_is_read_as_it_was_made(engine: Engine, add_job: AddJob) -> None:
    judge = JudgeSpec(name="consensus", members=(JudgeSpec(), JudgeSpec(name="llm", base_url="https://judge/v1")))
    made = replace(SPEC, version=VERSION, judge="consensus", judge_spec=judge)
    job_id = add_job(spec=made)
    with read(engine) as session:
        assert session.get_one(Job, job_id).spec == made


def test_a_job_is_read_whose_judge_is_no_longer_installed(engine: Engine, add_job: AddJob) -> None:
    judge = {"name": "of_a_package", "model": "guard-1"}
    spec = read_stored_spec(
        engine, add_job(), FULL | {"judge": "of_a_package", "judge_spec": judge, "version": VERSION}
    )
    assert (spec.judge, spec.judge_spec) == ("of_a_package", None)


@pytest.mark.parametrize("name", sorted(FULL))
def test_earlier_versions_find_what_they_look_for(engine: Engine, add_job: AddJob, name: str) -> None:
    """Workers of 14c5fa6 may still run when the API writes specs of this version."""
    job_id = add_job()
    spec = read_stored_spec(engine, job_id, FULL)
    with transaction(engine) as session:
        session.get_one(Job, job_id).spec = replace(spec, version=VERSION)
    with read(engine) as session:
        written = session.scalar(select(_JOBS.c.spec).where(_JOBS.c.id == job_id))
    assert written is not None
    found, looked_for = written[name], FULL[name]
    if isinstance(looked_for, dict):  # a key that is new is not looked for
        found = {key: value for key, value in found.items() if key in looked_for}
    assert found == looked_for
