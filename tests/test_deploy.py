"""Manifests and compose file are well formed, closed, and agree with the code.

They are read and compared here; no test applies them to a cluster or starts a container.
"""

from __future__ import annotations

import json
import re
import stat
import subprocess
import tomllib
from ipaddress import ip_network
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from sqlalchemy import text

from app.db import make_engine
from app.launchers import kubernetes
from app.settings import Settings

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "deploy" / "kubernetes"
VERSION = tomllib.loads((ROOT / "service" / "pyproject.toml").read_text())["project"]["version"]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
OBJECTS: list[dict[str, Any]] = [
    each for path in sorted(FOLDER.glob("*.yaml")) for each in yaml.safe_load_all(path.read_text())
]
PODS = [each for each in OBJECTS if each["kind"] in ("Deployment", "Job")]
TEMPLATES = [each for each in OBJECTS if each["kind"] == "PodTemplate"]


@pytest.mark.parametrize("found", OBJECTS, ids=lambda found: f"{found['kind']}-{found['metadata']['name']}")
def test_every_object_says_what_it_is(found: dict[str, Any]) -> None:
    assert {"apiVersion", "kind", "metadata"} <= found.keys()


@pytest.mark.parametrize("found", PODS, ids=lambda found: found["metadata"]["name"])
def test_no_container_runs_as_root_or_holds_a_secret(found: dict[str, Any]) -> None:
    pod = found["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert all("sizeLimit" in volume["emptyDir"] for volume in pod["volumes"] if "emptyDir" in volume)
    for container in pod["containers"]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {"requests", "limits"} <= container["resources"].keys()
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


def config() -> dict[str, str]:
    found: dict[str, str] = next(each for each in OBJECTS if each["kind"] == "ConfigMap")["data"]
    return found


@pytest.mark.parametrize("found", TEMPLATES, ids=lambda found: found["metadata"]["name"])
def test_a_template_s_pod_is_as_closed_as_the_others(found: dict[str, Any]) -> None:
    test_no_container_runs_as_root_or_holds_a_secret({"spec": found})
    test_labels_and_volumes_fit_together({"spec": found})
    test_images_are_of_this_version({"spec": found})


@pytest.mark.parametrize("found", PODS, ids=lambda found: found["metadata"]["name"])
def test_images_are_of_this_version(found: dict[str, Any]) -> None:
    images = [container["image"] for container in found["spec"]["template"]["spec"]["containers"]]
    assert {image.rpartition(":")[2] for image in images} == {VERSION}


@pytest.mark.parametrize("found", PODS, ids=lambda found: found["metadata"]["name"])
def test_every_path_that_a_process_reads_or_writes_is_mounted(found: dict[str, Any]) -> None:
    """Data, temporary files and HOME can be written; the signing key and base models, for those who use them, not."""
    name = found["metadata"]["name"]
    (container,) = found["spec"]["template"]["spec"]["containers"]
    mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
    written = {config()["SPARD_DATA_DIR"], config()["HOME"], "/tmp"}
    own = {"spard-migrate": set(), "spard-launcher": {str(kubernetes.ACCOUNT)}}
    read = own[name] if name in own else {"/models", str(PurePosixPath(config()["SPARD_SIGNING_KEY"]).parent)}
    assert {path for path, is_read_only in mounts.items() if is_read_only} == read
    assert written <= {path for path, is_read_only in mounts.items() if not is_read_only}


def test_what_answers_with_models_is_the_api_s_process_in_the_image_that_has_torch() -> None:
    last = (ROOT / "Dockerfile").read_text().split(" AS api\n")[1].split("\nFROM ")[0]
    command = json.loads(re.findall(r"^CMD (\[.*\])$", last, re.MULTILINE)[0])
    pods = {each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in PODS}
    (serving,), (worker,) = (pods[name]["containers"] for name in ("spard-serving", "spard-worker"))
    assert serving["image"] == worker["image"]
    assert serving["command"] == command == SERVICES["api"]["command"]
    known = {f"SPARD_{name.upper()}" for name in Settings.model_fields} | {"UVICORN_HOST"}
    assert {each["name"] for each in serving["env"]} <= known
    policies = {each["metadata"]["name"]: each["spec"] for each in OBJECTS if each["kind"] == "NetworkPolicy"}
    assert policies["spard-serving"]["egress"][0] == policies["spard-api"]["egress"][0]


def test_the_worker_s_image_alone_holds_models_in_nf4() -> None:
    locks = {name: (ROOT / "requirements" / f"{name}.lock").read_text() for name in ("api", "worker")}
    assert {name for name, lock in locks.items() if re.search("^bitsandbytes==", lock, re.M)} == {"worker"}
    assert "-r requirements/worker.lock" in (ROOT / "Dockerfile").read_text()


def test_a_worker_that_is_frozen_is_noticed() -> None:
    worker = next(each for each in PODS if each["metadata"]["name"] == "spard-worker")
    (container,) = worker["spec"]["template"]["spec"]["containers"]
    env = {variable["name"]: variable["value"] for variable in container["env"]}
    (port,) = container["ports"]
    assert str(port["containerPort"]) == env["SPARD_METRICS_PORT"]
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/metrics", "port": port["name"]}


def test_only_what_is_needed_may_be_reached() -> None:
    policies = {each["metadata"]["name"]: each["spec"] for each in OBJECTS if each["kind"] == "NetworkPolicy"}
    assert policies["spard-default-deny"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    labels = {pod["spec"]["template"]["metadata"]["labels"]["app"] for pod in PODS}
    made = {each["template"]["metadata"]["labels"]["app"] for each in TEMPLATES}
    (named,) = policies["spard-dns"]["podSelector"]["matchExpressions"]
    assert set(named["values"]) == labels | made
    assert labels <= policies.keys()
    assert made - policies.keys() == {"spard-follower"}, "DNS, and the pods of its job by a policy of their own"
    for name in ("spard-worker", "spard-migrate"):
        cidrs = [block["ipBlock"]["cidr"] for rule in policies[name]["egress"] for block in rule["to"]]
        assert all(ip_network(cidr).is_private for cidr in cidrs)


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_has_no_more_than_it_needs(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is True
    assert "privileged" not in service
    assert name not in OURS or "cap_add" not in service
    assert (service["networks"] == ["inside"]) == (name != "api")
    assert "ports" not in service or name == "api"
    assert COMPOSE["networks"]["inside"] == {"internal": True}


@pytest.mark.parametrize("name", OURS)
def test_every_path_that_a_container_of_ours_uses_is_mounted(name: str) -> None:
    service = OURS[name]
    targets = [volume.split(":") for volume in service.get("volumes", [])]
    read_only = {target[1] for target in targets if target[2:] == ["ro"]}
    written = {target[1] for target in targets if target[2:] != ["ro"]} | {
        mount.partition(":")[0] for mount in service["tmpfs"]
    }
    environment = service["environment"]
    assert environment.get("SPARD_DATA_DIR", "/data") in written  # the image's own
    assert environment.get("HOME", "/tmp") in written
    if name in ("api", "worker", "worker-cpu"):
        assert read_only == {"/models", str(PurePosixPath(environment["SPARD_SIGNING_KEY"]).parent)}


def test_every_variable_of_the_containers_exists() -> None:
    known = {f"SPARD_{name.upper()}" for name in Settings.model_fields}
    named = {name for service in OURS.values() for name in service["environment"] if name.startswith("SPARD_")}
    assert named <= known
    asked = set(re.findall(r"(?<!\$)\$\{([A-Z0-9_]+):\?", (ROOT / "docker-compose.yml").read_text()))
    assert asked | {"COMPOSE_PROFILES"} == set(re.findall(r"^([A-Z0-9_]+)=", (ROOT / ".env.example").read_text(), re.M))


def test_whoever_is_waited_for_says_when_it_is_ready() -> None:
    for service in SERVICES.values():
        for name, condition in service.get("depends_on", {}).items():
            if condition["condition"] == "service_healthy":
                assert "test" in SERVICES[name]["healthcheck"]
            else:
                assert (condition["condition"], SERVICES[name]["restart"]) == ("service_completed_successfully", "no")


def test_the_signing_key_is_made_once_by_the_line_of_the_compose_file(tmp_path: Path) -> None:
    command = [each.replace("/signing/", f"{tmp_path}/") for each in SERVICES["signing-key"]["command"]]
    made = tmp_path / PurePosixPath(OURS["api"]["environment"]["SPARD_SIGNING_KEY"]).name
    subprocess.run(command, check=True)
    first = made.read_bytes()
    subprocess.run(command, check=True)
    assert made.read_bytes() == first
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    assert isinstance(load_pem_private_key(first, None), Ed25519PrivateKey)


def test_the_autoscaler_s_query_runs_on_the_schema(postgres_url: str) -> None:
    scaled = next(each for each in OBJECTS if each["kind"] == "ScaledObject")
    engine = make_engine(postgres_url)
    with engine.connect() as connection:
        assert connection.execute(text(scaled["spec"]["triggers"][0]["metadata"]["query"])).scalar() == 0
    engine.dispose()
