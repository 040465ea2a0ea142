"""A model's bill of materials in CycloneDX 1.6: its components and measurements, from its manifest alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6

from spard.config.quantization import plain_digest

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)  # fixed, so equal manifests give equal bytes
_LIBRARIES = ("spard", "torch", "transformers", "peft", "safetensors")
_DATA = {"training": "training file", "validation": "validation file", "pool": "safety pool"}


def ml_bom(manifest: Mapping[str, Any], manifest_sha256: str, name: str) -> str:
    """Return the document as JSON text; `name` is the model's name. Equal manifests give equal bytes."""
    model = Component(
        type=ComponentType.MACHINE_LEARNING_MODEL,
        name=name,
        version=manifest_sha256[:12],
        bom_ref="model",
        hashes=[_sha256(manifest_sha256)],
        properties=[Property(name=f"spard:{key}", value=value) for key, value in _properties(manifest)],
    )
    bom = Bom(serial_number=uuid5(NAMESPACE_URL, f"sha256:{manifest_sha256}"))
    bom.metadata.timestamp = _EPOCH
    bom.metadata.component = model
    parts = list(_parts(manifest))
    bom.components.update(parts)
    bom.register_dependency(model, parts)
    document: dict[str, Any] = json.loads(JsonV1Dot6(bom).output_as_string())
    document["metadata"]["component"]["modelCard"] = _card(manifest)  # the library has no class for model cards yet
    return json.dumps(document, indent=2) + "\n"


def _parts(manifest: Mapping[str, Any]) -> Iterator[Component]:
    source = manifest.get("base_source") or {}
    # A component's hash must be the SHA-256 of files; a digest with a quantization suffix is none.
    files = plain_digest(str(source.get("digest") or manifest.get("base_digest") or ""))
    yield Component(
        type=ComponentType.MACHINE_LEARNING_MODEL,
        name=str(source.get("name") or manifest.get("base_model")),
        version=source.get("revision"),
        bom_ref="base-model",
        hashes=[_sha256(files.removeprefix("sha256:"))] if files.startswith("sha256:") else [],
    )
    for key, sha256 in (manifest.get("data_sha256") or {}).items():
        yield Component(type=ComponentType.DATA, name=_DATA.get(key, key), bom_ref=key, hashes=[_sha256(sha256)])
    for library, version in (manifest.get("code") or {}).items():
        if library in _LIBRARIES:
            yield Component(type=ComponentType.LIBRARY, name=library, version=version, bom_ref=f"library-{library}")


def _properties(manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    recipe = manifest.get("recipe") or {}
    facts = {
        "job": manifest.get("job_id"),
        "defense": (recipe.get("defense") or {}).get("type"),
        "gate": (manifest.get("gate") or {}).get("decision"),
        "seed": recipe.get("seed"),
        "trained_tokens": manifest.get("trained_tokens"),
        "steps": manifest.get("steps"),
        "sources": (manifest.get("code") or {}).get("sources"),
    }
    return ((key, str(value)) for key, value in facts.items() if value is not None)


def _card(manifest: Mapping[str, Any]) -> dict[str, Any]:
    audit = manifest.get("audit") or {}
    metrics = [_metric(who, each) for who in ("base", "adapter") for each in audit.get(who, ()) if each["n"]]
    data = [{"ref": key} for key in manifest.get("data_sha256") or {}]
    parameters = {"approach": {"type": "supervised"}, "task": "text-generation", "datasets": data}
    return {"modelParameters": parameters, "quantitativeAnalysis": {"performanceMetrics": metrics}}


def _metric(who: str, result: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": f"{result['kind']} rate",
        "value": str(result["rate"]),
        "slice": f"{who}: {result['suite']} ({result['n']} replies, judge {result['judge']})",
        "confidenceInterval": {"lowerBound": str(result["low"]), "upperBound": str(result["high"])},
    }


def _sha256(hexadecimal: str) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=hexadecimal)
