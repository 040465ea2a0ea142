"""The facts of the EU AI Act's Annex XI about a model, as far as its manifest contains them.

Regulation (EU) 2024/1689, Annex XI: technical documentation of general-purpose AI models. Each point is filled in from
the manifest or explains why it is empty; facts that only the provider has are marked as such. This helps to write that
documentation; it is no legal advice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spard.models.card import audit_table
from spard.release.training_facts import (
    ManifestFacts,
    ProviderFacts,
    energy_sentence,
    method_sentence,
    one_third_sentence,
    operations_sentence,
)

_PROVIDER = "To be filled by the provider: the manifest does not know it."
_MODIFIER = "Not applicable, because this is what was done to a model that exists, and not that model's own training"


@dataclass(frozen=True, slots=True)
class Point:
    """A point of the annex: its number, the requirement, and the answer."""

    number: str
    asks: str
    answer: str


def points(manifest: Mapping[str, object], stated: ProviderFacts) -> list[Point]:
    """Return every point, in the annex's order."""
    facts = ManifestFacts.from_manifest(manifest)
    return [*_description(facts, stated), *_elements(facts, stated), *_systemic(facts)]


def document(manifest: Mapping[str, object], manifest_sha256: str, stated: ProviderFacts) -> str:
    """Return the points as Markdown, with the digest of the manifest as their source."""
    parts = [
        "# Annex XI of Regulation (EU) 2024/1689: facts about this model",
        f"Taken from the manifest with the SHA-256 `{manifest_sha256}`. No legal advice.",
    ]
    for each in points(manifest, stated):
        parts += [f"## {each.number}. {each.asks}", each.answer]
    return "\n\n".join(parts) + "\n"


def _description(facts: ManifestFacts, stated: ProviderFacts) -> list[Point]:
    pinned = f" at {facts.base_revision}" if facts.base_revision else ""
    kind = "A whole model" if facts.lora_rank is None else f"A LoRA adapter of rank {facts.lora_rank}"
    return [
        Point("1.1(a)", "Tasks and systems it is meant for", f"Text generation in conversations. {_PROVIDER}"),
        Point("1.1(b)", "Acceptable use policies", _PROVIDER),
        Point("1.1(c)", "Date of release and methods of distribution", f"The date is on the job. {_PROVIDER}"),
        Point(
            "1.1(d)",
            "Architecture and number of parameters",
            f"{kind} on `{facts.base_name}`{pinned} ({facts.base_digest}), whose architecture it has.",
        ),
        Point(
            "1.1(e)", "Modality and format of inputs and outputs", "Text in, text out, by the base model's template."
        ),
        Point("1.1(f)", "License", _license(facts, stated)),
    ]


def _license(facts: ManifestFacts, stated: ProviderFacts) -> str:
    base = stated.base_license or facts.base_license
    named = f"The base model's is {base}" if base else "The base model's is not stated"
    own = f"this model's is {stated.license}." if stated.license else f"this model's: {_PROVIDER}"
    return f"{named}, and applies to what is derived from it; {own}"


def _elements(facts: ManifestFacts, stated: ProviderFacts) -> list[Point]:
    found, tokens = facts.compute, facts.trained_tokens
    code = ", ".join(f"{name} {value}" for name, value in facts.code.items() if name != "sources")
    settings = ", ".join(f"{name} {value}" for name, value in facts.resolved.items())
    data = "; ".join(f"{name}: SHA-256 `{sha}`" for name, sha in facts.data_sha256.items())
    return [
        Point(
            "1.2(a)",
            "Technical means for integration",
            f"PEFT, transformers or vLLM, as the README says. Made with {code}.",
        ),
        Point(
            "1.2(b)",
            "Design and training process",
            f"{method_sentence(facts)}; seed {facts.seed}, {settings}. The manifest has every setting. A "
            "defense is there to keep the model from answering harmful requests after its tuning.",
        ),
        Point(
            "1.2(c)",
            "Data for training, testing and validation",
            f"{data}. {tokens} tokens were trained on. Audit prompts that stand in these files end a job before it "
            "trains. Type, provenance and curation: to be filled by whoever brought the files.",
        ),
        Point(
            "1.2(d)",
            "Computational resources",
            f"{_MODIFIER}. Of the tuning: {facts.steps} steps on {tokens} tokens; operations "
            f"{operations_sentence(found)}.\n\nThe one-third test of the Commission's guidelines (18 July 2025): "
            f"{one_third_sentence(found, stated.base_operations)}.",
        ),
        Point("1.2(e)", "Energy consumption", f"{_MODIFIER}. Of the tuning: {energy_sentence(found)}."),
    ]


def _systemic(facts: ManifestFacts) -> list[Point]:
    bounds = ", ".join(f"{name} {value}" for name, value in facts.thresholds.items())
    return [
        Point(
            "2.1",
            "Evaluation strategies and results",
            f"Decision of the gate: {facts.decision}, under {bounds}.\n\n{audit_table(facts.audit)}",
        ),
        Point(
            "2.2",
            "Adversarial testing",
            "The harmful suites above, and mined ones: harmful prompts behind triggers that were mined from the "
            "training rows. No people attacked the model by hand.",
        ),
        Point("2.3", "System architecture", "Not applicable, because this is one model and no system of several."),
    ]
