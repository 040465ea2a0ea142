"""What Kubernetes' API server takes, from the schemas recorded in kubernetes.json; unknown fields are refused.

Those of JobSet are recorded in jobset.json. Beyond them stand the few rules for names, labels and pods of Jobs that the
code of both has and their schemas have not.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]

_RECORDED: list[dict[str, Any]] = [
    json.loads(Path(__file__).with_name(name).read_text()) for name in ("kubernetes.json", "jobset.json")
]
KINDS: dict[str, str] = {kind: root for each in _RECORDED for kind, root in each["roots"].items()}
_DEFS: dict[str, Any] = {name: schema for each in _RECORDED for name, schema in each["$defs"].items()}

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")  # of a Job: its pods carry it as a label
_SET_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")  # of a JobSet's pods
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


def faults(found: dict[str, Any], kind: str | None = None) -> list[str]:
    """Return what is wrong with an object; `kind` is its apiVersion/kind where that does not stand in it."""
    named = kind or f"{found['apiVersion']}/{found['kind']}"
    schema = {"$ref": f"#/$defs/{KINDS[named]}", "$defs": _DEFS}
    wrong = [f"{each.json_path}: {each.message}" for each in jsonschema.Draft202012Validator(schema).iter_errors(found)]
    if wrong or named not in ("batch/v1/Job", "jobset.x-k8s.io/v1alpha2/JobSet"):
        return wrong
    return _of_job(found) if named == "batch/v1/Job" else _of_set(found)


def _of_job(job: dict[str, Any]) -> list[str]:
    name, pod = job["metadata"]["name"], job["spec"]["template"]
    labels = [each.get("metadata", {}).get("labels", {}) for each in (job, pod)]
    wrong = [] if _NAME.fullmatch(name) else [f"name: {name!r} is no label of DNS"]
    wrong += [
        f"label {key}: {value!r}" for each in labels for key, value in each.items() if not _VALUE.fullmatch(value)
    ]
    if pod["spec"].get("restartPolicy") not in ("Never", "OnFailure"):
        wrong.append("restartPolicy: Never or OnFailure")
    return wrong


def _of_set(found: dict[str, Any]) -> list[str]:
    """What JobSet's webhook refuses (pkg/webhooks/jobset_webhook.go), and of each of its Jobs what a cluster does."""
    name, spec = found["metadata"]["name"], found["spec"]
    names = [each["name"] for each in spec["replicatedJobs"]]
    wrong = [f"target: {each}" for each in spec["successPolicy"]["targetReplicatedJobs"] if each not in names]
    for each in spec["replicatedJobs"]:
        job = each["template"]["spec"]
        pod_name = f"{name}-{each['name']}-{each['replicas'] - 1}-{job['completions'] - 1}-abcde"
        wrong += [] if _SET_NAME.fullmatch(pod_name) else [f"name: {pod_name!r} is no label of DNS"]
        wrong += _of_job({"metadata": {"name": f"{name}-{each['name']}-0"}, "spec": job})
    return wrong
