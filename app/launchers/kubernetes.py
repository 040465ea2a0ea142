"""The launcher for Kubernetes: one batch/v1 Job for each attempt, or a JobSet on several nodes, by the REST API."""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2

from app.errors import Unfit
from app.launchers import manifest
from app.launchers.base import Away, Refused, Started, Work
from app.launchers.manifest import ClusterObject

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
        self._sets = f"/apis/{manifest.JOBSET_VERSION}/namespaces/{namespace}/jobsets"
        self._policies = f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"
        self._core = f"/api/v1/namespaces/{namespace}"

    def check(self) -> None:
        """Raise `Unfit` if jobs may have several nodes but the cluster has no JobSet API."""
        if self._nodes > 1 and self._ask("GET", self._sets, params={"limit": 1}).status_code == _MISSING:
            text = f"SPARD_LAUNCH_NODES is {self._nodes}, but the cluster knows no JobSet ({manifest.JOBSET_VERSION})."
            raise Unfit(f"{text} Install it (https://jobset.sigs.k8s.io), or set SPARD_LAUNCH_NODES=1.")

    def list_started(self) -> list[Started]:
        """Return all work that the cluster has, and add NetworkPolicies that JobSets lack; may be slightly outdated."""
        jobs, sets = self._list(self._jobs), self._list(self._sets) if self._nodes > 1 else []
        if sets:
            self._connect(sets)
        pods: dict[str, list[ClusterObject]] = {}
        for pod in self._list(f"{self._core}/pods"):
            labels = pod["metadata"].get("labels", {})
            pods.setdefault(labels.get(manifest.JOBSET_LABEL) or labels.get("job-name", ""), []).append(pod)
        found = ((each, manifest.read_work(each)) for each in (*jobs, *sets))
        return [_as_started(each, work, pods.get(each["metadata"]["name"], [])) for each, work in found if work]

    def start(self, work: Work) -> None:
        """Create the Job or JobSet of an attempt, unless one with its name exists."""
        if work.nodes == 1:
            self._make(self._jobs, manifest.job(self._template(TEMPLATE), work, self._queue))
            return
        leader, follower = self._template(LEADER), self._template(FOLLOWER)
        if made := self._make(self._sets, manifest.jobset(leader, follower, work, self._queue)):
            self._make(self._policies, manifest.network_policy(work, made["metadata"]["uid"]))

    def stop(self, started: Started) -> None:
        """Delete the Job or JobSet with this uid, and its pods, but not a newer one with the same name."""
        precise = {"propagationPolicy": "Background", "preconditions": {"uid": started.uid}}
        kind = self._jobs if started.work.nodes == 1 else self._sets
        ended = self._ask("DELETE", f"{kind}/{started.name}", json=precise)
        # A conflict means that the name belongs to another uid now: this attempt's object is gone already.
        if ended.is_error and ended.status_code not in (_MISSING, _CONFLICT):
            raise Refused(f"The cluster did not delete a Job: {ended.status_code}: {ended.text[:500]}")

    def _connect(self, sets: Iterable[ClusterObject]) -> None:
        """Create missing NetworkPolicies: a launcher may have ended after creating a JobSet and before its policy."""
        owners = {manifest.owner_uid(each) for each in self._list(self._policies)}
        for each in sets:
            work, uid = manifest.read_work(each), each["metadata"]["uid"]
            if work and manifest.end_time(each) is None and uid not in owners:
                self._make(self._policies, manifest.network_policy(work, uid))

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
        (label,) = manifest.MANAGED.items()
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


def _as_started(found: ClusterObject, work: Work, pods: list[ClusterObject]) -> Started:
    at = manifest.end_time(found)
    ended_s = None if at is None else (datetime.now(UTC) - at).total_seconds()
    own = found["metadata"]
    return Started(own["name"], own["uid"], work, ended_s, manifest.why_not(found, pods))
