"""What Kubernetes' API server takes, from the schemas recorded in kubernetes.json; unknown fields are refused.

Beyond them stand the few rules for names, labels and pods of Jobs that its code has and its schemas have not.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]

_RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("kubernetes.json").read_text())
KINDS: dict[str, str] = _RECORDED["roots"]

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")  # of a Job: its pods carry it as a label
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


def faults(found: dict[str, Any], kind: str | None = None) -> list[str]:
    """Return what is wrong with an object; `kind` is its apiVersion/kind where that does not stand in it."""
    named = kind or f"{found['apiVersion']}/{found['kind']}"
    schema = {"$ref": f"#/$defs/{KINDS[named]}", "$defs": _RECORDED["$defs"]}
    wrong = [f"{each.json_path}: {each.message}" for each in jsonschema.Draft202012Validator(schema).iter_errors(found)]
    return wrong or (_of_job(found) if named == "batch/v1/Job" else [])


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
