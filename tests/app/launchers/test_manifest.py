"""What is sent to the cluster, against the files of deploy/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from app.launchers import manifest
from app.launchers.base import Work
from app.settings import Settings
from tests.app.launchers import schemas

HERE = Path(__file__).parent
FOLDER = HERE.parents[2] / "deploy" / "kubernetes"
DEPLOYED: list[dict[str, Any]] = [
    each for path in sorted(FOLDER.glob("*.yaml")) for each in yaml.safe_load_all(path.read_text())
]


def deployed(kind: str, name: str) -> dict[str, Any]:
    (found,) = (each for each in DEPLOYED if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


@pytest.mark.parametrize("queue", [None, "spard"])
@pytest.mark.parametrize("gpus", [None, 1, 8])
def test_a_job_makes_one_pod_and_names_its_attempt(gpus: int | None, queue: str | None) -> None:
    template = deployed("PodTemplate", "spard-job")["template"]
    made = manifest.job(template, Work("ftjob-0a", 3, gpus), queue)
    assert manifest.work_of(made) == Work("ftjob-0a", 3)
    assert schemas.faults(made) == []
    pod = made["spec"]["template"]["spec"]
    assert (made["spec"]["backoffLimit"], pod["restartPolicy"]) == (0, "Never")
    assert pod["containers"][0]["command"][-4:] == ["--job", "ftjob-0a", "--token", "3"]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"spec": {"backofLimit": 0}}, "'backofLimit' was unexpected"),
        ({"spec": {"backoffLimit": "0"}}, "'0' is not of type 'integer'"),
        ({"spec": {"template": {"spec": {"containers": [{"image": "x"}]}}}}, "'name' is a required property"),
        ({"spec": {"template": {"spec": {"containers": [], "restartPolicy": "Always"}}}}, "restartPolicy"),
        ({"metadata": {"name": "ftjob_0A"}}, "is no label of DNS"),
        ({"metadata": {"name": "x", "labels": {"spard/job": "a" * 64}}}, "label spard/job"),
    ],
)
def test_the_recorded_schemas_refuse_what_a_cluster_would(wrong: dict[str, Any], told: str) -> None:
    made = manifest.job(deployed("PodTemplate", "spard-job")["template"], Work("ftjob-0a", 3))
    assert told in schemas.faults({**made, **{key: {**made[key], **value} for key, value in wrong.items()}})[0]


CORE = [each for each in DEPLOYED if f"{each['apiVersion']}/{each['kind']}" in schemas.KINDS]


@pytest.mark.parametrize("found", CORE, ids=lambda found: f"{found['kind']}-{found['metadata']['name']}")
def test_a_cluster_takes_what_is_deployed(found: dict[str, Any]) -> None:
    assert schemas.faults(found) == []


def test_the_template_s_pod_is_the_worker_s_without_probes() -> None:
    found = deployed("PodTemplate", "spard-job")
    worker = deployed("Deployment", "spard-worker")["spec"]["template"]
    (container,) = worker["spec"]["containers"]
    for probe in ("startupProbe", "livenessProbe"):
        del container[probe]
    assert found["template"] == worker


def test_the_account_may_do_what_the_launcher_asks_for_and_no_more() -> None:
    rules = deployed("Role", "spard-launcher")["rules"]
    assert {(each["resources"][0], *each["verbs"]) for each in rules} == {
        ("jobs", "list", "create", "delete"),
        ("pods", "list"),
        ("podtemplates", "get"),
    }
    pod = deployed("Deployment", "spard-launcher")["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == deployed("ServiceAccount", "spard-launcher")["metadata"]["name"]
    named = {each["name"] for each in pod["containers"][0]["env"]}
    assert named <= {f"SPARD_{name.upper()}" for name in Settings.model_fields}


def test_kueue_s_quota_covers_what_a_pod_asks_for() -> None:
    assert (
        deployed("LocalQueue", "spard")["spec"]["clusterQueue"] == deployed("ClusterQueue", "spard")["metadata"]["name"]
    )
    (group,) = deployed("ClusterQueue", "spard")["spec"]["resourceGroups"]
    (container,) = deployed("PodTemplate", "spard-job")["template"]["spec"]["containers"]
    asked = container["resources"]["requests"].keys() | container["resources"]["limits"].keys()
    assert asked == set(group["coveredResources"])
