"""The checks of a request for a job, in their order; creation, estimates and clones all go through `CHECKS`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, fields

from sqlalchemy.orm import Session

from app.catalog import fitness
from app.catalog import service as catalog
from app.catalog.checklist import job_warnings
from app.catalog.profile import benign_warnings
from app.db.tables import BaseModelEntry, File
from app.db.tables.files import FINE_TUNE, PREFERENCE
from app.errors import InvalidRequest
from app.files import service as files
from app.jobs.request import JobCreate
from app.jobs.snapshot import ResolvedRequest, Snapshot
from app.keys import Principal
from app.policies.schemas import Policy, recipe_value
from app.settings import Settings
from spard.config import AUDITS, Defense, Recipe
from spard.data.rows import SAME_FILE

MOST_NEW_TOKENS = 1024  # in a customer's audit: a judge leaves longer replies unscored
# Audit settings that a customer may not raise either, because more is not stricter: at a high temperature any model
# writes noise, and many samples of few prompts look like many prompts.
_AS_THE_PROVIDER_HAS_IT = ("temperature", "samples")
SHOWN = 20  # faults of a file, in an error or a warning


def resolve_request(session: Session, caller: Principal, ask: JobCreate, settings: Settings) -> Snapshot:
    """Check every reference of a request and return the recipe and job spec that it resolves to today.

    Raises `InvalidRequest` for an unknown or disallowed reference. A file that cannot be trained on raises too, or is
    returned as `fault`, as the setting `bad_files` says.
    """
    # Locks all corpora first: a version that a check looks up cannot be deleted before the job is stored.
    catalog.hold(session)
    job = ResolvedRequest(session, caller, ask, settings)
    for check in CHECKS:
        check(job)
    return job.snapshot()


# The model, and the adapter to start from


def check_start(job: ResolvedRequest) -> None:
    """Check that a request keeps the base model and LoRA shape of the adapter that it starts from, if any."""
    start, model, ask = job.start, job.model, job.ask
    if start is None:
        return
    own = start.job.spec.model
    if start.job.recipe["lora"] is None:
        raise _mismatch(f"{ask.model} is no adapter: all of its weights were trained.", "model")
    if (own.source, own.revision) != (model.source, model.revision):
        raise _mismatch(f"{ask.model} was trained on what {model.alias} stood for before.", "model")
    if ask.full_fine_tuning:
        raise _mismatch(f"{ask.model} is an adapter; leave full_fine_tuning out.", "full_fine_tuning")
    if ask.lora is not None and start.lora not in (ask.lora, fitness.with_default(ask.lora, model)):
        raise _mismatch(f"The adapter of {ask.model} has {asdict(start.lora)}; leave lora out.", "lora")


def _mismatch(message: str, param: str) -> InvalidRequest:
    return InvalidRequest(message, code="adapter_mismatch", param=param)


# The settings of the request


def check_method(job: ResolvedRequest) -> None:
    """Refuse methods that are not trained here, and DPO with a defense that trains on answers."""
    ask = job.ask
    if ask.method is None:
        return
    if ask.method.type == "reinforcement" or ask.method.reinforcement:
        message = "The method reinforcement is not trained here; allowed: supervised and dpo."
        raise InvalidRequest(message, code="method_not_supported", param="method.type")
    other = "supervised" if ask.method.type == "dpo" else "dpo"
    if getattr(ask.method, other) is not None:
        message = f"method.type is {ask.method.type!r}; leave method.{other} out."
        raise InvalidRequest(message, code="method_not_supported", param=f"method.{other}")
    defense = job.safety.defense
    if ask.method.type == "dpo" and defense.trains_on_answers:
        message = (
            f"The defense {defense.type!r} trains on safe answers among the rows; it does not go with dpo's pairs."
        )
        raise InvalidRequest(message, code="method_not_supported", param="safety.defense.type")


def check_full_fine_tuning(job: ResolvedRequest) -> None:
    """Refuse full fine-tuning, and defenses that read the weights, where the base model does not allow them."""
    model, defense = job.model, job.safety.defense
    if job.ask.full_fine_tuning and not model.allow_full_fine_tuning:
        message = f"{model.alias} is fine-tuned with LoRA only; leave full_fine_tuning out."
        raise InvalidRequest(message, code="full_fine_tuning_not_allowed", param="full_fine_tuning")
    if model.quantization == "always" and job.ask.full_fine_tuning:
        message = f"{model.alias} is held in NF4, whose weights cannot be trained; leave full_fine_tuning out."
        raise InvalidRequest(message, code="full_fine_tuning_not_allowed", param="full_fine_tuning")
    if model.quantization == "always" and defense.reads_weights:
        message = f"{defense.type} compares the model's own weights, and {model.alias} is held in NF4."
        raise InvalidRequest(message, code="defense_not_allowed", param="safety.defense.type")


def check_models_of_defense(job: ResolvedRequest) -> None:
    """Refuse a defense that needs a further model if the request names none."""
    defense = job.safety.defense
    if missing := defense.missing_model:
        message = f"{defense.type} needs {missing}: {defense.models[missing]}, a folder or a hub id."
        raise InvalidRequest(message, code=f"{missing}_missing", param=f"safety.defense.{missing}")


# What the provider allows this key: a provider may measure anything, a customer may not weaken the audit that guards
# the release


def check_audit(job: ResolvedRequest) -> None:
    """Refuse a customer's audit settings that could reveal less than the policy's."""
    if "admin" in job.caller.scopes:
        return
    asked, least = job.safety.audit, AUDITS[job.policy.audit]
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


def check_policy_choice(job: ResolvedRequest) -> None:
    """Refuse a defense or a model that the policy does not allow for this key."""
    check_choice(job.caller, job.safety.defense, job.model.alias, job.policy)


def check_choice(caller: Principal, defense: Defense, alias: str, policy: Policy) -> None:
    """Raise `InvalidRequest` if the policy does not allow the defense or the model for this key."""
    if "admin" in caller.scopes:
        return
    if defense.type not in policy.defenses:
        allowed = _quote_names(policy.defenses)
        message = f"The defense {defense.type!r} needs a key with the admin scope; allowed: {allowed}."
        raise InvalidRequest(message, code="defense_not_allowed", param="safety.defense.type")
    if policy.models is not None and alias not in policy.models:
        message = f"The model {alias!r} needs a key with the admin scope; allowed: {_quote_names(policy.models)}."
        raise InvalidRequest(message, code="model_not_allowed", param="model")


def _quote_names(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "none"


# The files


def check_files(job: ResolvedRequest) -> None:
    """Check that the job can train on its files; if not, refuse it, or let it fail if `bad_files` says so."""
    training, validation = job.training, job.validation  # a file that does not exist always refuses the request
    try:
        check_file(job.ask, job.model, training, "training_file", job.settings.min_rows)
        if validation is not None:
            check_file(job.ask, job.model, validation, "validation_file", 1)
    except InvalidRequest as fault:
        if job.settings.bad_files == "reject":
            raise
        job.fault = fault


def check_file(ask: JobCreate, model: BaseModelEntry, file: File, param: str, min_rows: int) -> None:
    """Raise `InvalidRequest` if a job cannot train on a file.

    `param` names the request field that holds the file; `min_rows` is the least number of rows it must have.
    """
    if file.purpose != FINE_TUNE:
        message = f"{file.id} has the purpose {file.purpose!r}; a job needs {FINE_TUNE!r}."
        raise InvalidRequest(message, code="invalid_training_file", param=param)
    if files.is_unfit(file):
        raise InvalidRequest(
            f"{file.id} cannot be trained on: {file.status_details}",
            code="invalid_training_file",
            param=param,
            details=files.file_errors(file)[:SHOWN],
            details_url=f"/v1/files/{file.id}/validation",
        )
    if (file.row_format == PREFERENCE) != (ask.asked_dpo() is not None):
        has, takes = ("preference pairs", "dpo") if file.row_format == PREFERENCE else ("conversations", "supervised")
        message = f'{file.id} has {has}: the method that trains on them is {{"type": "{takes}"}}.'
        raise InvalidRequest(message, code="method_mismatch", param=param)
    if (file.rows or 0) < min_rows:
        kind = param.replace("_", " ").capitalize()
        message = f"{kind} has {file.rows} example(s), but must have at least {min_rows} examples"
        raise InvalidRequest(message, code="invalid_n_examples", param=param)
    _check_tools(model, file, param)


def _check_tools(model: BaseModelEntry, file: File, param: str) -> None:
    """Refuse a file with tools if the model's chat template does not render them."""
    shown = (file.tool_lines and catalog.tool_support(model)) or {}
    # If the template's support is unknown here, `shown` is empty and the file is accepted.
    missing = {part: line for part, line in (file.tool_lines or {}).items() if not shown.get(part, True)}
    if not missing:
        return
    raise InvalidRequest(
        f"The chat template of {model.alias} does not render {' and '.join(sorted(missing))}: what is not rendered is "
        f"not learned. The first such row is line {min(missing.values())} of {file.id}.",
        code="tools_not_rendered",
        param=param,
        details=[
            {"line": line, "code": "tools_not_rendered", "message": f"{part} is not rendered"}
            for part, line in sorted(missing.items())
        ],
        details_url=f"/v1/files/{file.id}/validation?model={model.alias}",
    )


