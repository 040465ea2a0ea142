"""Check from its files, without torch, that a base model can be trained and can hold a conversation.

`spard models add` also loads the model if torch is installed (`spard.training.trial`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NotRequired, TypedDict

from app.catalog import model_files
from app.catalog.schemas import BaseModelIn, ModelFitness, TemplateCardOut
from app.db import Begin
from app.db.tables import BaseModelEntry
from app.db.tables.catalog import LoraReachJson
from app.errors import InvalidRequest, InvalidState
from app.files.template_look import TemplateLook, inspect_folder
from app.files.tokenizer import tokenizer_folder
from app.policies.service import checked_embedder
from app.settings import Settings
from spard.config import GateThresholds, JudgeSpec, Lora, Recipe
from spard.config.quantization import plain_digest
from spard.digests import folder_digest
from spard.models.folder.reading import stored_quantization, weights_fault
from spard.models.shapes import read_layout
from spard.models.targets import reach, refusal

# Validate the source of a base model: an existing folder, or a hub id pinned to a commit.

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


def checked_source(source: str, revision: str | None) -> str:
    """Return the source as workers will open it: an absolute folder, or a hub id; raise `InvalidRequest` otherwise."""
    if _is_folder(source):
        return str(Path(source).expanduser().resolve())
    if source.startswith(("/", ".", "~")) or not _HUB_ID.fullmatch(source):
        raise _invalid(f"There is no folder {source[:200]!r}, and it is no hub id either.")
    if revision is None:
        message = f"{source} is no folder here; to take it from a hub, give the commit as revision (40 hex digits)."
        raise InvalidRequest(message, code="missing_field", param="revision")
    return source


def _is_folder(source: str) -> bool:
    try:
        return "\0" not in source and Path(source).expanduser().is_dir()
    except (OSError, RuntimeError):  # the name is too long, or `~user` does not exist
        return False


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_model", param="source")


_known: dict[tuple[str, str | None], dict[str, bool] | None] = {}  # by source and revision


@dataclass(frozen=True, slots=True)
class ModelInspection:
    """The result of inspecting a base model.

    source        the folder or hub id as workers will open it
    digest        of its files; None if they are not on this machine and the request gave none
    tool_support  which parts of tool use its chat template renders; None if its tokenizer is not on this machine
    notes         warnings for the provider
    lora_reach    the layers that adapters cover, if its weights are on this machine
    rendering     how its chat template is rendered
    embedder      what jobs choose safe rows by, by default
    """

    source: str
    digest: str | None = None
    tool_support: dict[str, bool] | None = None
    notes: list[str] = field(default_factory=list)
    lora_reach: LoraReachJson | None = None
    rendering: dict[str, object] | None = None
    embedder: str | None = None


def inspect(entry: BaseModelIn) -> ModelInspection:
    """Inspect a base model before it is offered; raise `InvalidRequest` if no job could train or ask it.

    It reads all of the model's files, which can take minutes, so call it without an open transaction.
    """
    embedder = checked_embedder(entry.embedder, "embedder") if entry.embedder else None
    source = checked_source(entry.source, entry.revision)
    if not Path(source).is_dir():
        hub_model = BaseModelEntry(alias=entry.alias, source=source, revision=entry.revision)
        look = _look_at_hub_model(hub_model, entry.template_arguments)
        _require_arguments(entry, look)
        return ModelInspection(source, entry.digest, _tools(look), rendering=_rendering(look), embedder=embedder)
    notes, look = require_fit(source, entry.template_arguments)
    _require_arguments(entry, look)
    _require_plain(Path(source), entry)
    reach = adapter_reach(source, entry.target_modules)
    digest = entry.digest or folder_digest(Path(source))
    return ModelInspection(source, digest, _tools(look), notes, reach, _rendering(look), embedder)


def _tools(look: TemplateLook | None) -> dict[str, bool] | None:
    return dict(look["tool_support"]) if look and look["tool_support"] else None


def _rendering(look: TemplateLook | None) -> dict[str, object] | None:
    return dict(look["rendering"]) if look and look["rendering"] else None


def _require_arguments(entry: BaseModelIn, look: TemplateLook | None) -> None:
    """Raise `InvalidRequest` if the chat template's arguments cannot be fixed, or cannot be checked here."""
    if not entry.template_arguments:
        return
    here = "its tokenizer.json is not on the machine that serves the API, so they cannot be checked"
    if fault := look["argument_fault"] if look else here:
        raise InvalidRequest(f"template_arguments: {fault}.", code="invalid_value", param="template_arguments")


