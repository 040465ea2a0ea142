"""Rows and a cluster that disagree: no job is held by two, none is lost, and what is not needed goes."""

from __future__ import annotations

import os
import time
from random import Random

import pytest
from sqlalchemy import Engine, update

from app.db import now, read, transaction
from app.db.tables import Job, JobStatus
from app.jobs import lease, scheduling, transitions
from app.jobs.lease import Claim, reap_once
from app.launchers import kubernetes, reconcile
from app.launchers.kubernetes import KubernetesLauncher
from app.launchers.reconcile import Bounds
from tests.app.conftest import AddJob
from tests.app.launchers.cluster import Cluster
from tests.app.parts import PUBLICATION, expire, read_job

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
GIB = 1 << 30


def look(engine: Engine, cluster: Cluster, queue: str | None = None, /, **bounds: int) -> None:
    launcher = KubernetesLauncher(cluster.http(), "spard", queue, bounds.get("nodes", 1))
    reconcile.look(engine, launcher, Bounds(**bounds))


def claim_attempt(engine: Engine, job_id: str, token: int) -> Claim | None:
    with transaction(engine) as session:
        return lease.claim(session, f"pod-{token}", 60, only=scheduling.of_attempt(job_id, token))


def set_job(engine: Engine, job_id: str, **columns: object) -> None:
    with transaction(engine) as session:
        session.execute(update(Job).where(Job.id == job_id).values(**columns))


def cancel(engine: Engine, job_id: str) -> set[str]:
    """The job, if it waited and is cancelled now."""
    with transaction(engine) as session:
        is_cancelled = transitions.change_status(session, Job.id == job_id, JobStatus.queued, JobStatus.cancelled)
    return {job_id} if is_cancelled else set()


def test_a_queued_row_gets_one_job_however_often_one_looks(engine: Engine, add_job: AddJob) -> None:
    job_id, cluster = add_job(), Cluster()
    for _ in range(3):
        look(engine, cluster)
    assert cluster.made == [f"{job_id}-0"]


def test_a_row_that_is_held_keeps_its_job_and_gets_no_other(engine: Engine, add_job: AddJob) -> None:
    job_id, cluster = add_job(), Cluster()
    look(engine, cluster)
    assert claim_attempt(engine, job_id, 0)
    look(engine, cluster)
    assert list(cluster.jobs) == cluster.made == [f"{job_id}-0"]


def test_after_a_lost_lease_the_next_attempt_has_a_job_of_its_own_and_the_older_one_goes(
    engine: Engine, add_job: AddJob
) -> None:
    job_id, cluster = add_job(), Cluster()
    look(engine, cluster)
    assert claim_attempt(engine, job_id, 0)
    expire(engine, job_id)
    reap_once(engine)
    look(engine, cluster)
    assert list(cluster.jobs) == [f"{job_id}-1"]
    assert claim_attempt(engine, job_id, 0) is None
    assert claim_attempt(engine, job_id, 1)


@pytest.mark.parametrize("status", [JobStatus.cancelled, JobStatus.succeeded, JobStatus.failed, JobStatus.paused])
def test_a_row_that_wants_no_work_any_more_has_none(engine: Engine, add_job: AddJob, status: JobStatus) -> None:
    job_id, cluster = add_job(), Cluster()
    look(engine, cluster)
    set_job(engine, job_id, status=status)
    look(engine, cluster)
    assert cluster.jobs == {}


def test_the_work_of_a_row_that_is_erased_goes(engine: Engine, add_job: AddJob) -> None:
    job_id, cluster = add_job(), Cluster()
    look(engine, cluster)
    cluster.jobs[f"{job_id}-0"]["metadata"]["labels"][kubernetes.JOB] = "ftjob-erased"
    look(engine, cluster)
    assert {made["metadata"]["labels"][kubernetes.JOB] for made in cluster.jobs.values()} == {job_id}


def test_a_pod_that_ended_without_a_claim_is_started_again_after_a_while(engine: Engine, add_job: AddJob) -> None:
    job_id, cluster = add_job(), Cluster()
    look(engine, cluster)
    cluster.end(f"{job_id}-0", kind="Failed")
    look(engine, cluster)
    assert cluster.made == [f"{job_id}-0"]
    cluster.end(f"{job_id}-0", reconcile.AGAIN_S + 5, "Failed")
    for _ in range(2):
        look(engine, cluster)
    assert cluster.made == [f"{job_id}-0"] * 2


