"""Build the batch/v1 Job or JobSet of an attempt from the provider's pod template, and read its state from a Job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from datetime import datetime
from typing import Any

from app.launchers.base import Work

ClusterObject = dict[str, Any]
"""A Kubernetes object such as a Job or a pod, as JSON of the Kubernetes API."""

MANAGED = {"app.kubernetes.io/managed-by": "spard-launcher"}
JOB, TOKEN, QUEUE = "spard/job", "spard/token", "kueue.x-k8s.io/queue-name"
KEPT_S = 3600  # how long an ended Job and its logs are kept
GPU = "nvidia.com/gpu"

SUSPENDED = "It waits for its turn in the cluster's queue."
NO_ROOM = "No node of the cluster has room for it."
NO_CONTAINER = "The cluster cannot start its container."
_STUCK = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError", "CreateContainerError")


def attempt_name(work: Work) -> str:
    """Return the name of an attempt's Job; it is unique, so a Job that is requested twice is created once."""
    return f"{work.job_id}-{work.token}".lower()


def job(template: ClusterObject, work: Work, queue: str | None = None) -> ClusterObject:
    """Return the Job of an attempt; with `queue` it is created suspended, and Kueue starts it.

    It never restarts its pod (`backoffLimit` 0): the job's row decides if there is another attempt.
    """
    own = pod(template, work, worker_command(work))
    spec = {"backoffLimit": 0, "ttlSecondsAfterFinished": KEPT_S, "template": own}
    return workload("batch/v1", "Job", work, spec, queue)


def workload(version: str, kind: str, work: Work, spec: ClusterObject, queue: str | None) -> ClusterObject:
    """Return the Job or JobSet of an attempt; with `queue` it is suspended until Kueue starts it."""
    queued = {} if queue is None else {QUEUE: queue}
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": attempt_name(work), "labels": attempt_labels(work) | queued},
        "spec": spec if queue is None else spec | {"suspend": True},
    }


def pod(template: ClusterObject, work: Work, command: Sequence[str]) -> ClusterObject:
    """Return an attempt's pod: the provider's template with our labels, command and number of GPUs."""
    made = deepcopy(dict(template))
    labels = {**made.get("metadata", {}).get("labels", {}), **attempt_labels(work)}
    made["metadata"] = {**made.get("metadata", {}), "labels": labels}
    made["spec"]["restartPolicy"] = "Never"
    container = made["spec"]["containers"][0]
    container["command"] = list(command)
    if work.gpus is not None:
        _give(container, work.gpus, work.nodes)
    return made


def worker_command(work: Work) -> list[str]:
    """Return the command line of an attempt's worker."""
    return ["python", "-P", "-m", "worker", "--job", work.job_id, "--token", str(work.token)]


def attempt_labels(work: Work) -> dict[str, str]:
    """Return the labels of all objects of an attempt, by which they are found."""
    return MANAGED | {JOB: work.job_id, TOKEN: str(work.token)}


def read_work(found: ClusterObject) -> Work | None:
    """Return the attempt of a Job or JobSet, from its labels; None if it has not ours."""
    labels = found["metadata"].get("labels", {})
    token = labels.get(TOKEN, "")
    if JOB not in labels or not token.isdecimal():
        return None
    pods = [each["template"]["spec"].get("parallelism", 1) for each in found["spec"].get("replicatedJobs", ())]
    return Work(labels[JOB], int(token), nodes=sum(pods) or 1)


def end_time(found: ClusterObject) -> datetime | None:
    """Return when a Job or JobSet completed or failed, by the cluster's clock; None if it has not."""
    for condition in found.get("status", {}).get("conditions", ()):
        if condition["type"] in ("Complete", "Completed", "Failed") and condition["status"] == "True":
            return datetime.fromisoformat(condition["lastTransitionTime"])
    return None


