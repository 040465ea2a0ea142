"""The launcher for Kubernetes: one batch/v1 Job for each attempt, or a JobSet on several nodes, by the REST API.

The objects are built from the provider's pod templates, and the state of an attempt is read from its object.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2

from app.errors import Unfit
from app.launchers.reconcile import Away, ClusterWork, Refused, Work

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
    """Return the attempt of a Job or JobSet, from its labels; None if it lacks our labels."""
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


ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
URL = "https://kubernetes.default.svc"
TEMPLATE, LEADER, FOLLOWER = "spard-job", "spard-leader", "spard-follower"

_TIMEOUT_S = 15.0
_PAGE = 500
_LISTS = 3  # how often a paginated list may expire while it is read, before the cluster counts as away
_GONE, _CONFLICT, _MISSING, _MANY = 410, 409, 404, 429


def client() -> httpx2.Client:
    """Return an HTTP client with the rights of this pod's service account.

    The token is read for each request, because Kubernetes rotates it. Raises `Unfit` outside a pod.
    """
    if not (ACCOUNT / "token").is_file():
        raise Unfit(f"There is no service account's token at {ACCOUNT}: this runs in a pod of the cluster.")
    try:
        trusted = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    except OSError as error:  # ssl.SSLError is one
        raise Unfit(f"The cluster's certificate {ACCOUNT / 'ca.crt'} cannot be read: {error}.") from None

    def sign_request(request: httpx2.Request) -> httpx2.Request:
        request.headers["Authorization"] = f"Bearer {(ACCOUNT / 'token').read_text().strip()}"
        return request

    return httpx2.Client(base_url=URL, auth=sign_request, verify=trusted, timeout=_TIMEOUT_S)


class KubernetesLauncher:
    """Implements `Launcher` with Jobs of one namespace, made from its PodTemplates, and JobSets for several nodes.

    `queue` is Kueue's queue, if there is one; `nodes` is the most nodes that a job may have.
    """

    def __init__(self, http: httpx2.Client, namespace: str, queue: str | None = None, nodes: int = 1) -> None:
        self._http, self._queue, self._nodes = http, queue, nodes
        self._jobs = f"/apis/batch/v1/namespaces/{namespace}/jobs"
        self._sets = f"/apis/{JOBSET_VERSION}/namespaces/{namespace}/jobsets"
        self._policies = f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"
        self._core = f"/api/v1/namespaces/{namespace}"

    def check(self) -> None:
        """Raise `Unfit` if jobs may have several nodes but the cluster has no JobSet API."""
        if self._nodes > 1 and self._ask("GET", self._sets, params={"limit": 1}).status_code == _MISSING:
            text = f"SPARD_LAUNCH_NODES is {self._nodes}, but the cluster knows no JobSet ({JOBSET_VERSION})."
            raise Unfit(f"{text} Install it (https://jobset.sigs.k8s.io), or set SPARD_LAUNCH_NODES=1.")

    def list_started(self) -> list[ClusterWork]:
        """Return all work that the cluster has, and add NetworkPolicies that JobSets lack; may be slightly outdated."""
        jobs, sets = self._list(self._jobs), self._list(self._sets) if self._nodes > 1 else []
        if sets:
            self._connect(sets)
        pods: dict[str, list[ClusterObject]] = {}
        for pod in self._list(f"{self._core}/pods"):
            labels = pod["metadata"].get("labels", {})
            pods.setdefault(labels.get(JOBSET_LABEL) or labels.get("job-name", ""), []).append(pod)
        found = ((each, read_work(each)) for each in (*jobs, *sets))
        return [_as_started(each, work, pods.get(each["metadata"]["name"], [])) for each, work in found if work]

    def start(self, work: Work) -> None:
        """Create the Job or JobSet of an attempt, unless one with its name exists."""
        if work.nodes == 1:
            self._make(self._jobs, job(self._template(TEMPLATE), work, self._queue))
            return
        leader, follower = self._template(LEADER), self._template(FOLLOWER)
        if made := self._make(self._sets, jobset(leader, follower, work, self._queue)):
            self._make(self._policies, network_policy(work, made["metadata"]["uid"]))

    def stop(self, started: ClusterWork) -> None:
        """Delete the Job or JobSet with this uid, and its pods, but not a newer one with the same name."""
        precise = {"propagationPolicy": "Background", "preconditions": {"uid": started.uid}}
        kind = self._jobs if started.work.nodes == 1 else self._sets
        ended = self._ask("DELETE", f"{kind}/{started.name}", json=precise)
        # A conflict means that the name belongs to another uid now: this attempt's object is gone already.
        if ended.is_error and ended.status_code not in (_MISSING, _CONFLICT):
            raise Refused(f"The cluster did not delete a Job: {ended.status_code}: {ended.text[:500]}")

    def _connect(self, sets: Iterable[ClusterObject]) -> None:
        """Create missing NetworkPolicies: a launcher may have ended after creating a JobSet and before its policy."""
        owners = {owner_uid(each) for each in self._list(self._policies)}
        for each in sets:
            work, uid = read_work(each), each["metadata"]["uid"]
            if work and end_time(each) is None and uid not in owners:
                self._make(self._policies, network_policy(work, uid))

    def _template(self, name: str) -> ClusterObject:
        answer = self._ask("GET", f"{self._core}/podtemplates/{name}")
        if answer.status_code != httpx2.codes.OK:
            raise Refused(f"The PodTemplate {name} cannot be read: {answer.status_code}.")
        template: ClusterObject = answer.json()["template"]
        return template

    def _make(self, path: str, wanted: ClusterObject) -> ClusterObject | None:
        """Create an object and return it as the cluster has it; None if one with its name exists."""
        made = self._ask("POST", path, json=wanted, params={"fieldValidation": "Strict"})
        if made.status_code == _CONFLICT:
            return None
        if made.is_error:
            raise Refused(f"The cluster refused a {wanted['kind']} with {made.status_code}: {made.text[:500]}")
        found: ClusterObject = made.json()
        return found

    def _list(self, path: str) -> list[ClusterObject]:
        for _ in range(_LISTS):
            pages = list(self._pages(path))
            if None not in pages:
                return [item for page in pages if page for item in page["items"]]
        raise Away(f"The cluster forgets the list of {path} before it is read.")

    def _pages(self, path: str) -> Iterator[ClusterObject | None]:
        """Yield the pages of a list, and None at the end if its continuation token has expired."""
        (label,) = MANAGED.items()
        asked: dict[str, str | int] = {"labelSelector": "=".join(label), "limit": _PAGE}
        while True:
            answer = self._ask("GET", path, params=asked)
            if answer.status_code == _GONE:
                yield None
                return
            if answer.is_error:
                raise Refused(f"The cluster does not list {path}: {answer.status_code}: {answer.text[:500]}")
            page: ClusterObject = answer.json()
            yield page
            if not (more := page.get("metadata", {}).get("continue")):
                return
            asked["continue"] = more

    def _ask(self, method: str, path: str, **asked: Any) -> httpx2.Response:
        try:
            answer = self._http.request(method, path, **asked)
        except httpx2.HTTPError as error:
            raise Away(f"The cluster does not answer: {type(error).__name__}: {error}") from error
        except OSError as error:
            raise Away(f"The service account's token cannot be read: {error}") from error
        if answer.is_server_error or answer.status_code == _MANY:
            raise Away(f"The cluster answers {answer.status_code}.")
        return answer


def _as_started(found: ClusterObject, work: Work, pods: list[ClusterObject]) -> ClusterWork:
    at = end_time(found)
    ended_s = None if at is None else (datetime.now(UTC) - at).total_seconds()
    own = found["metadata"]
    return ClusterWork(own["name"], own["uid"], work, ended_s, why_not(found, pods))
