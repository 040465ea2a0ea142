"""Build the batch/v1 Job of an attempt from the provider's pod template, and read an attempt's state from a Job."""

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
