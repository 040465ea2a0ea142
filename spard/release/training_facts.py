"""Describe a model's training, operations and energy in words, from its manifest; only the standard library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spard.release.compute_record import ComputeRecord
from spard.release.records import optional

_KWH = 3.6e6  # joules
_THIRD = 1 / 3
_GENERAL, _SYSTEMIC = 1e23, 1e25  # operations from which a model counts as general-purpose, and as of systemic risk


def compute_record(manifest: Mapping[str, Any]) -> ComputeRecord | None:
    """Return the manifest's record of the training's operations and energy; None in manifests of earlier versions."""
    return optional(ComputeRecord, manifest.get("compute"))


def is_preference_tuned(manifest: Mapping[str, Any]) -> bool:
    """Return True if the model was trained on preference pairs, which is not supervised learning."""
    return bool((manifest.get("recipe") or {}).get("dpo"))


def method_sentence(manifest: Mapping[str, Any]) -> str:
    """Return a sentence on the training method: the kind of rows, the trained weights and the defense."""
    recipe = manifest.get("recipe") or {}
    learned = "Supervised fine-tuning on answers"
    if is_preference_tuned(manifest):
        learned = "Direct preference optimization (Rafailov et al., 2023) on pairs of a preferred and another answer"
    lora = recipe.get("lora")
    changed = f"a LoRA adapter of rank {lora['rank']}" if lora else "all weights"
    defense = (recipe.get("defense") or {}).get("type")
    guarded = f", with the defense `{defense}`" if defense not in (None, "none") else ", without a defense"
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
