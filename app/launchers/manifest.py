"""The batch/v1 Job of one attempt, made of the provider's pod template; and what a Job and its pods say of it."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from datetime import datetime
from typing import Any

from app.launchers.base import Work

ClusterObject = dict[str, Any]
"""An object of Kubernetes, such as a Job or a pod, in the JSON of its API."""

MANAGED = {"app.kubernetes.io/managed-by": "spard-launcher"}
JOB, TOKEN, QUEUE = "spard/job", "spard/token", "kueue.x-k8s.io/queue-name"
KEPT_S = 3600  # that an ended Job and its logs are there
GPU = "nvidia.com/gpu"

SUSPENDED = "It waits for its turn in the cluster's queue."
NO_ROOM = "No node of the cluster has room for it."
NO_CONTAINER = "The cluster cannot start its container."
_STUCK = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError", "CreateContainerError")


def name_of(work: Work) -> str:
    """Return the one name that an attempt's Job has: asked for twice, it is made once."""
    return f"{work.job_id}-{work.token}".lower()


def job(template: ClusterObject, work: Work, queue: str | None = None) -> ClusterObject:
    """Return the Job of an attempt; with `queue` it is made suspended, and Kueue starts it.

    It makes one pod and never another: after the pod's end the job's row says whether there is another attempt.
    """
    pod = deepcopy(dict(template))
    labels = MANAGED | {JOB: work.job_id, TOKEN: str(work.token)}
    pod["metadata"] = {**pod.get("metadata", {}), "labels": {**pod.get("metadata", {}).get("labels", {}), **labels}}
    pod["spec"]["restartPolicy"] = "Never"
    container = pod["spec"]["containers"][0]
    container["command"] = ["python", "-P", "-m", "worker", "--job", work.job_id, "--token", str(work.token)]
    if work.gpus is not None:
        _give(container, work.gpus)
    spec = {"backoffLimit": 0, "ttlSecondsAfterFinished": KEPT_S, "template": pod}
    queued = {} if queue is None else {QUEUE: queue}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name_of(work), "labels": labels | queued},
        "spec": spec if queue is None else spec | {"suspend": True},
    }


def work_of(found: ClusterObject) -> Work | None:
    """Return the attempt that a Job was made for; None for one without our labels."""
    labels = found["metadata"].get("labels", {})
    token = labels.get(TOKEN, "")
    return Work(labels[JOB], int(token)) if JOB in labels and token.isdecimal() else None


def ended_at(found: ClusterObject) -> datetime | None:
    """Return when a Job has completed or failed, by the cluster's clock; None before."""
    for condition in found.get("status", {}).get("conditions", ()):
        if condition["type"] in ("Complete", "Failed") and condition["status"] == "True":
            return datetime.fromisoformat(condition["lastTransitionTime"])
    return None


def why_not(found: ClusterObject, pods: Iterable[ClusterObject]) -> str | None:
    """Return why a Job's container does not run, in words for its owner: they name nothing of the cluster."""
    if found["spec"].get("suspend"):
        return SUSPENDED
    for pod in pods:
        status = pod.get("status", {})
        waiting = [each.get("state", {}).get("waiting", {}) for each in status.get("containerStatuses", ())]
        if any(each.get("reason") in _STUCK for each in waiting):
            return NO_CONTAINER
        if any(
            each["type"] == "PodScheduled" and each["status"] == "False" and each.get("reason") == "Unschedulable"
            for each in status.get("conditions", ())
        ):
            return NO_ROOM
    return None


def _give(container: ClusterObject, gpus: int) -> None:
    container.setdefault("resources", {}).setdefault("limits", {})[GPU] = str(gpus)
    ours = {"SPARD_GPUS_PER_JOB": str(gpus), "SPARD_SHARDING": "full" if gpus > 1 else "none"}
    kept = [each for each in container.get("env", []) if each["name"] not in ours]
    container["env"] = kept + [{"name": name, "value": value} for name, value in ours.items()]
