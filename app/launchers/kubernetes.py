"""Kubernetes: one batch/v1 Job for each attempt, through the five calls of its REST API that this takes."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
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
TEMPLATE = "spard-job"

_TIMEOUT_S = 15.0
_PAGE = 500
_LISTS = 3  # that may outlive the cluster's memory of their first page, before the cluster counts as away
_GONE, _CONFLICT, _MISSING, _MANY = 410, 409, 404, 429


def client() -> httpx2.Client:
    """Return a client with the rights of this pod's service account; its token is read anew, as it changes.

    `Unfit` where the account is not there.
    """
    if not (ACCOUNT / "token").is_file():
        raise Unfit(f"There is no service account's token at {ACCOUNT}: this runs in a pod of the cluster.")
    try:
        trusted = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    except OSError as error:  # ssl.SSLError is one
        raise Unfit(f"The cluster's certificate {ACCOUNT / 'ca.crt'} cannot be read: {error}.") from None

    def signed(request: httpx2.Request) -> httpx2.Request:
        request.headers["Authorization"] = f"Bearer {(ACCOUNT / 'token').read_text().strip()}"
        return request

    return httpx2.Client(base_url=URL, auth=signed, verify=trusted, timeout=_TIMEOUT_S)


class KubernetesLauncher:
    """Jobs of one namespace. Their pods are made of its PodTemplate `spard-job`."""

    def __init__(self, http: httpx2.Client, namespace: str, queue: str | None = None) -> None:
        self._http, self._queue = http, queue
        self._jobs = f"/apis/batch/v1/namespaces/{namespace}/jobs"
        self._core = f"/api/v1/namespaces/{namespace}"

    def started(self) -> list[Started]:
        """Return all work that the cluster has, perhaps as it was some time ago."""
        jobs = self._list(self._jobs)
        pods: dict[str, list[ClusterObject]] = {}
        for pod in self._list(f"{self._core}/pods"):
            pods.setdefault(pod["metadata"].get("labels", {}).get("job-name", ""), []).append(pod)
        found = ((each, manifest.work_of(each)) for each in jobs)
        return [_started(each, work, pods.get(each["metadata"]["name"], [])) for each, work in found if work]

    def start(self, work: Work) -> None:
        """Make the Job of an attempt, unless there is one of its name."""
        template = self._ask("GET", f"{self._core}/podtemplates/{TEMPLATE}")
        if template.status_code != httpx2.codes.OK:
            raise Refused(f"The PodTemplate {TEMPLATE} cannot be read: {template.status_code}.")
        job = manifest.job(template.json()["template"], work, self._queue)
        made = self._ask("POST", self._jobs, json=job, params={"fieldValidation": "Strict"})
        if made.is_error and made.status_code != _CONFLICT:
            raise Refused(f"The cluster refused a Job with {made.status_code}: {made.text[:500]}")

    def stop(self, started: Started) -> None:
        """Delete the Job with this uid, and its pod; a Job that has taken its name since is left alone."""
        precise = {"propagationPolicy": "Background", "preconditions": {"uid": started.uid}}
        ended = self._ask("DELETE", f"{self._jobs}/{started.name}", json=precise)
        if ended.is_error and ended.status_code not in (_MISSING, _CONFLICT):
            raise Refused(f"The cluster did not delete a Job: {ended.status_code}: {ended.text[:500]}")

    def _list(self, path: str) -> list[ClusterObject]:
        for _ in range(_LISTS):
            pages = list(self._pages(path))
            if None not in pages:
                return [item for page in pages if page for item in page["items"]]
        raise Away(f"The cluster forgets the list of {path} before it is read.")

    def _pages(self, path: str) -> Iterator[ClusterObject | None]:
        """Yield the pages of a list, and None last where the cluster no longer knows how it goes on."""
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


def _started(found: ClusterObject, work: Work, pods: list[ClusterObject]) -> Started:
    at = manifest.ended_at(found)
    ended_s = None if at is None else (datetime.now(UTC) - at).total_seconds()
    own = found["metadata"]
    return Started(own["name"], own["uid"], work, ended_s, manifest.why_not(found, pods))
