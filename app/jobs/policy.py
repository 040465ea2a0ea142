"""What a key may ask of a job. A provider measures what it likes; a customer cannot weaken what guards the release."""

from __future__ import annotations

from app.errors import InvalidRequest
from app.jobs.request import JobCreate, Safety
from app.keys.service import Principal
from app.models import BaseModelEntry
from spard.config import Audit, NoDefense, Ptst, SafeLora

_FOR_CUSTOMERS = "'spard', 'safegrad', 'lisa', 'safeinstr'"
_FOR_ADMINS = NoDefense | Ptst | SafeLora  # no defence, one that the holder of the adapter drops, one that names a path


def check(caller: Principal, ask: JobCreate, model: BaseModelEntry) -> None:
    """Refuse what this key, this model or this service does not allow."""
    _check_method(ask)
    if ask.full_fine_tuning and not model.allow_full_fine_tuning:
        message = f"{model.alias} is fine-tuned with LoRA only; leave full_fine_tuning out."
        raise InvalidRequest(message, code="full_fine_tuning_not_allowed", param="full_fine_tuning")
    if ask.safety and isinstance(ask.safety.defense, SafeLora) and not ask.safety.defense.base_unaligned:
        message = "safelora needs base_unaligned: the base model as it was before alignment, a folder or a hub id."
        raise InvalidRequest(message, code="base_unaligned_missing", param="safety.defense.base_unaligned")
    if ask.integrations:
        message = "Integrations are not offered here; leave them out."
        raise InvalidRequest(message, code="integrations_not_supported", param="integrations")
    if "admin" not in caller.scopes:
        _check_customer(ask.safety or Safety())


def is_waived(caller: Principal, safety: Safety) -> bool:
    """Whether the job is a provider's measurement, whose adapter leaves to the provider whatever the gate says."""
    return isinstance(safety.defense, NoDefense) and "admin" in caller.scopes


def _check_method(ask: JobCreate) -> None:
    if ask.method is None:
        return
    if ask.method.type != "supervised" or ask.method.dpo or ask.method.reinforcement:
        kind = ask.method.type if ask.method.type != "supervised" else "dpo or reinforcement"
        message = f"The method {kind} is not trained here; allowed: supervised."
        raise InvalidRequest(message, code="method_not_supported", param="method.type")


def _check_customer(safety: Safety) -> None:
    if isinstance(safety.defense, _FOR_ADMINS):
        message = f"The defence {safety.defense.type!r} needs a key with the admin scope; allowed: {_FOR_CUSTOMERS}."
        raise InvalidRequest(message, code="defense_not_allowed", param="safety.defense.type")
    least, asked = Audit(), safety.audit
    if asked.suites is not None:
        message = "Which suites are measured is the provider's choice; leave audit.suites out."
        raise InvalidRequest(message, code="audit_not_allowed", param="safety.audit.suites")
    for name in ("max_prompts", "max_new_tokens"):
        if getattr(asked, name) < getattr(least, name):
            message = f"{name} must be at least {getattr(least, name)} here."
            raise InvalidRequest(message, code="audit_not_allowed", param=f"safety.audit.{name}")