def test_a_row_that_waits_for_its_time_has_no_work(engine: Engine, add_job: AddJob) -> None:
    add_job(run_after=time.time() + 3600)
    cluster = Cluster()
    look(engine, cluster)
    assert cluster.made == []


def test_no_more_jobs_than_are_allowed(engine: Engine, add_job: AddJob) -> None:
    jobs, cluster = [add_job() for _ in range(4)], Cluster(page=1)
    for _ in range(2):
        look(engine, cluster, jobs=2)
    assert cluster.made == [f"{job_id}-0" for job_id in jobs[:2]]


def test_a_job_gets_as_many_gpus_as_hold_it_and_one_that_none_hold_says_so(engine: Engine, add_job: AddJob) -> None:
    large = add_job(memory_bytes=900 * GIB)
    sharded = add_job(memory_bytes=150 * GIB, shared_bytes=140 * GIB)
    cluster = Cluster()
    look(engine, cluster, jobs=1, gpu_bytes=80 * GIB)
    ((name, made),) = cluster.jobs.items()
    (container,) = made["spec"]["template"]["spec"]["containers"]
    assert name == f"{sharded}-0"
    assert container["resources"]["limits"] == {kubernetes.GPU: "2"}
    assert {"name": "SPARD_SHARDING", "value": "full"} in container["env"]
    assert read_job(engine, large).launch_reason == reconcile.TOO_LARGE


FAR = {"memory_bytes": 900 * GIB, "shared_bytes": 880 * GIB}  # on 16 GPUs 75 GiB each, on 8 GPUs 130
NODES = {"gpu_bytes": 80 * GIB, "nodes": 3}


def test_a_job_that_no_node_holds_gets_a_jobset_on_as_many_as_hold_it(engine: Engine, add_job: AddJob) -> None:
    far, larger = add_job(**FAR), add_job(memory_bytes=2000 * GIB, shared_bytes=1990 * GIB)
    cluster = Cluster()
    for _ in range(2):
        look(engine, cluster, **NODES)
    assert (list(cluster.jobs), list(cluster.sets), cluster.apart()) == ([], [f"{far}-0"], set())
    parts = cluster.sets[f"{far}-0"]["spec"]["replicatedJobs"]
    assert [each["template"]["spec"]["parallelism"] for each in parts] == [1, 1]
    assert read_job(engine, larger).launch_reason == reconcile.TOO_LARGE


def test_on_one_node_such_a_job_is_too_large(engine: Engine, add_job: AddJob) -> None:
    job_id, cluster = add_job(**FAR), Cluster()
    look(engine, cluster, gpu_bytes=80 * GIB)
    assert (cluster.made, read_job(engine, job_id).launch_reason) == ([], reconcile.TOO_LARGE)


@pytest.mark.parametrize(("gpus", "limit", "nodes"), [(4, "4", 4), (6, "6", 3), (16, "16", 1), (1, None, None)])
def test_a_job_gets_no_more_gpus_than_a_node_has(
    engine: Engine, add_job: AddJob, gpus: int, limit: str | None, nodes: int | None
) -> None:
    job_id, cluster = add_job(**FAR), Cluster()
    look(engine, cluster, **(NODES | {"gpus": gpus, "nodes": 4}))
    if limit is None:
        assert (cluster.made, read_job(engine, job_id).launch_reason) == ([], reconcile.TOO_LARGE)
        return
    pods = [*cluster.jobs.values(), *cluster.sets.values()]
    assert f"'{kubernetes.GPU}': '{limit}'" in str(pods)
    parts = cluster.sets[f"{job_id}-0"]["spec"]["replicatedJobs"] if nodes != 1 else []
    assert sum(each["template"]["spec"]["parallelism"] for each in parts) == (nodes if nodes != 1 else 0)


@pytest.mark.parametrize("is_claimed", [False, True])
def test_pods_that_were_left_apart_are_connected_at_the_next_look(
    engine: Engine, add_job: AddJob, is_claimed: bool
) -> None:
    job_id, cluster = add_job(**FAR), Cluster()
    look(engine, cluster, **NODES)
    cluster.policies.clear()  # as if the launcher had ended between the two
    assert cluster.apart() == {f"{job_id}-0"}
    if is_claimed:
        assert claim_attempt(engine, job_id, 0)
    look(engine, cluster, **NODES)
    assert (cluster.apart(), cluster.made) == (set(), [f"{job_id}-0"])