def require_fit(source: str, arguments: Mapping[str, object] | None = None) -> tuple[list[str], TemplateLook | None]:
    """Return warnings about a model's folder, and the inspection of its tokenizer and chat template.

    `arguments` are fixed for the template, and their faults are not raised here. Both are empty if the folder is not on
    this machine. Raises `InvalidRequest` if it is not a usable base model. Without a `tokenizer.json` the tokenizer
    cannot be checked here, only by loading the model.
    """
    folder = Path(source)
    if not folder.is_dir():
        return [], None
    look = inspect_folder(folder, arguments)
    found, template = look.findings, look.template
    fault = next((each.sentence for each in found if each.is_fault), template["fault"] if template else None)
    if fault:
        raise InvalidRequest(f"{folder.name} cannot be offered: {fault}.", code="invalid_model", param="source")
    return [each.sentence for each in found], template


def learn_tool_support(look: Begin, alias: str) -> None:
    """Inspect the chat template of a base model for tool support and remember the result, if its row has none.

    A template is third-party code that may take long, so call this without an open transaction; it opens its own with
    `look`. Inside a transaction, `known_tool_support` returns the result.
    """
    with look() as reader:
        entry = reader.get(BaseModelEntry, alias)
    if entry is None:
        return
    place = entry.source, entry.revision
    if entry.tool_support is None and place not in _known and (seen := _look_at_hub_model(entry)):
        _known[place] = _tools(seen)


def known_tool_support(entry: BaseModelEntry) -> dict[str, bool] | None:
    """Return the result of `learn_tool_support`; None if it was not called or the template failed."""
    return _known.get((entry.source, entry.revision))


def _look_at_hub_model(entry: BaseModelEntry, arguments: Mapping[str, object] | None = None) -> TemplateLook | None:
    """Return the inspection of a hub model's tokenizer and template; None if they are not on this machine."""
    try:
        return inspect_folder(tokenizer_folder(entry), arguments).template
    except InvalidState:
        return None


def fitness(entry: BaseModelEntry) -> ModelFitness:
    """Return which of the needed files and settings a model has; fields stay None if its folder is not here."""
    folder, found = Path(entry.source), ModelFitness(alias=entry.alias, parameters=model_files.parameters(entry.source))
    if not folder.is_dir():
        return found
    look = inspect_folder(folder, entry.template_arguments)
    faults = [each.sentence for each in look.findings if each.is_fault]
    found.weights, found.fault = weights_fault(folder) is None, next(iter(faults), None)
    if (template := look.template) is not None:
        found.tokenizer, found.chat_template = template["has_tokenizer"], template["has_template"]
        found.end_token = template["has_end_token"]
        found.fault = found.fault or template["fault"] or template["argument_fault"]
        found.template = template["card"] and TemplateCardOut.model_validate(template["card"])
    return found


class _Counts(TypedDict):
    hits: int
    n: int


class _Language(TypedDict):
    may_decide: bool


class _Record(TypedDict):
    """The part of a file of measured errors that a warning needs; earlier versions wrote no `gamed`."""

    judge: str
    base_digest: str
    languages: list[_Language]
    gamed: NotRequired[_Counts | None]


def is_judge_measured(source: str, digest: str | None, settings: Settings, limits: GateThresholds) -> bool:
    """Return True if the judge may decide on a model: its errors are known, or the policy does not require that."""
    is_known = _is_recorded(settings.judge_errors, digest) or bool(_own_records(source, digest, settings.judge))
    return is_known or limits.allow_unmeasured_judge


def errs_on_model(source: str, digest: str | None, settings: Settings, limits: GateThresholds) -> bool:
    """Return True if only records in the model's folder tell a judge's errors, and by these it decides in no language.

    The record named in the settings is the doctor's to check.
    """
    if _is_recorded(settings.judge_errors, digest) or limits.allow_unmeasured_judge or limits.correct_judge_errors:
        return False
    own = _own_records(source, digest, settings.judge)
    return bool(own) and not any(map(_has_deciding_language, own))


def judge_records(source: str) -> list[Path]:
    """Return the files of measured errors in a model's folder, see `spard.evaluation.calibration.record`."""
    return sorted(Path(source, "calibration").glob("judge*.json"))


def matches_judge(judge: str, spec: JudgeSpec) -> bool:
    """Return True if the judge named in a record may be the judge of the settings.

    A record's name also holds digests, such as that of an LLM judge's instructions, which are not compared here.
    """
    begins = {"llm": f"llm:{spec.model}:", "classifier": f"{spec.family}:", "consensus": "consensus("}
    return judge == spec.name or judge.startswith(begins.get(spec.name, f"{spec.name}:"))


