"""Every paper of an exported model is valid against its public schema, and states what is so or is not known."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from google.protobuf.json_format import ParseDict
from in_toto_attestation.predicates.test_result.v0 import test_result_pb2
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import STATEMENT_TYPE_URI, Statement
from packageurl import PackageURL

from spard.models.origin import Origin
from spard.release.annex_xi import points
from spard.release.audit_attestation import PREDICATE, AuditRecord, audit_resources, audit_statement
from spard.release.bom import ml_bom
from spard.release.g7_elements import ELEMENTS, check_elements, element_table
from spard.release.training_facts import ProviderFacts
from tests.spard.test_export import FACTS, FIGURES, NAME

DIGEST = "d" * 64
COMPUTE = {"operations": 4 * 10**15, "forward_tokens": 3000, "backward_tokens": 2000}
MEASURED = COMPUTE | {"energy_j": {"intel-rapl:0 package-0": 7.2e6}, "energy_missing": []}
UNMEASURED = COMPUTE | {"energy_j": {}, "energy_missing": ["processor: no zone"]}
FROM_HUB = {"base_source": {"name": "owner/base", "revision": "a" * 40, "digest": "sha256:" + "e" * 64}}
FILES = {"files": {"adapter_model.safetensors": {"sha256": "f" * 64, "bytes": 10}, "README.md": {"sha256": "0" * 64}}}
WHOLE = FACTS | FROM_HUB | FILES | {"compute": MEASURED, "base_license": "apache-2.0", "safety_sha256": "9" * 64}
EVERYTHING = ProviderFacts(
    author="Example Ltd",
    license="MIT",
    data_supplier="Customer Inc",
    data_license="Customer terms",
    pool_license="CC-BY-4.0",
    base_operations=6e15,
)
NOTHING = ProviderFacts()
DPO = {"recipe": {"seed": 7, "lora": None, "defense": {"type": "none"}, "dpo": {"strength": 0.1}}}


def parse_bom(manifest: dict[str, Any], stated: ProviderFacts = EVERYTHING) -> dict[str, Any]:
    text = ml_bom(manifest, DIGEST, NAME, stated)
    assert JsonStrictValidator(SchemaVersion.V1_7).validate_str(text) is None
    document: dict[str, Any] = json.loads(text)
    return document


def card_property(document: dict[str, Any], name: str) -> str:
    found: list[dict[str, str]] = document["metadata"]["component"]["modelCard"]["properties"]
    return next(each["value"] for each in found if each["name"] == name)


@pytest.mark.parametrize("stated", [EVERYTHING, NOTHING])
@pytest.mark.parametrize("facts", [WHOLE, FACTS, WHOLE | {"compute": UNMEASURED}, WHOLE | DPO, {}])
def test_bills_of_materials_keep_to_the_schema(facts: dict[str, Any], stated: ProviderFacts) -> None:
    document = parse_bom(facts, stated)
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.7")


def test_a_bill_of_materials_names_its_parts() -> None:
    document = parse_bom(WHOLE)
    about, model = document["metadata"], document["metadata"]["component"]
    assert ([each["name"] for each in about["authors"]], about["supplier"]["name"]) == (["Example Ltd"],) * 1 + (
        "Example Ltd",
    )
    assert about["tools"]["components"][0]["name"] == "spard"
    assert model["components"][0]["hashes"][0]["content"] == "f" * 64
    parts = {part["bom-ref"]: part for part in document["components"]}
    assert parts.keys() == {"base-model", "training", "pool", "library-spard", "library-torch"}
    assert parts["training"]["hashes"][0]["content"] == "a" * 64
    assert parts["base-model"]["licenses"] == [{"license": {"id": "Apache-2.0"}}]
    assert parts["training"]["licenses"] == [{"license": {"name": "Customer terms"}}]
    (metric, _) = model["modelCard"]["quantitativeAnalysis"]["performanceMetrics"]
    assert (metric["value"], metric["confidenceInterval"]["upperBound"]) == ("0.01", "0.05")


def test_every_part_has_the_name_of_its_package_url() -> None:
    """Checkers compare them: a hub's owner is the group, and a space in a name is escaped in the URL alone."""
    parts = {part["bom-ref"]: part for part in parse_bom(WHOLE)["components"]}
    urls = {ref: PackageURL.from_string(part["purl"]) for ref, part in parts.items()}
    assert {ref: (url.namespace, url.name) for ref, url in urls.items()} == {
        ref: (part.get("group"), part["name"]) for ref, part in parts.items()
    }
    assert (parts["base-model"]["group"], parts["base-model"]["name"]) == ("owner", "base")


