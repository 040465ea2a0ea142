"""Build the JobSet of an attempt on several nodes: a leader, which is the worker, and a follower on each other node.

They end together: no pod is ever restarted, and the JobSet has succeeded when its leader has. A NetworkPolicy that the
JobSet owns lets its pods reach each other, but not other jobs' pods.
"""

from __future__ import annotations

from app.launchers.base import Work
from app.launchers.manifest import KEPT_S, ClusterObject, attempt_labels, attempt_name, pod, worker_command, workload

VERSION = "jobset.x-k8s.io/v1alpha2"
NAME = "jobset.sigs.k8s.io/jobset-name"  # a label of all pods of a JobSet

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
    return workload(VERSION, "JobSet", work, spec, queue)


def policy(work: Work, uid: str) -> ClusterObject:
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
            "ownerReferences": [{"apiVersion": VERSION, "kind": "JobSet", "name": name, "uid": uid}],
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
