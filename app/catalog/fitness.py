"""Whether a base model can be trained and talked to, as far as its files tell without torch.

`spard models add` also loads it, where torch is installed (`spard.training.trial`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from app.catalog import adapters, weights
from app.catalog.schemas import BaseModelIn, ModelFitness, TemplateCardOut
from app.catalog.sources import checked_source
from app.db import Begin
from app.db.tables import BaseModelEntry
from app.db.tables.catalog import LoraReachJson
from app.errors import InvalidRequest, InvalidState
from app.files.template_look import TemplateLook, inspect_folder
from app.files.tokenizer import tokenizer_folder
from app.policies.embedders import checked_embedder
from app.settings import Settings
from spard.config import GateThresholds
from spard.digests import folder_digest
from spard.models.folder.configuration import stored_quantization
from spard.models.folder.headers import weights_fault

_known: dict[tuple[str, str | None], dict[str, bool] | None] = {}  # by source and revision
_MEASURED = Path("calibration/judge.json")  # in a model's folder, see `spard.evaluation.calibration.record`


@dataclass(frozen=True, slots=True)
class Inspected:
    """A base model that was looked at: its source as workers will open it, and what was found there.

    `digest` is None where its files are not on this machine, `tool_support` where its tokenizer is not.
    """

    source: str
    digest: str | None = None
    tool_support: dict[str, bool] | None = None
    notes: list[str] = field(default_factory=list)
    lora_reach: LoraReachJson | None = None
    rendering: dict[str, object] | None = None
    embedder: str | None = None


def inspect(entry: BaseModelIn) -> Inspected:
    """Look at a base model before it is offered; `InvalidRequest` for one that no job could train or talk to.

    That takes as long as its files take to be read, so no transaction may be open meanwhile.
    """
    embedder = checked_embedder(entry.embedder, "embedder") if entry.embedder else None
    source = checked_source(entry.source, entry.revision)
    if not Path(source).is_dir():
        hub_model = BaseModelEntry(alias=entry.alias, source=source, revision=entry.revision)
        look = _look_at_hub_model(hub_model)
        return Inspected(source, entry.digest, _tools(look), rendering=_rendering(look), embedder=embedder)
    notes, look = require_fit(source)
    _require_plain(Path(source), entry)
    reach = adapters.adapter_reach(source, entry.target_modules)
    digest = entry.digest or folder_digest(Path(source))
    return Inspected(source, digest, _tools(look), notes, reach, _rendering(look), embedder)


def _tools(look: TemplateLook | None) -> dict[str, bool] | None:
    return dict(look["tool_support"]) if look and look["tool_support"] else None


def _rendering(look: TemplateLook | None) -> dict[str, object] | None:
    return dict(look["rendering"]) if look and look["rendering"] else None


def require_fit(source: str) -> tuple[list[str], TemplateLook | None]:
    """Return what the provider should know of a folder, and what was found of its tokenizer and chat template.

    Raise `InvalidRequest` for a folder that is no base model, or a tokenizer that cannot write a conversation. Where
    there is no `tokenizer.json`, only loading the model tells.
    """
    folder = Path(source)
    if not folder.is_dir():
        return [], None
    look = inspect_folder(folder)
    found, template = look.findings, look.template
    fault = next((each.sentence for each in found if each.is_fault), template["fault"] if template else None)
    if fault:
        raise InvalidRequest(f"{folder.name} cannot be offered: {fault}.", code="invalid_model", param="source")
    return [each.sentence for each in found], template


def learn_tool_support(look: Begin, alias: str) -> None:
    """Find out what of tools a base model's template renders, where its offer does not say; opens `look` by itself.

    A template is a program of others, so no transaction may be open meanwhile: `known_tool_support` tells in one.
    """
    with look() as reader:
        entry = reader.get(BaseModelEntry, alias)
    if entry is None:
        return
    place = entry.source, entry.revision
    if entry.tool_support is None and place not in _known and (seen := _look_at_hub_model(entry)):
        _known[place] = _tools(seen)


def known_tool_support(entry: BaseModelEntry) -> dict[str, bool] | None:
    """Return what `learn_tool_support` has found out; None where it was not asked or the template fails."""
    return _known.get((entry.source, entry.revision))


def _look_at_hub_model(entry: BaseModelEntry) -> TemplateLook | None:
    """Return what was found of a model's tokenizer and chat template; None where they are not on this machine."""
    try:
        return inspect_folder(tokenizer_folder(entry)).template
    except InvalidState:
        return None


def fitness(entry: BaseModelEntry) -> ModelFitness:
    """Tell what a model's files have of what training and talking need; what is not on this machine is not known."""
    folder, found = Path(entry.source), ModelFitness(alias=entry.alias, parameters=weights.parameters(entry.source))
    if not folder.is_dir():
        return found
    look = inspect_folder(folder)
    faults = [each.sentence for each in look.findings if each.is_fault]
    found.weights, found.fault = weights_fault(folder) is None, next(iter(faults), None)
    if (template := look.template) is not None:
        found.tokenizer, found.chat_template = template["has_tokenizer"], template["has_template"]
        found.end_token = template["has_end_token"]
        found.fault = found.fault or template["fault"]
        found.template = template["card"] and TemplateCardOut.model_validate(template["card"])
    return found


def judge_warnings(source: str, settings: Settings, limits: GateThresholds) -> list[str]:
    """Tell the provider, before any job has cost its time, that no audit on a model can end in a decision."""
    is_measured = settings.judge_errors is not None or (Path(source) / _MEASURED).is_file()
    if is_measured or limits.allow_unmeasured_judge:
        return []
    name = settings.judge.name
    other = " The refusal judge is a word list for the lab's models: take SPARD_JUDGE=llm for yours."
    return [
        f"Nothing is known of how often the judge {name} errs on this model, so every audit will be inconclusive and "
        "no adapter released. Measure it with `spard judge --json > judge.json` and set "
        "SPARD_JUDGE_ERRORS=judge.json, or set allow_unmeasured_judge in the policy."
        f"{other if name == 'refusal' else ''}"
    ]


def _require_plain(folder: Path, entry: BaseModelIn) -> None:
    """Refuse what takes weights in 16 bits from a model that is stored in FP8 or MXFP4."""
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