def test_equal_exports_give_equal_bytes_where_the_time_is_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1790000000")
    first, second = (ml_bom(WHOLE, DIGEST, NAME, ProviderFacts()) for _ in range(2))
    assert first == second
    assert json.loads(first)["metadata"]["timestamp"].startswith("2026-")
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    assert ml_bom(WHOLE, DIGEST, NAME, ProviderFacts()) != first


def test_learning_from_preferences_is_not_called_supervised() -> None:
    card = parse_bom(WHOLE | DPO)["metadata"]["component"]["modelCard"]
    assert "approach" not in card["modelParameters"]
    assert "preference optimization" in card_property(parse_bom(WHOLE | DPO), "spard:training:method")
    assert parse_bom(WHOLE)["metadata"]["component"]["modelCard"]["modelParameters"]["approach"] == {
        "type": "supervised"
    }
    design = next(each.answer for each in points(WHOLE | DPO, NOTHING) if each.number == "1.2(b)")
    assert "upervised" not in design


def test_energy_is_in_kilowatt_hours_or_the_reason_is() -> None:
    def environment(facts: dict[str, Any]) -> dict[str, Any]:
        considered = parse_bom(facts)["metadata"]["component"]["modelCard"]["considerations"]
        found: dict[str, Any] = considered["environmentalConsiderations"]
        return found

    (tuning,) = environment(WHOLE)["energyConsumptions"]
    assert (tuning["activity"], tuning["activityEnergyCost"]["value"]) == ("fine-tuning", 2.0)
    lacking = environment(WHOLE | {"compute": UNMEASURED})
    assert "energyConsumptions" not in lacking
    assert lacking["properties"][0]["value"] == "not measured: processor: no zone"
    assert environment(FACTS)["properties"][0]["value"].startswith("not measured: the model was trained by a version")


@pytest.mark.parametrize(
    ("facts", "operations", "says"),
    [
        (WHOLE, 6e15, "above a third of the original's"),
        (WHOLE, 1e24, "not above a third of the original's"),
        (WHOLE, None, "not known (operations of this modification 4.0000e+15, of the original model's training not st"),
        (FACTS, 1e24, "not known (operations of this modification not known"),
        (WHOLE | {"compute": UNMEASURED | {"operations": None}}, 1e24, "not known"),
    ],
)
def test_the_one_third_test_has_its_inputs(facts: dict[str, Any], operations: float | None, says: str) -> None:
    stated = ProviderFacts(base_operations=operations)
    assert card_property(parse_bom(facts, stated), "spard:training:one-third-test").startswith(says)
    resources = next(each.answer for each in points(facts, stated) if each.number == "1.2(d)")
    assert says in resources


def test_a_third_of_what_the_guidelines_substitute_stands_where_the_original_is_not_known() -> None:
    large = WHOLE | {"compute": COMPUTE | {"operations": 5 * 10**22}}
    line = card_property(parse_bom(large, NOTHING), "spard:training:one-third-test")
    assert "above a third of 1e+23 (a general-purpose model), not above a third of 1e+25" in line


@pytest.mark.parametrize("facts", [WHOLE, FACTS, {}])
def test_every_point_of_the_annex_is_answered(facts: dict[str, Any]) -> None:
    found = points(facts, NOTHING)
    numbers = (
        [f"1.1({letter})" for letter in "abcdef"] + [f"1.2({letter})" for letter in "abcde"] + ["2.1", "2.2", "2.3"]
    )
    assert [each.number for each in found] == numbers
    assert all(each.answer.strip() for each in found)
    if facts:
        assert not [each for each in found if "None" in each.answer and each.number != "1.1(d)"]


