"""A model's bill of materials in CycloneDX 1.7: its components and measurements, from its manifest alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from cyclonedx import spdx
from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, Property, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.contact import OrganizationalContact, OrganizationalEntity
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.model.lifecycle import LifecyclePhase, PredefinedLifecycle
from cyclonedx.output.json import JsonV1Dot7
from packageurl import PackageURL

from spard.config.quantization import plain_digest
from spard.release.training_facts import (
    ManifestFacts,
    ProviderFacts,
    energy_sentence,
    kilowatt_hours,
    method_sentence,
    one_third_sentence,
    operations_sentence,
)
from spard.release.version import package_version

_LIBRARIES = {  # the packages that compute: who supplies them, and under which license
    "spard": ("The SPARD authors", "Apache-2.0"),
    "torch": ("PyTorch Foundation", "BSD-3-Clause"),
    "transformers": ("Hugging Face", "Apache-2.0"),
    "peft": ("Hugging Face", "Apache-2.0"),
    "safetensors": ("Hugging Face", "Apache-2.0"),
}
_DATA = {  # kinds of data: what they are called, and what they are for
    "training": ("training file", "Rows that the model was tuned on."),
    "validation": ("validation file", "Rows that the loss was measured on, and that were not trained on."),
    "pool": ("safety pool", "Prompts with safe answers, of which the defense chose rows to train with."),
}


def ml_bom(manifest: Mapping[str, object], manifest_sha256: str, name: str, stated: ProviderFacts) -> str:
    """Return the document as JSON text; `name` is the model's name. Equal manifests give equal bytes."""
    facts = ManifestFacts.from_manifest(manifest)
    model = _model(facts, manifest_sha256, name, stated)
    bom = Bom(serial_number=uuid5(NAMESPACE_URL, f"sha256:{manifest_sha256}"))
    about = bom.metadata
    about.timestamp, about.component = stated.written_at, model
    about.tools.components.add(_library("spard", package_version("spard")))
    about.lifecycles.add(PredefinedLifecycle(LifecyclePhase.POST_BUILD))
    about.supplier = _entity(stated.supplier_name)
    if stated.author:
        about.authors.add(OrganizationalContact(name=stated.author))
    parts = list(_parts(facts, stated))
    bom.components.update(parts)
    bom.register_dependency(model, parts)
    document: dict[str, Any] = json.loads(JsonV1Dot7(bom).output_as_string())
    document["metadata"]["component"]["modelCard"] = model_card_section(facts, stated)  # no class of the library's
    document["compositions"] = [  # the libraries that compute, and not all that they need in turn
        {"aggregate": "incomplete", "assemblies": ["model"], "dependencies": ["model"]}
    ]
    return json.dumps(document, indent=2) + "\n"


def _model(facts: ManifestFacts, manifest_sha256: str, name: str, stated: ProviderFacts) -> Component:
    version = manifest_sha256[:12]
    kind = "model" if facts.lora_rank is None or facts.merged_from else "LoRA adapter"
    return Component(
        type=ComponentType.MACHINE_LEARNING_MODEL,
        name=name,
        version=version,
        description=f"A {kind} fine-tuned from {facts.base_name}, for text generation in conversations.",
        bom_ref="model",
        supplier=_entity(stated.supplier_name),
        licenses=_licenses(stated.license),
        purl=PackageURL("generic", None, name, version, {"checksum": f"sha256:{manifest_sha256}"}),
        hashes=[_sha256(manifest_sha256)],
        components=list(_weights(facts, stated)),
        external_references=[
            _reference(ExternalReferenceType.MODEL_CARD, f"{name}/README.md"),
            _reference(ExternalReferenceType.ATTESTATION, f"{name}.audit.intoto.json"),
            _reference(ExternalReferenceType.RISK_ASSESSMENT, f"{name}.annex-xi.md"),
        ],
        properties=[Property(name=f"spard:{key}", value=value) for key, value in _properties(facts)],
    )


