"""What is sent to the cluster, against the files of deploy/."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.launchers import kubernetes
from app.launchers.reconcile import Work
from app.settings import Settings
from tests.app.launchers import schemas

HERE = Path(__file__).parent
FOLDER = HERE.parents[2] / "deploy" / "kubernetes"
DEPLOYED: list[dict[str, Any]] = [
    each for path in sorted(FOLDER.glob("*.yaml")) for each in yaml.safe_load_all(path.read_text())
]


def deployed_object(kind: str, name: str) -> dict[str, Any]:
    (found,) = (each for each in DEPLOYED if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return deepcopy(found)


@pytest.mark.parametrize("queue", [None, "spard"])
@pytest.mark.parametrize("gpus", [None, 1, 8])
def test_a_job_makes_one_pod_and_names_its_attempt(gpus: int | None, queue: str | None) -> None:
    template = deployed_object("PodTemplate", "spard-job")["template"]
    made = kubernetes.job(template, Work("ftjob-0a", 3, gpus), queue)
    assert kubernetes.read_work(made) == Work("ftjob-0a", 3)
    assert schemas.faults(made) == []
    pod = made["spec"]["template"]["spec"]
    assert (made["spec"]["backoffLimit"], pod["restartPolicy"]) == (0, "Never")
    assert pod["containers"][0]["command"][-4:] == ["--job", "ftjob-0a", "--token", "3"]


def make_jobset(nodes: int = 4, queue: str | None = None) -> dict[str, Any]:
    leader, follower = (deployed_object("PodTemplate", f"spard-{name}")["template"] for name in ("leader", "follower"))
    return kubernetes.jobset(leader, follower, Work("ftjob-0a", 3, 8, nodes), queue)


@pytest.mark.parametrize("queue", [None, "spard"])
@pytest.mark.parametrize("nodes", [2, 64])
def test_a_jobset_makes_a_leader_and_followers_and_nothing_twice(nodes: int, queue: str | None) -> None:
    made = make_jobset(nodes, queue)
    assert schemas.faults(made) == []
    assert kubernetes.read_work(made) == Work("ftjob-0a", 3, nodes=nodes)
    assert made["spec"]["failurePolicy"]["maxRestarts"] == 0
    leader, followers = (each["template"]["spec"] for each in made["spec"]["replicatedJobs"])
    assert (leader["completions"], followers["completions"]) == (1, nodes - 1)
    for each in (leader, followers):
        (container,) = each["template"]["spec"]["containers"]
        told = {one["name"]: one["value"] for one in container["env"]}
        assert (each["backoffLimit"], each["completionMode"], each["completions"]) == (
            0,
            "Indexed",
            each["parallelism"],
        )
        assert each["template"]["spec"]["restartPolicy"] == "Never"
        assert container["resources"]["limits"][kubernetes.GPU] == "8"
        asked = {"SPARD_GPUS_PER_JOB": "8", "SPARD_NODES_PER_JOB": str(nodes), "SPARD_SHARDING": "full"}
        assert asked.items() <= told.items()
    command = followers["template"]["spec"]["containers"][0]["command"]
    assert command[command.index("--leader") + 1] == "ftjob-0a-3-leader-0-0.ftjob-0a-3"


def test_the_pods_of_a_jobset_reach_one_another_and_no_other_job_s() -> None:
    made, policy = make_jobset(), kubernetes.network_policy(Work("ftjob-0a", 3, 8, 4), "uid-1")
    assert schemas.faults(policy) == []
    chosen = policy["spec"]["podSelector"]["matchLabels"]
    assert {"spard/job": "ftjob-0a", "spard/token": "3"}.items() <= chosen.items()
    for each in made["spec"]["replicatedJobs"]:
        assert chosen.items() <= each["template"]["spec"]["template"]["metadata"]["labels"].items()
    others = [*policy["spec"]["ingress"][0]["from"], *policy["spec"]["egress"][0]["to"]]
    assert others == [{"podSelector": {"matchLabels": chosen}}] * 2
    assert policy["metadata"]["ownerReferences"][0]["uid"] == "uid-1"


def test_a_follower_s_pod_holds_no_credential() -> None:
    template = deployed_object("PodTemplate", "spard-follower")["template"]
    (container,) = template["spec"]["containers"]
    assert "envFrom" not in container
    assert all("valueFrom" not in each for each in container["env"])
    assert not [
        volume for volume in template["spec"]["volumes"] if {"secret", "projected", "configMap"} & volume.keys()
    ]
    assert template["spec"]["automountServiceAccountToken"] is False
    named = {each["name"] for each in container["env"]} - {"HOME"}
    assert named <= {f"SPARD_{name.upper()}" for name in Settings.model_fields}


def test_the_leader_s_pod_is_a_job_s_with_its_data_where_the_followers_have_them() -> None:
    job, leader, follower = (
        deployed_object("PodTemplate", f"spard-{name}")["template"] for name in ("job", "leader", "follower")
    )
    data = [next(v for v in each["spec"]["volumes"] if v["name"] == "data") for each in (leader, follower)]
    claim = deployed_object("PersistentVolumeClaim", "spard-shared")
    assert data == [{"name": "data", "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}}] * 2
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    mounts = [
        {(m["name"], m["mountPath"]) for m in each["spec"]["containers"][0]["volumeMounts"]}
        for each in (job, leader, follower)
    ]
    assert mounts[0] == mounts[1]
    assert mounts[2] == mounts[1] - {("signing", "/signing")}
    for each in (job, leader):
        each["spec"]["volumes"] = [v for v in each["spec"]["volumes"] if v["name"] != "data"]
        del each["spec"]["containers"][0]["resources"]["limits"][kubernetes.GPU]
    assert leader == job


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"sucessPolicy": {}}, "'sucessPolicy' was unexpected"),
        ({"failurePolicy": {"maxRestarts": "0"}}, "'0' is not of type 'integer'"),
        ({"successPolicy": {"operator": "Most"}}, "'Most' is not one of"),
        ({"successPolicy": {"operator": "All", "targetReplicatedJobs": ["first"]}}, "target: first"),
    ],
)
def test_the_recorded_schema_of_a_jobset_refuses_what_its_server_would(wrong: dict[str, Any], told: str) -> None:
    made = make_jobset()
    assert told in schemas.faults({**made, "spec": {**made["spec"], **wrong}})[0]


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
    made = kubernetes.job(deployed_object("PodTemplate", "spard-job")["template"], Work("ftjob-0a", 3))
    assert told in schemas.faults({**made, **{key: {**made[key], **value} for key, value in wrong.items()}})[0]


CORE = [each for each in DEPLOYED if f"{each['apiVersion']}/{each['kind']}" in schemas.KINDS]


@pytest.mark.parametrize("found", CORE, ids=lambda found: f"{found['kind']}-{found['metadata']['name']}")
def test_a_cluster_takes_what_is_deployed(found: dict[str, Any]) -> None:
    assert schemas.faults(found) == []


def test_the_template_s_pod_is_the_worker_s_without_probes() -> None:
    found = deployed_object("PodTemplate", "spard-job")
    worker = deployed_object("Deployment", "spard-worker")["spec"]["template"]
    (container,) = worker["spec"]["containers"]
    for probe in ("startupProbe", "livenessProbe"):
        del container[probe]
    assert found["template"] == worker


def test_the_account_may_do_what_the_launcher_asks_for_and_no_more() -> None:
    rules = deployed_object("Role", "spard-launcher")["rules"]
    assert {(each["resources"][0], *each["verbs"]) for each in rules} == {
        ("jobs", "list", "create", "delete"),
        ("pods", "list"),
        ("podtemplates", "get"),
        ("jobsets", "list", "create", "delete"),
        ("networkpolicies", "list", "create"),
    }
    (templates,) = (each["resourceNames"] for each in rules if each["resources"] == ["podtemplates"])
    assert templates == [kubernetes.TEMPLATE, kubernetes.LEADER, kubernetes.FOLLOWER]
    pod = deployed_object("Deployment", "spard-launcher")["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == deployed_object("ServiceAccount", "spard-launcher")["metadata"]["name"]
    named = {each["name"] for each in pod["containers"][0]["env"]}
    assert named <= {f"SPARD_{name.upper()}" for name in Settings.model_fields}


def test_kueue_s_quota_covers_what_a_pod_asks_for() -> None:
    assert (
        deployed_object("LocalQueue", "spard")["spec"]["clusterQueue"]
        == deployed_object("ClusterQueue", "spard")["metadata"]["name"]
    )
    (group,) = deployed_object("ClusterQueue", "spard")["spec"]["resourceGroups"]
    (container,) = deployed_object("PodTemplate", "spard-job")["template"]["spec"]["containers"]
    asked = container["resources"]["requests"].keys() | container["resources"]["limits"].keys()
    assert asked == set(group["coveredResources"])