def test_a_jobset_that_is_not_needed_goes_with_its_policy(engine: Engine, add_job: AddJob) -> None:
    job_id, cluster = add_job(**FAR), Cluster()
    look(engine, cluster, **NODES)
    set_job(engine, job_id, status=JobStatus.cancelled)
    look(engine, cluster, **NODES)
    assert (cluster.sets, cluster.policies) == ({}, {})


@pytest.mark.parametrize("kind", ["Complete", "Failed"])
def test_a_jobset_that_ended_without_a_claim_is_made_again_after_a_while(
    engine: Engine, add_job: AddJob, kind: str
) -> None:
    job_id, cluster = add_job(**FAR), Cluster()
    look(engine, cluster, **NODES)
    cluster.end(f"{job_id}-0", 1.0, kind)
    look(engine, cluster, **NODES)
    assert cluster.made == [f"{job_id}-0"]
    cluster.end(f"{job_id}-0", reconcile.AGAIN_S + 5, kind)
    for _ in range(2):
        look(engine, cluster, **NODES)
    assert (cluster.made, cluster.apart()) == ([f"{job_id}-0"] * 2, set())


def test_kueue_holds_a_jobset_back_as_a_whole(engine: Engine, add_job: AddJob) -> None:
    job_id, cluster = add_job(**FAR), Cluster()
    for _ in range(2):
        look(engine, cluster, "tenants", **NODES)
    (made,) = cluster.sets.values()
    assert (made["spec"]["suspend"], made["metadata"]["labels"][kubernetes.QUEUE]) == (True, "tenants")
    assert read_job(engine, job_id).launch_reason == kubernetes.SUSPENDED


def test_a_follower_that_finds_no_node_is_the_reason_of_the_queue(engine: Engine, add_job: AddJob) -> None:
    job_id, cluster = add_job(**FAR), Cluster()
    look(engine, cluster, **NODES)
    labels = {kubernetes.JOBSET_LABEL: f"{job_id}-0", "job-name": f"{job_id}-0-followers-0"}
    cluster.pods[f"{job_id}-0"] = {"metadata": {"labels": labels}, "status": PENDING}
    look(engine, cluster, **NODES)
    assert read_job(engine, job_id).launch_reason == kubernetes.NO_ROOM


PENDING = {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3"}]}
PULLING = {"containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff", "message": "registry/x"}}}]}


@pytest.mark.parametrize(
    ("status", "reason"), [(PENDING, kubernetes.NO_ROOM), (PULLING, kubernetes.NO_CONTAINER), ({}, None)]
)
def test_why_a_pod_does_not_start_is_the_reason_of_the_queue(
    engine: Engine, add_job: AddJob, status: dict[str, object], reason: str | None
) -> None:
    job_id, cluster = add_job(), Cluster()
    look(engine, cluster)
    cluster.pods[f"{job_id}-0"] = {"metadata": {"labels": {"job-name": f"{job_id}-0"}}, "status": status}
    look(engine, cluster)
    with read(engine) as session:
        assert scheduling.places(session, [session.get_one(Job, job_id)])[job_id].reason == reason
    assert claim_attempt(engine, job_id, 0)
    assert read_job(engine, job_id).launch_reason is None


def test_kueue_holds_a_job_back_and_the_row_says_so(engine: Engine, add_job: AddJob) -> None:
    job_id, cluster = add_job(), Cluster()
    for _ in range(2):
        look(engine, cluster, "tenants")
    (made,) = cluster.jobs.values()
    assert (made["spec"]["suspend"], made["metadata"]["labels"][kubernetes.QUEUE]) == (True, "tenants")
    assert read_job(engine, job_id).launch_reason == kubernetes.SUSPENDED


@pytest.mark.parametrize("status", [403, 410, 429, 500, 503])
def test_a_cluster_that_does_not_answer_as_it_should_changes_nothing(
    engine: Engine, add_job: AddJob, status: int
) -> None:
    job_id, cluster = add_job(), Cluster(answer=status)
    look(engine, cluster)
    assert (cluster.made, read_job(engine, job_id).status) == ([], JobStatus.queued)
    cluster.answer = None
    look(engine, cluster)
    assert cluster.made == [f"{job_id}-0"]


