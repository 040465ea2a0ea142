"""The model card of a CycloneDX bill of materials: method, compute, energy, limits and the audit's figures."""

from __future__ import annotations

from collections.abc import Mapping

from spard.release.provider_facts import ProviderFacts
from spard.release.training_facts import (
    ManifestFacts,
    energy_sentence,
    kilowatt_hours,
    method_sentence,
    one_third_sentence,
    operations_sentence,
)

_LIMITS = [
    "What was measured holds for the prompts that were asked, and for this model as it is.",
    "Further fine-tuning may undo what keeps the model safe.",
]
_USE = "Text generation in conversations, by the base model's chat template."


def model_card_section(facts: ManifestFacts, stated: ProviderFacts) -> dict[str, object]:
    """Return the section as JSON; operations are properties, because the schema has no field for them."""
    found = facts.compute
    metrics = [_metric(who, each) for who in ("base", "adapter") for each in facts.audit.get(who, ()) if each["n"]]
    parameters: dict[str, object] = {
        "task": "text-generation",
        "datasets": [{"ref": key} for key in facts.data_sha256],
        "inputs": [{"format": "text"}],
        "outputs": [{"format": "text"}],
    }
    if not facts.is_preference_tuned:  # learning from preferences is none of the schema's approaches
        parameters = {"approach": {"type": "supervised"}} | parameters
    properties = {
        "spard:training:method": method_sentence(facts),
        "spard:training:operations": operations_sentence(found),
        "spard:training:one-third-test": one_third_sentence(found, stated.base_operations),
    }
    if found is not None and found.operations is not None:
        properties["spard:training:floating-point-operations"] = str(found.operations)
    return {
        "modelParameters": parameters,
        "quantitativeAnalysis": {"performanceMetrics": metrics},
        "considerations": {
            "useCases": [_USE],
            "technicalLimitations": _LIMITS,
            "environmentalConsiderations": _environment(facts, stated),
        },
        "properties": _as_properties(properties),
    }


def _environment(facts: ManifestFacts, stated: ProviderFacts) -> dict[str, object]:
    """Return the energy of the fine-tuning; its source is "unknown", because a machine cannot tell it."""
    found = facts.compute
    energy, told = kilowatt_hours(found), _as_properties({"spard:training:energy": energy_sentence(found)})
    if energy is None:
        return {"properties": told}
    measured = {"value": energy, "unit": "kWh"}
    organization = {"name": stated.supplier_name or "not stated"}
    provider = {"organization": organization, "energySource": "unknown", "energyProvided": measured}
    tuning = {"activity": "fine-tuning", "energyProviders": [provider], "activityEnergyCost": measured}
    return {"energyConsumptions": [tuning], "properties": told}


def _metric(who: str, result: Mapping[str, object]) -> dict[str, object]:
    return {
        "type": f"{result['kind']} rate",
        "value": str(result["rate"]),
        "slice": f"{who}: {result['suite']} ({result['n']} replies, judge {result['judge']})",
        "confidenceInterval": {"lowerBound": str(result["low"]), "upperBound": str(result["high"])},
    }


def _as_properties(values: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in values.items()]