def _weights(facts: ManifestFacts, stated: ProviderFacts) -> Iterator[Component]:
    """Yield a component for each weight file; the other files are listed in the manifest only."""
    for path, sha256 in sorted(facts.files.items()):
        if path.endswith(".safetensors"):
            yield Component(
                type=ComponentType.FILE,
                name=path,
                version=sha256[:12],
                bom_ref=f"file-{path}",
                supplier=_entity(stated.supplier_name),
                licenses=_licenses(stated.license),
                hashes=[_sha256(sha256)],
            )


def _parts(facts: ManifestFacts, stated: ProviderFacts) -> Iterator[Component]:
    yield _base_model(facts, stated)
    for key, sha256 in facts.data_sha256.items():
        yield _data(key, sha256, stated)
    for library, version in facts.code.items():
        if library in _LIBRARIES:
            yield _library(library, version)


def _data(key: str, sha256: str, stated: ProviderFacts) -> Component:
    """Return the component of a file of rows; the pool is the provider's own, other files are the customer's."""
    named, purpose = _DATA.get(key, (key, None))
    is_own = key == "pool"
    version = sha256[:12]
    return Component(
        type=ComponentType.DATA,
        name=named,
        version=version,
        description=purpose,
        bom_ref=key,
        supplier=_entity(stated.supplier_name if is_own else stated.data_supplier),
        licenses=_licenses(stated.pool_license if is_own else stated.data_license),
        purl=PackageURL("generic", None, named, version, {"checksum": f"sha256:{sha256}"}),
        hashes=[_sha256(sha256)],
    )


def _base_model(facts: ManifestFacts, stated: ProviderFacts) -> Component:
    name, revision = str(facts.base_name), facts.base_revision
    owner, _, short = name.rpartition("/")
    files = plain_digest(facts.base_digest or "")
    digest = files.removeprefix("sha256:") if files.startswith("sha256:") else None
    hub = [_reference(ExternalReferenceType.DISTRIBUTION, f"https://huggingface.co/{name}/tree/{revision}")]
    return Component(
        type=ComponentType.MACHINE_LEARNING_MODEL,
        # A hub's owner is the group: checkers compare the name with that of the package URL.
        group=(owner or None) if revision else None,
        name=short if revision else name,
        version=revision or (digest[:12] if digest else None),
        description="The model that was tuned.",
        bom_ref="base-model",
        supplier=_entity(owner or None) if revision else None,
        licenses=_licenses(stated.base_license or facts.base_license),
        purl=PackageURL("huggingface", owner or None, short, revision) if revision else None,
        hashes=[_sha256(digest)] if digest else [],
        external_references=hub if revision else [],
    )


def _library(name: str, version: str) -> Component:
    supplier, license_id = _LIBRARIES[name]
    return Component(
        type=ComponentType.LIBRARY,
        name=name,
        version=version,
        bom_ref=f"library-{name}",
        supplier=_entity(supplier),
        licenses=_licenses(license_id),
        purl=PackageURL("pypi", None, name, version),
    )


def _properties(facts: ManifestFacts) -> Iterator[tuple[str, str]]:
    named = {
        "job": facts.job_id,
        "defense": facts.defense,
        "gate": facts.decision,
        "seed": facts.seed,
        "trained_tokens": facts.trained_tokens,
        "steps": facts.steps,
        "sources": facts.code.get("sources"),
    }
    return ((key, str(value)) for key, value in named.items() if value is not None)


def _licenses(named: str | None) -> list[DisjunctiveLicense]:
    """Return a license by its SPDX id if it has one, else by its name; empty if no license is stated."""
    if not named:
        return []
    found = spdx.fixup_id(named)
    return [DisjunctiveLicense(id=found) if found else DisjunctiveLicense(name=named)]


def _entity(name: str | None) -> OrganizationalEntity | None:
    return OrganizationalEntity(name=name) if name else None


def _reference(kind: ExternalReferenceType, url: str) -> ExternalReference:
    return ExternalReference(type=kind, url=XsUri(url))


def _sha256(hexadecimal: str) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=hexadecimal)


# The model card of a CycloneDX bill of materials: method, compute, energy, limits and the audit's figures.

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