def _own_records(source: str, digest: str | None, spec: JudgeSpec) -> list[_Record]:
    """Return the records in the folder of a model with this digest that are of this model and of the judge."""
    found = []
    for path in judge_records(source):
        try:
            raw: _Record = json.loads(path.read_text(encoding="utf-8"))
            judge, measured_on = str(raw["judge"]), str(raw["base_digest"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # the list of judges says so
        if matches_judge(judge, spec) and (digest is None or plain_digest(measured_on) == plain_digest(digest)):
            found.append(raw)
    return found


def _has_deciding_language(raw: _Record) -> bool:
    """Return True if a record lets its judge decide in a language; a list of words is bound to the model already."""
    try:
        gamed = raw.get("gamed")
        is_steady = gamed is not None and gamed["hits"] == 0 < gamed["n"]
        return is_steady and any(each["may_decide"] for each in raw["languages"])
    except (KeyError, TypeError):
        return False


def _is_recorded(record: Path | None, digest: str | None) -> bool:
    """Return True if the record named in the settings counts for the base model with this digest.

    A record that was measured on one base model counts for no other. One that cannot be read is the doctor's to report.
    """
    if record is None:
        return False
    try:
        measured_on = json.loads(record.read_text(encoding="utf-8")).get("base_digest")
    except (OSError, ValueError, AttributeError):
        return True
    return None in (measured_on, digest) or plain_digest(str(measured_on)) == plain_digest(str(digest))


def judge_warnings(source: str, digest: str | None, settings: Settings, limits: GateThresholds) -> list[str]:
    """Return a warning if the judge's errors on a model are unknown, because then no audit can pass."""
    if is_judge_measured(source, digest, settings, limits):
        return []
    name = settings.judge.name
    other = " The refusal judge is a word list for the lab's models: set SPARD_JUDGE=llm for other models."
    return [
        f"The error rate of the judge {name} on this model is unknown, so every audit will be inconclusive and no "
        "adapter will be released. Measure it with `spard judge --json > judge.json` and set "
        "SPARD_JUDGE_ERRORS=judge.json, or measure it on labeled replies of this model with `spard judge --model`, or "
        "set allow_unmeasured_judge in the policy."
        f"{other if name == 'refusal' else ''}"
    ]


def _require_plain(folder: Path, entry: BaseModelIn) -> None:
    """Raise `InvalidRequest` for full fine-tuning or NF4 on a model stored in FP8 or MXFP4."""
    stored = stored_quantization(folder)
    if stored is None:
        return
    what, code = f"{folder.name} is stored in {stored.upper()}", "invalid_model"
    if entry.allow_full_fine_tuning:
        message = f"{what}: its weights cannot all be trained; leave allow_full_fine_tuning out, or give plain weights."
        raise InvalidRequest(message, code=code, param="allow_full_fine_tuning")
    if entry.quantization != "never":
        message = f"{what}, and cannot be held in NF4 as well; leave quantization out, or give plain weights."
        raise InvalidRequest(message, code=code, param="quantization")


# Check which modules of a base model LoRA adapters can change, from its files alone, without torch.


def adapter_reach(source: str, targets: Sequence[str] | None) -> LoraReachJson | None:
    """Return the layers and the share of a model's parameters that adapters with these target modules cover.

    `targets` None means the default modules. Returns None if the model's weights are not on this machine. Raises
    `InvalidRequest` for modules that cannot be adapted.
    """
    _require_adaptable(source, targets, has_anchor=True, param="target_modules")
    layout = read_layout(source)
    found = reach(layout, targets) if layout else None
    if found is None or not found.target_modules:
        return None
    return {
        "target_modules": list(found.target_modules),
        "layers": found.layers,
        "of_layers": found.of_layers,
        "share": found.share,
        "leaves_out_experts": found.leaves_out_experts,
    }


def with_default(lora: Lora, model: BaseModelEntry) -> Lora:
    """Return LoRA settings with the base model's own target modules filled in, if they name none."""
    if lora.target_modules or model.target_modules is None:
        return lora
    return Lora(lora.rank, lora.alpha, lora.dropout, tuple(model.target_modules))


def check_recipe(recipe: Recipe, model: BaseModelEntry) -> None:
    """Raise `InvalidRequest` if a recipe's target modules do not exist in the model or cannot be adapted."""
    targets = recipe.lora.target_modules if recipe.lora else None
    has_anchor = recipe.effective_anchor > 0
    _require_adaptable(model.source, targets, has_anchor=has_anchor, param="lora.target_modules")


def _require_adaptable(source: str, targets: Sequence[str] | None, *, has_anchor: bool, param: str) -> None:
    """Raise `InvalidRequest`, with the reason, for target modules that cannot be adapted.

    A model that is not on this machine is not checked; its job will fail by itself.
    """
    layout = read_layout(source) if targets else None
    why = refusal(layout, targets, has_anchor=has_anchor) if layout and targets else None
    if why:
        raise InvalidRequest(f"{param}: {why}.", code="unsupported_module", param=param)
