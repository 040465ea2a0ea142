"""A Kubernetes API server of one namespace in memory, with pods that are workers, and with faults by a seed.

It holds what it is sent against the recorded schemas, as the real one does where it is asked for strict validation.
"""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import httpx2

from tests.app.launchers import schemas

TEMPLATE = {
    "metadata": {"labels": {"app": "spard-worker"}},
    "spec": {"containers": [{"name": "worker", "image": "registry.example.org/spard-worker:1", "env": []}]},
}
Found = dict[str, Any]


@dataclass
class Cluster:
    """`faults`: how often, of all requests, one goes wrong; in half of these what was asked is done all the same."""

    random: Random = field(default_factory=lambda: Random(0))
    faults: float = 0.0
    page: int = 500
    jobs: dict[str, Found] = field(default_factory=dict)
    pods: dict[str, Found] = field(default_factory=dict)  # by the name of their Job
    made: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    answer: int | None = None  # the status of every answer, whatever is asked
    _before: list[Found] = field(default_factory=list)

    def http(self) -> httpx2.Client:
        return httpx2.Client(base_url="https://cluster", transport=httpx2.MockTransport(self._serve))

    def end(self, name: str, ago_s: float = 0.0, kind: str = "Complete") -> None:
        """A Job's pod has ended."""
        at = (datetime.now(UTC) - timedelta(seconds=ago_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.jobs[name]["status"] = {"conditions": [{"type": kind, "status": "True", "lastTransitionTime": at}]}

    def live(self) -> list[Found]:
        return [job for job in self.jobs.values() if not job.get("status")]

    def _serve(self, request: httpx2.Request) -> httpx2.Response:
        self.calls.append(request.method)
        if self.answer is not None:
            return httpx2.Response(self.answer, json={})
        if self.random.random() >= self.faults:
            return self._do(request)
        fault = self.random.choice(["lost", "timeout", 429, 500, 503, 410, "stale"])
        if fault == "lost":
            self._do(request)
            raise httpx2.ReadTimeout("lost", request=request)
        if fault == "timeout":
            raise httpx2.ConnectTimeout("away", request=request)
        if fault == "stale" and request.method == "GET" and request.url.path.endswith("/jobs"):
            return httpx2.Response(200, json={"metadata": {}, "items": self._before})
        is_list = request.method == "GET" and "podtemplates" not in request.url.path
        return httpx2.Response(fault if isinstance(fault, int) and (fault != 410 or is_list) else 504, json={})

    def _do(self, request: httpx2.Request) -> httpx2.Response:
        last = request.url.path.rsplit("/", 1)[1]
        match request.method, last:
            case "GET", "spard-job":
                return httpx2.Response(200, json={"template": TEMPLATE})
            case "GET", "pods":
                return self._listed(request, list(self.pods.values()))
            case "GET", "jobs":
                self._before = deepcopy(list(self.jobs.values())) if self.random.random() < 0.5 else self._before
                return self._listed(request, list(self.jobs.values()))
            case "POST", "jobs":
                return self._make(json.loads(request.content), request.url.params.get("fieldValidation"))
        return self._delete(last, json.loads(request.content))

    def _listed(self, request: httpx2.Request, items: list[Found]) -> httpx2.Response:
        start = int(request.url.params.get("continue", 0))
        more = {"continue": str(start + self.page)} if start + self.page < len(items) else {}
        return httpx2.Response(200, json={"metadata": more, "items": items[start : start + self.page]})

    def _make(self, job: Found, validation: str | None) -> httpx2.Response:
        if wrong := schemas.faults(job) if validation == "Strict" else ["asked for no strict validation"]:
            return _refused(wrong)
        name = job["metadata"]["name"]
        if name in self.jobs:
            return httpx2.Response(409, json={"reason": "AlreadyExists"})
        self.made.append(name)
        job["metadata"]["uid"] = f"uid-{len(self.made)}"
        self.jobs[name] = job
        return httpx2.Response(201, json=job)

    def _delete(self, name: str, options: Found) -> httpx2.Response:
        if wrong := schemas.faults(options, "v1/DeleteOptions"):
            return _refused(wrong)
        if name not in self.jobs:
            return httpx2.Response(404, json={})
        if self.jobs[name]["metadata"]["uid"] != options["preconditions"]["uid"]:
            return httpx2.Response(409, json={"reason": "Conflict"})
        del self.jobs[name]
        self.pods.pop(name, None)
        return httpx2.Response(200, json={})


def _refused(wrong: list[str]) -> httpx2.Response:
    return httpx2.Response(400, json={"kind": "Status", "code": 400, "message": f"strict decoding error: {wrong[0]}"})
