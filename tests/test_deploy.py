"""The manifests are well formed and agree with the code; they were not applied to a cluster by any test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy import text

from app.db import make_engine
from app.settings import Settings

FOLDER = Path(__file__).resolve().parents[1] / "deploy" / "kubernetes"
OBJECTS: list[dict[str, Any]] = [
    each for path in sorted(FOLDER.glob("*.yaml")) for each in yaml.safe_load_all(path.read_text())
]
PODS = [each for each in OBJECTS if each["kind"] in ("Deployment", "Job")]


@pytest.mark.parametrize("found", OBJECTS, ids=lambda found: f"{found['kind']}-{found['metadata']['name']}")
def test_every_object_says_what_it_is(found: dict[str, Any]) -> None:
    assert {"apiVersion", "kind", "metadata"} <= found.keys()


@pytest.mark.parametrize("found", PODS, ids=lambda found: found["metadata"]["name"])
def test_no_container_runs_as_root_or_holds_a_secret(found: dict[str, Any]) -> None:
    pod = found["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    for container in pod["containers"]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        names = {variable["name"] for variable in container.get("env", [])}
        assert not {name for name in names if "KEY" in name or "URL" in name}


@pytest.mark.parametrize("found", PODS, ids=lambda found: found["metadata"]["name"])
def test_labels_and_volumes_fit_together(found: dict[str, Any]) -> None:
    template = found["spec"]["template"]
    selector = found["spec"].get("selector", {}).get("matchLabels", {})
    assert selector.items() <= template.get("metadata", {}).get("labels", {}).items()
    mounted = {mount["name"] for each in template["spec"]["containers"] for mount in each["volumeMounts"]}
    assert mounted == {volume["name"] for volume in template["spec"]["volumes"]}


def test_every_setting_that_is_named_exists() -> None:
    config = next(each for each in OBJECTS if each["kind"] == "ConfigMap")["data"]
    known = {f"SPARD_{name.upper()}" for name in Settings.model_fields}
    assert {name for name in config if name.startswith("SPARD_")} <= known


def test_a_pod_has_longer_to_stop_than_a_worker_needs() -> None:
    worker = next(each for each in PODS if each["metadata"]["name"] == "spard-worker")
    assert worker["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > Settings().stop_grace_s


def test_the_autoscaler_s_query_runs_on_the_schema(postgres_url: str) -> None:
    scaled = next(each for each in OBJECTS if each["kind"] == "ScaledObject")
    engine = make_engine(postgres_url)
    with engine.connect() as connection:
        assert connection.execute(text(scaled["spec"]["triggers"][0]["metadata"]["query"])).scalar() == 0
    engine.dispose()