def why_not(found: ClusterObject, pods: Iterable[ClusterObject]) -> str | None:
    """Return why a Job or JobSet does not run, in words for the job's owner that reveal nothing of the cluster."""
    if found["spec"].get("suspend"):
        return SUSPENDED
    for each_pod in pods:
        status = each_pod.get("status", {})
        waiting = [each.get("state", {}).get("waiting", {}) for each in status.get("containerStatuses", ())]
        if any(each.get("reason") in _STUCK for each in waiting):
            return NO_CONTAINER
        if any(
            each["type"] == "PodScheduled" and each["status"] == "False" and each.get("reason") == "Unschedulable"
            for each in status.get("conditions", ())
        ):
            return NO_ROOM
    return None


def _give(container: ClusterObject, gpus: int, nodes: int) -> None:
    container.setdefault("resources", {}).setdefault("limits", {})[GPU] = str(gpus)
    ours = {"SPARD_GPUS_PER_JOB": str(gpus), "SPARD_SHARDING": "full" if gpus * nodes > 1 else "none"}
    if nodes > 1:
        ours["SPARD_NODES_PER_JOB"] = str(nodes)
    # The template may set these variables, too; ours replace them instead of being second entries of the same name.
    kept = [each for each in container.get("env", []) if each["name"] not in ours]
    container["env"] = kept + [{"name": name, "value": value} for name, value in ours.items()]


# Build the JobSet of an attempt on several nodes: a leader, which is the worker, and a follower on each other node.
#
# They end together: no pod is ever restarted, and the JobSet has succeeded when its leader has. A NetworkPolicy that
# the JobSet owns lets its pods reach each other, but not other jobs' pods.

JOBSET_VERSION = "jobset.x-k8s.io/v1alpha2"
JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"  # a label of all pods of a JobSet

_LEADER, _FOLLOWERS = "leader", "followers"


def jobset(leader: ClusterObject, follower: ClusterObject, work: Work, queue: str | None = None) -> ClusterObject:
    """Return the JobSet of an attempt from two pod templates; with `queue` it is created suspended, for Kueue."""
    # The DNS name that JobSet gives the leader: SET-JOB-REPLICA-POD in the headless service SET.
    host = f"{attempt_name(work)}-{_LEADER}-0-0.{attempt_name(work)}"
    follow = ["python", "-P", "-m", "worker.follower", "--leader", host, "--job", work.job_id]
    spec = {
        "failurePolicy": {"maxRestarts": 0},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [_LEADER]},
        "ttlSecondsAfterFinished": KEPT_S,
        "replicatedJobs": [
            _replicated_job(_LEADER, pod(leader, work, worker_command(work)), 1),
            _replicated_job(_FOLLOWERS, pod(follower, work, [*follow, "--token", str(work.token)]), work.nodes - 1),
        ],
    }
    return workload(JOBSET_VERSION, "JobSet", work, spec, queue)


def network_policy(work: Work, uid: str) -> ClusterObject:
    """Return the NetworkPolicy that lets an attempt's pods reach each other; it is deleted with the JobSet `uid`."""
    name, labels = attempt_name(work), attempt_labels(work)
    each_other = [{"podSelector": {"matchLabels": labels}}]
    ports = [{"protocol": "TCP"}]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": name,
            "labels": labels,
            "ownerReferences": [{"apiVersion": JOBSET_VERSION, "kind": "JobSet", "name": name, "uid": uid}],
        },
        "spec": {
            "podSelector": {"matchLabels": labels},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": each_other, "ports": ports}],
            "egress": [{"to": each_other, "ports": ports}],
        },
    }


def owner_uid(found: ClusterObject) -> str | None:
    """Return the uid of the JobSet that owns a policy, or None."""
    return next((str(each["uid"]) for each in found["metadata"].get("ownerReferences", ())), None)


def _replicated_job(name: str, template: ClusterObject, pods: int) -> ClusterObject:
    spec = {
        "completionMode": "Indexed",
        "parallelism": pods,
        "completions": pods,
        "backoffLimit": 0,
        "template": template,
    }
    return {"name": name, "replicas": 1, "template": {"spec": spec}}