# The safety settings, and what the recipe makes of them


def check_pool(job: ResolvedRequest) -> None:
    """Refuse a defense that trains on safe rows if there is no safety pool."""
    if job.pool is None and job.safety.defense.trains_on_safe_rows:
        message = (
            "There is no safety pool yet, and the defense trains on one. The provider imports it with "
            "`spard pool import FILE.jsonl --name NAME` or POST /v1/admin/pools (rows {prompt, safe})."
        )
        raise InvalidRequest(message, code="no_safety_pool", param="safety.pool")


def check_embedder(job: ResolvedRequest) -> None:
    """Refuse an embedder that this key may not use."""
    _ = job.embedder


def check_modules(job: ResolvedRequest) -> None:
    """Refuse LoRA target modules that the base model does not have or that cannot be adapted."""
    fitness.check_recipe(job.requested_recipe, job.model)


def check_suites(job: ResolvedRequest) -> None:
    """Refuse a suite that does not exist."""
    _ = job.suites


def check_row_signal(job: ResolvedRequest) -> None:
    """Refuse a job that cannot carry out the policy's action for rows."""
    _ = job.row_signal


def check_policy_ranges(job: ResolvedRequest) -> None:
    """Refuse a number outside of the policy's range."""
    check_ranges(job.caller, job.recipe, job.policy)


