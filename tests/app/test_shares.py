"""Projects take turns by what they had of the GPUs: by the database's rows, and simulated for three days."""

from __future__ import annotations

import heapq
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache

import pytest
from sqlalchemy import Engine, update

from app import keys
from app.db import now, read, transaction
from app.db.tables import Job, Project, Quota
from app.jobs import lease, scheduling
from app.jobs.scheduling import HALF_LIFE_S, ProjectShare
from tests.app.conftest import AddJob
from tests.app.parts import ERROR, claim_next

HOUR = 3600.0
GPUS, PROJECTS, END_S = 13, 38, 72 * HOUR  # as 104 GPUs and 300 projects, in an eighth
SHORT_S, LONG_S = HOUR / 6, 5 * HOUR


@cache
def simulate_shares(*, by_use: bool, projects: int = PROJECTS, weight: float = 1.0) -> tuple[float, float]:
    """GPU seconds of projects with short jobs and of those with long ones, all with more jobs than can be done.

    Half of the projects have jobs of ten minutes and half of five hours; `weight` is that of the first ones.
    """
    stand = [ProjectShare(f"{i:03}", weight=weight if i % 2 else 1.0) for i in range(projects)]
    seconds, total = [0.0] * projects, [0.0] * projects
    noted, running = [0.0] * projects, [list[float]() for _ in range(projects)]
    free = [(0.0, -1, 0.0)] * GPUS  # when a GPU is free, whose job was on it, and since when
    while free[0][0] < END_S:
        at, done, since = heapq.heappop(free)
        if done >= 0:
            running[done].remove(since)
            seconds[done] = scheduling.fade(seconds[done], at - noted[done]) + scheduling.running_seconds(at - since)
            noted[done], total[done] = at, total[done] + at - since
        standing = [replace(one, running=len(running[i])) for i, one in enumerate(stand)]
        if by_use:
            used = [scheduling.fade(seconds[i], at - noted[i]) for i in range(projects)]
            used = [
                old + sum(scheduling.running_seconds(at - start) for start in running[i]) for i, old in enumerate(used)
            ]
            standing = [replace(one, used=used[i]) for i, one in enumerate(standing)]
        chosen = int(scheduling.in_turn(standing)[0].project_id)
        stand[chosen] = replace(stand[chosen], served_at=datetime.fromtimestamp(at, UTC))
        running[chosen].append(at)
        heapq.heappush(free, (at + (SHORT_S if chosen % 2 else LONG_S), chosen, at))
    return sum(total[1::2]), sum(total[::2])


def test_more_projects_than_gpus_have_about_the_same_time_whatever_their_jobs() -> None:
    short, long = simulate_shares(by_use=False)
    assert long > 15 * short  # by the fewest running jobs alone
    short, long = simulate_shares(by_use=True)
    assert 1 / 2.5 < long / short < 2.5


def test_as_many_gpus_as_projects_need_no_count_of_time() -> None:
    short, long = simulate_shares(by_use=False, projects=6)
    assert 1 / 1.2 < long / short < 1.2


def test_twice_the_weight_has_about_twice_the_time() -> None:
    even, heavy = simulate_shares(by_use=True), simulate_shares(by_use=True, weight=2.0)
    gain = (heavy[0] / heavy[1]) / (even[0] / even[1])
    assert 1.3 < gain < 2.7


def test_time_counts_half_after_six_hours() -> None:
    assert scheduling.fade(100.0, HALF_LIFE_S) == pytest.approx(50.0)
    assert scheduling.fade(100.0, -5.0) == 100.0  # two clocks
    halves = scheduling.fade(scheduling.running_seconds(HOUR), HOUR) + scheduling.running_seconds(HOUR)
    assert scheduling.running_seconds(2 * HOUR) == pytest.approx(halves)  # an hour and the next one


def test_one_worker_s_projects_take_turns_by_their_time(engine: Engine, add_job: AddJob) -> None:
    other = project(engine, "org-other")
    jobs = [add_job() for _ in range(2)], [add_job(**other) for _ in range(2)]
    with transaction(engine) as session:
        claim = lease.claim(session, "worker", 6 * HOUR)
        assert claim
        session.execute(update(Job).where(Job.id == claim.job_id).values(seen_at=now() - HOUR))
        lease.fail(session, claim, ERROR)
    taken = [end_next(engine) for _ in range(3)]
    had_an_hour = next(ids for ids in jobs if claim.job_id in ids)
    assert taken[:2] == next(ids for ids in jobs if claim.job_id not in ids)
    assert taken[2] in had_an_hour


def test_a_heavy_project_is_first_though_it_had_more(engine: Engine, add_job: AddJob) -> None:
    other = project(engine, "org-other")
    light, heavy = add_job(), add_job(**other)
    with transaction(engine) as session:
        session.add(Quota(project_id="org-other", weight=4.0))
        session.execute(update(Project).values(used_seconds=100.0, used_at=now()))
        session.execute(update(Project).where(Project.id == "org-other").values(used_seconds=300.0))
    assert [end_next(engine), end_next(engine)] == [heavy, light]


def test_an_attempt_is_counted_once_to_its_project(engine: Engine, add_job: AddJob) -> None:
    job_id = add_job()
    for seconds in (HOUR, 2 * HOUR):
        claim = claim_next(engine)
        with transaction(engine) as session:
            later = now() + 9 * HOUR
            session.execute(update(Job).values(seen_at=now() - seconds, lease_expires_at=later, run_after=0.0))
            assert lease.heartbeat(session, claim, 60)
            lease.requeue(session, claim, 0, f"a crash after {seconds}")
    with read(engine) as session:
        job = session.get_one(Job, job_id)
        used = session.get_one(Project, job.project_id).used_seconds
    assert job.gpu_seconds == pytest.approx(3 * HOUR, rel=0.01)
    assert used == pytest.approx(scheduling.running_seconds(HOUR) + scheduling.running_seconds(2 * HOUR), rel=0.01)
    with read(engine) as session:
        assert [one.used for one in scheduling.standings(session)] == [pytest.approx(used, rel=0.01)]


def project(engine: Engine, project_id: str) -> dict[str, str]:
    """The columns of a job of another project."""
    with transaction(engine) as session:
        session.add(Project(id=project_id, name=project_id))
        session.flush()
        key, _ = keys.create(session, project_id, "test", ["customer"])
        return {"project_id": project_id, "key_id": key.id}


def end_next(engine: Engine) -> str:
    """Take the next job and end it at once."""
    claim = claim_next(engine)
    with transaction(engine) as session:
        assert lease.fail(session, claim, ERROR)
    return claim.job_id
