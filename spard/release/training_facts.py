"""Facts for the documents of an exported model: from its manifest, in words, and from its provider.

It imports only the standard library and the manifest's records.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from spard.release.records import ComputeRecord, optional

_KWH = 3.6e6  # joules
_THIRD = 1 / 3
_GENERAL, _SYSTEMIC = 1e23, 1e25  # operations from which a model counts as general-purpose, and as of systemic risk


@dataclass(frozen=True, slots=True)
class ManifestFacts:
    """The facts of a manifest that a model's papers repeat; a fact that the manifest lacks is None or empty.

    base_digest  digest of the base model, as `kind:hex`
    audit        the figures of each suite, by who answered: `base`, `adapter`
    files        SHA-256 of each file by its path
    suites       SHA-256 of each suite by its name
    """

    base_name: str | None
    base_revision: str | None
    base_digest: str | None
    base_license: str | None
    merged_from: object
    job_id: str | None
    seed: int | None
    lora_rank: int | None
    defense: str | None
    is_preference_tuned: bool
    resolved: Mapping[str, object]
    steps: int | None
    trained_tokens: int | None
    compute: ComputeRecord | None
    decision: Literal["pass", "fail", "inconclusive", "waived"] | None
    reasons: tuple[str, ...]
    thresholds: Mapping[str, object]
    audit: Mapping[str, Sequence[Mapping[str, object]]]
    code: Mapping[str, str]
    data_sha256: Mapping[str, str]
    files: Mapping[str, str]
    suites: Mapping[str, str]
    safety_sha256: str | None

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, object]) -> ManifestFacts:
        """Read the facts of a manifest of any version."""
        raw: Any = manifest  # a manifest was checked when it was verified; its shape differs between versions
        source, recipe, gate = (raw.get(name) or {} for name in ("base_source", "recipe", "gate"))
        suites = (raw.get("provenance") or {}).get("suites") or ()
        return cls(
            base_name=source.get("name") or raw.get("base_model"),
            base_revision=source.get("revision"),
            base_digest=source.get("digest") or raw.get("base_digest"),
            base_license=raw.get("base_license"),
            merged_from=raw.get("merged_from"),
            job_id=raw.get("job_id"),
            seed=recipe.get("seed"),
            lora_rank=recipe["lora"]["rank"] if recipe.get("lora") else None,
            defense=(recipe.get("defense") or {}).get("type"),
            is_preference_tuned=bool(recipe.get("dpo")),
            resolved=raw.get("resolved") or {},
            steps=raw.get("steps"),
            trained_tokens=raw.get("trained_tokens"),
            compute=optional(ComputeRecord, raw.get("compute")),
            decision=gate.get("decision"),
            reasons=tuple(gate.get("reasons", ())),
            thresholds=raw.get("thresholds") or {},
            audit=raw.get("audit") or {},
            code=raw.get("code") or {},
            data_sha256=raw.get("data_sha256") or {},
            files={path: facts["sha256"] for path, facts in (raw.get("files") or {}).items()},
            suites={each["name"]: each["sha256"] for each in suites if each.get("sha256")},
            safety_sha256=raw.get("safety_sha256"),
        )


def method_sentence(facts: ManifestFacts) -> str:
    """Return a sentence on the training method: the kind of rows, the trained weights and the defense."""
    learned = "Supervised fine-tuning on answers"
    if facts.is_preference_tuned:
        learned = "Direct preference optimization (Rafailov et al., 2023) on pairs of a preferred and another answer"
    changed = "all weights" if facts.lora_rank is None else f"a LoRA adapter of rank {facts.lora_rank}"
    is_defended = facts.defense not in (None, "none")
    guarded = f", with the defense `{facts.defense}`" if is_defended else ", without a defense"
    return f"{learned}, of {changed}{guarded}"


def operations_sentence(found: ComputeRecord | None) -> str:
    """Return a sentence on the training's floating-point operations, or on why their number is not known."""
    if found is None:
        return "not counted: the model was trained by a version that does not count them"
    if found.operations is None:
        return "not counted as a whole: the training began under a version that does not count them"
    tokens = f"{found.forward_tokens} padded tokens forward and {found.backward_tokens} backward"
    return f"{found.operations:.4e} floating-point operations over {tokens}, {found.formula}"