def check_ranges(caller: Principal, recipe: Recipe, policy: Policy) -> None:
    """Raise `InvalidRequest` if a number of a customer's recipe is outside the policy's range for it."""
    if "admin" in caller.scopes:
        return
    for name, allowed in policy.ranges.items():
        value = recipe_value(recipe, name)
        if isinstance(value, int | float) and not allowed.admits(value):
            message = f"{name} is {value:g}; allowed here: {allowed}."
            raise InvalidRequest(message, code="not_allowed_by_policy", param=name)


# Warnings, in the order in which the owner reads them


def warn_of_files(job: ResolvedRequest) -> None:
    """Warn of the findings in the files, and of a validation file that is the training file."""
    found = [each for file in (job.training, job.validation) if file for each in files.file_findings(file)]
    job.warnings += [each.text for each in found if each.severity == "warning"][:SHOWN]
    if job.validation and job.validation.sha256 == job.training.sha256:
        job.warnings.append(SAME_FILE)


def warn_of_changes(job: ResolvedRequest) -> None:
    """Warn of each part of the request that is not carried out exactly as it was sent."""
    ask, allowed = job.ask, job.settings.integrations or ()
    if (name := ask.suffix_in_name()) != ask.suffix:
        job.warnings.append(f"The suffix {ask.suffix!r} is {name!r} in the model's name.")
    for each in ask.integrations or ():
        left_out = f"The integration {each.type[:64]!r} is left out:"
        if each.type not in allowed:
            job.warnings.append(f"{left_out} the provider has not turned it on.")
        elif each.wandb is None:
            job.warnings.append(f"{left_out} it says no project.")


def warn_of_recipe(job: ResolvedRequest) -> None:
    """Warn of a quantized base model, and of a pool without the benign rows that the recipe uses."""
    if job.recipe.quantization != "none":
        alias = job.model.alias
        text = f"The job trains on {alias} in NF4, 4 bits a weight: its adapter is measured and served on that."
        job.warnings.append(text)
    if job.pool and job.recipe.uses_benign_rows:
        job.warnings += benign_warnings(job.pool.benign_rows)


def warn_of_setup(job: ResolvedRequest) -> None:
    """Warn if, with any file, no audit here can pass the job, or the base model refuses too many harmless requests."""
    job.warnings += job_warnings(job.session, job.model, job.suites, job.settings, job.policy.thresholds)


CHECKS: tuple[Callable[[ResolvedRequest], None], ...] = (
    check_start,  # first: the model decides which settings are possible
    check_method,
    check_full_fine_tuning,
    check_models_of_defense,
    check_audit,  # before `check_suites`, whose message names suites that a customer may not ask for
    check_policy_choice,
    check_files,  # after the settings that need no lookup
    check_pool,
    check_embedder,
    check_modules,  # before `recipe` is read, whose memory is computed from these modules
    check_suites,
    check_row_signal,
    check_policy_ranges,  # on the recipe rather than the request, so that defaults are checked too
    warn_of_files,
    warn_of_changes,
    warn_of_recipe,
    warn_of_setup,
)
"""Each raises `InvalidRequest` or adds a warning. The first that raises decides the error that the caller gets."""