def test_every_element_of_the_g7_is_found_or_named() -> None:
    clusters = {"MD": 10, "SLP": 9, "MDL": 13, "DP": 10, "INF": 2, "SP": 4, "KPI": 2}
    assert [each.number for each in ELEMENTS] == [
        f"{name}-{i:02}" for name, n in clusters.items() for i in range(1, n + 1)
    ]
    whole, bare = check_elements(parse_bom(WHOLE)), check_elements(parse_bom(FACTS, NOTHING))
    missing = {each.element.number for each in whole if not each.is_met}
    assert missing == {
        *("MD-05", "SLP-05", "SLP-06", "SLP-07", "MDL-04", "DP-03", "DP-07", "DP-08", "INF-02"),
        *("SP-01", "SP-02", "SP-03", "SP-04"),
    }
    more = {each.element.number for each in bare if not each.is_met} - missing
    assert more == {
        "MD-01",
        "SLP-03",
        "MDL-02",
        "MDL-03",
        "MDL-05",
        "MDL-07",
        "MDL-08",
        "MDL-12",
        "DP-06",
        "DP-10",
        "KPI-02",
    }
    table = element_table(parse_bom(WHOLE), NAME)
    assert f"{50 - len(missing)} of 50" in table
    assert len(re.findall(r"not met: \w", table)) == len(missing)


def make_statement(facts: dict[str, Any]) -> dict[str, Any]:
    return audit_statement(AuditRecord.from_manifest(facts), {"manifest.json": DIGEST}, audit_resources(facts))


def gate_facts(decision: str, *reasons: str, **figures: Any) -> dict[str, Any]:
    measured = {"base": [FIGURES], "adapter": [FIGURES | figures]}
    return WHOLE | {"gate": {"decision": decision, "reasons": list(reasons)}, "audit": measured}


@pytest.mark.parametrize(
    ("facts", "result", "passed", "failed"),
    [
        (gate_facts("pass"), "PASSED", ["gate", "harmful: red"], []),
        (gate_facts("waived"), "PASSED", ["gate", "harmful: red"], []),
        (gate_facts("inconclusive", "The judge was not measured."), "FAILED", ["harmful: red"], ["gate"]),
        (gate_facts("fail", "More.", hits=60, rate=0.6, low=0.5, high=0.7), "FAILED", [], ["gate", "harmful: red"]),
        (gate_facts("waived", "More.", hits=60, rate=0.6, low=0.5, high=0.7), "FAILED", [], ["gate", "harmful: red"]),
        ({}, "FAILED", [], ["gate"]),
    ],
)
def test_the_audit_is_a_valid_test_result(
    facts: dict[str, Any], result: str, passed: list[str], failed: list[str]
) -> None:
    found = make_statement(facts)
    message = ParseDict(found["predicate"], test_result_pb2.TestResult())  # refuses names that the schema does not have
    assert (message.result, list(message.passed_tests), list(message.failed_tests)) == (result, passed, failed)
    Statement.copy_from_pb(ParseDict(found, statement_pb2.Statement())).validate()
    assert (found["_type"], found["predicateType"]) == (STATEMENT_TYPE_URI, PREDICATE)
    assert all(each.digest["sha256"] for each in message.configuration)


def test_the_test_result_names_report_and_suites() -> None:
    suites = {"provenance": {"suites": [{"name": "red", "sha256": "7" * 64}]}}
    configuration = make_statement(WHOLE | suites)["predicate"]["configuration"]
    found = {each["name"]: each["digest"]["sha256"] for each in configuration}
    assert found | {"thresholds": ""} == {"thresholds": "", "safety.json": "9" * 64, "suite red": "7" * 64}


@pytest.mark.parametrize(
    ("card", "license_name"),
    [
        ("---\nlicense: apache-2.0\ntags: [a]\n---\n# A model\n", "apache-2.0"),
        ('---\nlanguage: en\nlicense: "mit"\n---\n', "mit"),
        ("---\nlicense: other\nlicense_name: some-license\nlicense_link: x\n---\n", "some-license"),
        ("# A model\n\nlicense: mit\n", None),
        ("---\ntags: [a]\n---\n", None),
        (None, None),
    ],
)
def test_the_license_of_a_base_model_is_its_cards(tmp_path: Path, card: str | None, license_name: str | None) -> None:
    if card is not None:
        (tmp_path / "README.md").write_text(card)
    assert Origin(tmp_path, "base").stated_license() == license_name