SEEDS = range(200) if os.environ.get("SPARD_SOAK") == "1" else range(3)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("far", [0, 3])
def test_whatever_goes_wrong_each_job_is_published_once_and_none_is_lost(
    engine: Engine, add_job: AddJob, seed: int, far: int
) -> None:
    """Pods claim, die, hang and come back; leases run out; two launchers look at a cluster that loses answers.

    No two of them hold a job at a time: at each claim all that ever claimed it try to write, and the newest alone can.

    `far` of the jobs need several nodes.
    """
    random, bounds = Random(seed), NODES if far else {}
    jobs = [add_job(max_attempts=10_000, **(FAR if i < far else {})) for i in range(5)]
    cancelled: set[str] = set()
    cluster, fleet = Cluster(random, faults=0.3), Fleet(engine, random)
    for _ in range(60):
        look(engine, cluster, jobs=random.choice([2, 100]), **bounds)
        fleet.step(cluster)
        if random.random() < 0.3:
            reap_once(engine)
        if random.random() < 0.02:
            cancelled |= cancel(engine, random.choice(jobs))
    cluster.faults = 0.0
    for _ in range(100):
        look(engine, cluster, **bounds)
        assert cluster.apart() <= {each["metadata"]["name"] for each in cluster.all() if each.get("status")}
        fleet.finish(cluster)
        reap_once(engine)
    assert sorted(fleet.published) == sorted(set(jobs) - cancelled)
    assert {job_id for job_id in jobs if read_job(engine, job_id).status == JobStatus.succeeded} == set(
        jobs
    ) - cancelled
    assert cluster.live() == []
    assert {name for name in cluster.made if name.rpartition("-")[0] in jobs[:far]}.isdisjoint(cluster.jobs)


class Fleet:
    """Pods of a cluster as workers: each has a claim or none."""

    def __init__(self, engine: Engine, random: Random) -> None:
        self.engine, self.random = engine, random
        self.claims: dict[str, Claim] = {}  # by the uid of the Job, also of pods that the cluster has given up
        self.published: list[str] = []

    def step(self, cluster: Cluster) -> None:
        """Each pod does something: claims, publishes, dies, or is silent for longer than its lease."""
        for job in self.random.sample(cluster.live(), len(cluster.live())):
            name, uid = job["metadata"]["name"], job["metadata"]["uid"]
            match self.random.choice(["claim", "publish", "die", "silent", "wait"]):
                case "claim" if uid not in self.claims:
                    self._claim(cluster, job)
                case "publish" if uid in self.claims:
                    self._publish(uid)
                    cluster.end(name)
                case "die":
                    cluster.end(name, self.random.choice([0.0, 100.0]), "Failed")  # its process may go on elsewhere
                case "silent" if uid in self.claims:
                    self._silent(self.claims[uid].job_id)
        for uid in self.random.sample(sorted(self.claims), min(1, len(self.claims))):
            self._publish(uid)  # a process that the cluster believes dead

    def finish(self, cluster: Cluster) -> None:
        """All goes well from here on; what nobody holds any more runs out."""
        for job in cluster.live():
            uid = job["metadata"]["uid"]
            if uid in self.claims or self._claim(cluster, job):
                self._publish(uid)
                cluster.end(job["metadata"]["name"])
        for job in cluster.all():
            if job.get("status"):
                cluster.end(job["metadata"]["name"], 100.0)
                self._silent(job["metadata"]["labels"][kubernetes.JOB])
        held = {claim.job_id for claim in self.claims.values()}
        for job_id in sorted(held):
            self._silent(job_id)

    def _claim(self, cluster: Cluster, job: dict[str, dict[str, dict[str, str]]]) -> bool:
        labels = job["metadata"]["labels"]
        got = claim_attempt(self.engine, labels[kubernetes.JOB], int(labels[kubernetes.TOKEN]))
        if got is None:
            cluster.end(str(job["metadata"]["name"]))
            return False
        self.claims[str(job["metadata"]["uid"])] = got
        assert self.holders(got.job_id) == [got], "two pods write as holders of one job"
        return True

    def holders(self, job_id: str) -> list[Claim]:
        """The claims of a job whose writes get through, of pods that live or are believed dead."""
        claims = [claim for claim in self.claims.values() if claim.job_id == job_id]
        with transaction(self.engine) as session:
            return [claim for claim in claims if lease.update(session, claim, phase="train")]

    def _publish(self, uid: str) -> None:
        with transaction(self.engine) as session:
            if lease.publish(session, self.claims[uid], PUBLICATION):
                self.published.append(self.claims[uid].job_id)

    def _silent(self, job_id: str) -> None:
        with transaction(self.engine) as session:
            is_held = (Job.id == job_id) & (Job.status == JobStatus.running)
            session.execute(update(Job).where(is_held).values(lease_expires_at=now() - 1))
