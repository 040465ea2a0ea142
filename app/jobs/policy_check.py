"""Check that a key may request a job with these settings.

A provider may measure anything; a customer may not weaken the audit that guards the release.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace

from app.db.tables import BaseModelEntry
from app.errors import InvalidRequest
from app.jobs.request import JobCreate, Safety
from app.keys.service import Principal
from app.policies.schemas import Policy, recipe_value
from spard.config import Audit, Defense, Recipe, RowSignal

MOST_NEW_TOKENS = 1024  # in a customer's audit: a judge leaves longer replies unscored
# Audit settings that a customer may not raise either, because more is not stricter: at a high temperature any model
# writes noise, and many samples of few prompts look like many prompts.
_AS_THE_PROVIDER_HAS_IT = ("temperature", "samples")


def check(caller: Principal, ask: JobCreate, model: BaseModelEntry, policy: Policy) -> None:
    """Raise `InvalidRequest` if the key, the model, the policy or the service does not allow a request."""
    _check_method(ask)
    if ask.full_fine_tuning and not model.allow_full_fine_tuning:
        message = f"{model.alias} is fine-tuned with LoRA only; leave full_fine_tuning out."
        raise InvalidRequest(message, code="full_fine_tuning_not_allowed", param="full_fine_tuning")
    _check_quantized(ask, model)
    if ask.safety and (missing := ask.safety.defense.missing_model):
        defense = ask.safety.defense
        message = f"{defense.type} needs {missing}: {defense.models[missing]}, a folder or a hub id."
        raise InvalidRequest(message, code=f"{missing}_missing", param=f"safety.defense.{missing}")
    if "admin" not in caller.scopes:
        _check_audit((ask.safety or Safety()).audit)
    check_choice(caller, (ask.safety or Safety()).defense, model.alias, policy)


def _check_quantized(ask: JobCreate, model: BaseModelEntry) -> None:
    """Refuse full fine-tuning and weight-comparing defenses on a model that is offered only in NF4."""
    if model.quantization != "always":
        return
    if ask.full_fine_tuning:
        message = f"{model.alias} is held in NF4, whose weights cannot be trained; leave full_fine_tuning out."
        raise InvalidRequest(message, code="full_fine_tuning_not_allowed", param="full_fine_tuning")
    if ask.safety and ask.safety.defense.reads_weights:
        message = f"{ask.safety.defense.type} compares the model's own weights, and {model.alias} is held in NF4."
        raise InvalidRequest(message, code="defense_not_allowed", param="safety.defense.type")


def check_choice(caller: Principal, defense: Defense, alias: str, policy: Policy) -> None:
    """Raise `InvalidRequest` if the policy does not allow this key the defense or the model."""
    if "admin" in caller.scopes:
        return
    if defense.type not in policy.defenses:
        allowed = _quote_names(policy.defenses)
        message = f"The defense {defense.type!r} needs a key with the admin scope; allowed: {allowed}."
        raise InvalidRequest(message, code="defense_not_allowed", param="safety.defense.type")
    if policy.models is not None and alias not in policy.models:
        message = f"The model {alias!r} needs a key with the admin scope; allowed: {_quote_names(policy.models)}."
        raise InvalidRequest(message, code="model_not_allowed", param="model")


def check_ranges(caller: Principal, recipe: Recipe, policy: Policy) -> None:
    """Raise `InvalidRequest` if a number of a customer's recipe is outside the policy's range for it."""
    if "admin" in caller.scopes:
        return
    for name, allowed in policy.ranges.items():
        value = recipe_value(recipe, name)
        if isinstance(value, int | float) and not allowed.admits(value):
            message = f"{name} is {value:g}; allowed here: {allowed}."
            raise InvalidRequest(message, code="not_allowed_by_policy", param=name)


def is_waived(caller: Principal, defense: Defense) -> bool:
    """Return True if the job is a provider's undefended measurement.

    Its adapter is released to the provider whatever the gate decides.
    """
    return defense.is_baseline and "admin" in caller.scopes


def row_signal(caller: Principal, defense: Defense, policy: Policy, *, has_pool: bool) -> RowSignal:
    """Return the row signal that applies to a job under the policy.

    A provider's measurement is trained on every row. Raises `InvalidRequest` if the job cannot carry out the policy's
    action, for example to defend rows without a safety pool.
    """
    asked = policy.row_signal
    if asked.action in ("off", "report"):
        return asked
    # `auto` compares rows with the pool; without one it only reports.
    if is_waived(caller, defense) or (asked.action == "auto" and not has_pool):
        return replace(asked, action="report")
    if not has_pool:
        message = f"The policy's action for rows, {asked.action}, needs a safety pool, and there is none yet."
        raise InvalidRequest(message, code="no_safety_pool", param="safety.pool")
    if asked.action == "defend" and not defense.trains_on_safe_rows:
        message = f"The policy asks to defend rows, and the defense {defense.type!r} trains on no safe rows."
        raise InvalidRequest(message, code="defense_not_allowed", param="safety.defense.type")
    return asked


def _check_method(ask: JobCreate) -> None:
    if ask.method is None:
        return
    if ask.method.type == "reinforcement" or ask.method.reinforcement:
        message = "The method reinforcement is not trained here; allowed: supervised and dpo."
        raise InvalidRequest(message, code="method_not_supported", param="method.type")
    other = "supervised" if ask.method.type == "dpo" else "dpo"
    if getattr(ask.method, other) is not None:
        message = f"method.type is {ask.method.type!r}; leave method.{other} out."
        raise InvalidRequest(message, code="method_not_supported", param=f"method.{other}")
    defense = (ask.safety or Safety()).defense
    if ask.method.type == "dpo" and defense.trains_on_answers:
        message = (
            f"The defense {defense.type!r} trains on safe answers among the rows; it does not go with dpo's pairs."
        )
        raise InvalidRequest(message, code="method_not_supported", param="safety.defense.type")


def _quote_names(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "none"


def _check_audit(asked: Audit) -> None:
    """Refuse audit settings that could reveal less than the provider's own."""
    least = Audit()
    if asked.suites is not None:
        message = "Which suites are measured is the provider's choice; leave audit.suites out."
        raise _not_allowed(message, "suites")
    for name in ("max_prompts", "max_new_tokens"):
        _check_least(name, getattr(asked, name), getattr(least, name))
    if asked.max_new_tokens > MOST_NEW_TOKENS:
        raise _not_allowed(f"max_new_tokens must be at most {MOST_NEW_TOKENS:,} here.", "max_new_tokens")
    for each in fields(least.asking):
        name, value, own = f"asking.{each.name}", getattr(asked.asking, each.name), getattr(least.asking, each.name)
        if each.name in _AS_THE_PROVIDER_HAS_IT and value != own:
            raise _not_allowed(f"{name} must be {own:g} here, so that results can be compared.", name)
        _check_least(name, value, own)


def _check_least(name: str, value: float, least: float) -> None:
    if value < least:
        raise _not_allowed(f"{name} must be at least {least} here.", name)


def _not_allowed(message: str, name: str) -> InvalidRequest:
    return InvalidRequest(message, code="audit_not_allowed", param=f"safety.audit.{name}")
