"""The table of transitions is the truth: nothing else changes a status, and the diagram shows what it holds."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from app.db import read, transaction
from app.db.base import utc_now
from app.db.tables import TERMINAL, ApiKey, Job, JobStatus, Waiver
from app.jobs import transitions
from app.jobs.transitions import TRANSITIONS, IllegalTransition, change_status
from tests.app.conftest import AddJob

ROOT = Path(__file__).parents[2]
_ALLOWED = {(each.source, each.target) for each in TRANSITIONS}


def _assignments(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """What is given a value under a name: attributes, keyword arguments, keys of dicts, tuples of attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg:
            yield node.arg, node.value
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant):
                    yield str(key.value), value
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = (
                    zip(target.elts, node.value.elts, strict=False)
                    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                    else [(target, node.value)]
                )
                for each, value in pairs:
                    if isinstance(each, ast.Attribute) and "job" in ast.unparse(each.value).lower():
                        yield f"job.{each.attr}", value


def _changes_status(tree: ast.AST) -> bool:
    return any(
        name == "job.status" or (name == "status" and "JobStatus." in ast.unparse(value))
        for name, value in _assignments(tree)
    )


def _waive(engine: Engine, job_id: str) -> None:
    """Approve a waiver, without which the database refuses to change a job that has ended."""
    with transaction(engine) as session:
        key_id = session.scalars(select(ApiKey.id)).first()
        session.add(
            Waiver(job_id=job_id, reason="a test", proposed_by=key_id, approved_at=utc_now(), expires_at=utc_now())
        )


def test_the_check_below_sees_every_way_to_write_a_status() -> None:
    for code in (
        "job.status = found",
        "job.status, job.error = JobStatus.failed, None",
        "update(Job).values(status=JobStatus.failed)",
        "session.execute(statement, {'status': JobStatus.failed})",
    ):
        assert _changes_status(ast.parse(code)), code
    assert not _changes_status(ast.parse("found = Job.status == JobStatus.failed"))


def test_one_module_alone_changes_a_job_s_status() -> None:
    modules = [path for room in ("app", "worker") for path in (ROOT / room).rglob("*.py")]
    wrong = [str(path) for path in modules if _changes_status(ast.parse(path.read_text()))]
    assert wrong == []


def test_the_diagram_shows_the_table() -> None:
    shown = [line.strip() for line in (transitions.__doc__ or "").splitlines() if "-->" in line and "[*]" not in line]
    assert shown == [f"{each.source} --> {each.target}: {each.cause}" for each in TRANSITIONS]


def test_no_transition_stands_in_the_table_twice() -> None:
    assert len(_ALLOWED) == len(TRANSITIONS)


@pytest.mark.parametrize(("source", "target"), sorted(set(product(JobStatus, JobStatus)) - _ALLOWED))
def test_a_transition_that_is_not_in_the_table_raises(source: JobStatus, target: JobStatus) -> None:
    with pytest.raises(IllegalTransition, match=f"from {source} to {target}"):
        change_status(Session(), Job.id == "ftjob-1", source, target)


@pytest.mark.parametrize(("source", "target"), sorted(_ALLOWED))
def test_a_transition_is_made_from_its_source_alone(
    engine: Engine, add_job: AddJob, source: JobStatus, target: JobStatus
) -> None:
    there, elsewhere = add_job(status=source), add_job(status=JobStatus.validating_files)
    if source in TERMINAL:
        _waive(engine, there)
    with transaction(engine) as session:
        assert change_status(session, Job.id == elsewhere, source, target) is None
        assert change_status(session, Job.id == there, source, target) is not None
    with read(engine) as session:
        assert session.get_one(Job, there).status == target
        assert session.get_one(Job, elsewhere).status == JobStatus.validating_files