def energy_sentence(found: ComputeRecord | None) -> str:
    """Return a sentence on the energy of the training, or on why it is not known."""
    if found is None:
        return "not measured: the model was trained by a version that does not measure it"
    missing = "; ".join(found.energy_missing)
    if found.joules is None:
        return f"not measured: {missing or 'the run keeps no figures that differ between equal runs'}"
    devices = ", ".join(f"{name} {joules:.1f} J" for name, joules in sorted(found.energy_j.items()))
    lacking = f"; not measured: {missing}" if missing else ""
    return f"{found.joules / _KWH:.6f} kWh ({devices}), of whole devices{lacking}"


def kilowatt_hours(found: ComputeRecord | None) -> float | None:
    """Return the energy in kWh; None if it was not measured."""
    return found.joules / _KWH if found is not None and found.joules is not None else None


def one_third_sentence(found: ComputeRecord | None, base_operations: float | None) -> str:
    """Return the result of the one-third test of the European Commission's guidelines, with the test's inputs.

    European Commission, Guidelines on the scope of the obligations for general-purpose AI models under Regulation (EU)
    2024/1689, 18 July 2025: whoever modifies a model becomes the provider of the modified model if the modification
    takes more than a third of the training compute of the original. If the latter is unavailable, 1e23 operations
    take its place, or 1e25 for a model with systemic risk.
    """
    own = found.operations if found is not None else None
    ours = "not known" if own is None else f"{own:.4e}"
    base = "not stated" if base_operations is None else f"{base_operations:.4e}"
    inputs = f"operations of this modification {ours}, of the original model's training {base}"
    if own is None:
        return f"not known ({inputs})"
    if base_operations is None:
        limits = ", ".join(f"{_side(own, each)} of {each:.0e} ({kind})" for kind, each in _SUBSTITUTES.items())
        return f"not known ({inputs}; where the original's is unavailable the guidelines substitute: {limits})"
    return f"{_side(own, base_operations)} of the original's ({inputs}; share {own / base_operations:.3e})"


_SUBSTITUTES = {"a general-purpose model": _GENERAL, "one with systemic risk": _SYSTEMIC}


def _side(own: float, original: float) -> str:
    return "above a third" if own > original * _THIRD else "not above a third"


def export_time() -> datetime:
    """Return the time to write into documents: now, or `SOURCE_DATE_EPOCH`, which makes equal exports equal bytes.

    See https://reproducible-builds.org/specs/source-date-epoch/.
    """
    fixed = os.environ.get("SOURCE_DATE_EPOCH")
    return datetime.fromtimestamp(int(fixed), UTC) if fixed else datetime.now(UTC).replace(microsecond=0)


@dataclass(frozen=True, slots=True)
class ProviderFacts:
    """Facts that only the provider knows, because no manifest has them; None appears in documents as not stated.

    author           who makes the documents: a person or an organization
    supplier         who gives the model to others; None: the author
    license          of the trained model, an SPDX expression or a name
    base_license     of the base model; None: the one that its model card names
    data_supplier    who brought the training rows
    data_license     of the training rows, and of the rows that validated them
    pool_license     of the safety pool
    base_operations  floating-point operations of the base model's own training, as its provider states them
    written_at       the time of the documents
    """

    author: str | None = None
    supplier: str | None = None
    license: str | None = None
    base_license: str | None = None
    data_supplier: str | None = None
    data_license: str | None = None
    pool_license: str | None = None
    base_operations: float | None = None
    written_at: datetime = field(default_factory=export_time)

    @property
    def supplier_name(self) -> str | None:
        """The supplier, or the author if no supplier is named."""
        return self.supplier or self.author
