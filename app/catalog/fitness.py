"""Whether a base model can be trained and talked to, as far as its files tell without torch.

`spard models add` also loads it, where torch is installed (`spard.models.trial`).
"""

from __future__ import annotations

from pathlib import Path

from app.catalog import weights
from app.catalog.schemas import ModelFitness
from app.db.tables import BaseModelEntry
from app.errors import InvalidRequest
from app.files.tokenizer import LightTokenizer
from app.settings import Settings
from spard.config import GateThresholds
from spard.data import chat
from spard.data.tools import CONVERSATION
from spard.errors import SpardError

_MEASURED = Path("calibration/judge.json")  # in a model's folder, see `spard.evaluation.calibration.record`


def require_fit(source: str) -> None:
    """Raise InvalidRequest for weights that are not whole, or a tokenizer that cannot write a conversation.

    Where there is no `tokenizer.json`, only loading the model tells.
    """
    folder = Path(source)
    if not folder.is_dir():
        return
    if fault := weights.fault(folder) or (_tokenizer_fault(folder) if (folder / "tokenizer.json").is_file() else None):
        raise InvalidRequest(f"{folder.name} cannot be offered: {fault}.", code="invalid_model", param="source")


def fitness(entry: BaseModelEntry) -> ModelFitness:
    """Tell what a model's files have of what training and talking need; what is not on this machine is not known."""
    folder, found = Path(entry.source), ModelFitness(alias=entry.alias, parameters=weights.parameters(entry.source))
    if not folder.is_dir():
        return found
    found.weights, found.fault = (fault := weights.fault(folder)) is None, fault
    if not (folder / "tokenizer.json").is_file():
        return found
    try:
        tokenizer = LightTokenizer(folder)
    except (ValueError, KeyError, TypeError) as error:
        found.tokenizer, found.fault = False, found.fault or f"its tokenizer cannot be read: {error}"
        return found
    found.tokenizer, found.chat_template = True, tokenizer.chat_template is not None
    found.end_token = tokenizer.eos_token is not None and tokenizer.eos_token in tokenizer
    found.fault = found.fault or _tokenizer_fault(folder)
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


def _tokenizer_fault(folder: Path) -> str | None:
    try:
        tokenizer = LightTokenizer(folder)
    except (ValueError, KeyError, TypeError) as error:
        return f"its tokenizer cannot be read: {error}"
    if tokenizer.eos_token is None or tokenizer.eos_token not in tokenizer:
        return "its tokenizer has no end token (eos_token), so that no answer would ever end"
    if isinstance(tokenizer.chat_template, dict) and "default" not in tokenizer.chat_template:
        return "it has several chat templates, and none is the default"
    try:
        chat.encode_to_train(tokenizer, [CONVERSATION], chat.UNBOUNDED)
    except SpardError as error:
        return f"its chat template cannot write a question and its answer: {error.message}"
    return None
