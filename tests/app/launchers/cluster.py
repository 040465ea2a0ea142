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
    sets: dict[str, Found] = field(default_factory=dict)  # JobSets
    policies: dict[str, Found] = field(default_factory=dict)
    knows_sets: bool = True
    pods: dict[str, Found] = field(default_factory=dict)  # by the name of their Job
    made: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    answer: int | None = None  # the status of every answer, whatever is asked
    _before: dict[str, list[Found]] = field(default_factory=dict)  # by kind

    def http(self) -> httpx2.Client:
        return httpx2.Client(base_url="https://cluster", transport=httpx2.MockTransport(self._serve))

    def end(self, name: str, ago_s: float = 0.0, kind: str = "Complete") -> None:
        """A Job's pod has ended."""
        at = (datetime.now(UTC) - timedelta(seconds=ago_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
        kind = "Completed" if kind == "Complete" and name in self.sets else kind
        found = (self.jobs | self.sets)[name]
        found["status"] = {"conditions": [{"type": kind, "status": "True", "lastTransitionTime": at}]}

    def all(self) -> list[Found]:
        """Jobs and JobSets."""
        return [*self.jobs.values(), *self.sets.values()]

    def live(self) -> list[Found]:
        return [job for job in self.all() if not job.get("status")]

    def apart(self) -> set[str]:
        """JobSets whose pods do not reach one another."""
        owners = {each["metadata"]["ownerReferences"][0]["uid"] for each in self.policies.values()}
        return {name for name, found in self.sets.items() if found["metadata"]["uid"] not in owners}

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
        last = request.url.path.rsplit("/", 1)[1]
        if fault == "stale" and request.method == "GET" and last in ("jobs", "jobsets", "networkpolicies"):
            return httpx2.Response(200, json={"metadata": {}, "items": self._before.get(last, [])})
        is_list = request.method == "GET" and "podtemplates" not in request.url.path
        return httpx2.Response(fault if isinstance(fault, int) and (fault != 410 or is_list) else 504, json={})

    def _do(self, request: httpx2.Request) -> httpx2.Response:
        before, last = request.url.path.split("/")[-2:]
        kinds = {"jobs": self.jobs, "jobsets": self.sets, "networkpolicies": self.policies}
        if "jobsets" in (before, last) and not self.knows_sets:
            return httpx2.Response(404, text="404 page not found")
        match request.method, last:
            case "GET", "spard-job" | "spard-leader" | "spard-follower":
                return httpx2.Response(200, json={"template": TEMPLATE})
            case "GET", "pods":
                return self._list_page(request, list(self.pods.values()))
            case "GET", kind:
                if self.random.random() < 0.5:
                    self._before[kind] = deepcopy(list(kinds[kind].values()))
                return self._list_page(request, list(kinds[kind].values()))
            case "POST", kind:
                return self._make(kinds[kind], json.loads(request.content), request.url.params.get("fieldValidation"))
        return self._delete(kinds[before], last, json.loads(request.content))

    def _list_page(self, request: httpx2.Request, items: list[Found]) -> httpx2.Response:
        start = int(request.url.params.get("continue", 0))
        more = {"continue": str(start + self.page)} if start + self.page < len(items) else {}
        return httpx2.Response(200, json={"metadata": more, "items": items[start : start + self.page]})

    def _make(self, there: dict[str, Found], wanted: Found, validation: str | None) -> httpx2.Response:
        if wrong := schemas.faults(wanted) if validation == "Strict" else ["asked for no strict validation"]:
            return _refusal(wrong)
        name = wanted["metadata"]["name"]
        if name in there:
            return httpx2.Response(409, json={"reason": "AlreadyExists"})
        if there is not self.policies:
            self.made.append(name)
            wanted["metadata"]["uid"] = f"uid-{len(self.made)}"
        there[name] = wanted
        return httpx2.Response(201, json=wanted)

    def _delete(self, there: dict[str, Found], name: str, options: Found) -> httpx2.Response:
        if wrong := schemas.faults(options, "v1/DeleteOptions"):
            return _refusal(wrong)
        if name not in there:
            return httpx2.Response(404, json={})
        if there[name]["metadata"]["uid"] != options["preconditions"]["uid"]:
            return httpx2.Response(409, json={"reason": "Conflict"})
        del there[name]
        self.pods.pop(name, None)
        if there is self.sets:  # a policy goes with its owner
            self.policies.pop(name, None)
        return httpx2.Response(200, json={})


def _refusal(wrong: list[str]) -> httpx2.Response:
    return httpx2.Response(400, json={"kind": "Status", "code": 400, "message": f"strict decoding error: {wrong[0]}"})
