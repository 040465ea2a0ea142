"""Judges by name, and the context in which their endpoints and base models are opened."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from spard import distributed
from spard.config import JudgeSpec
from spard.config.extensions import JUDGES
from spard.errors import InvalidRecipe
from spard.evaluation.judges.base import Judge, SilentJudge, Verdict
from spard.evaluation.judges.llm import Chat, LlmJudge
from spard.evaluation.judges.refusal import RefusalJudge
from spard.evaluation.judges.wrappers import CanaryJudge, ConsensusJudge

__all__ = ["Judge", "Verdict", "of_base_model", "open_chat", "open_judge", "use_chat"]

_Open = Callable[[JudgeSpec], Chat]
_open_chat: ContextVar[_Open | None] = ContextVar("_open_chat", default=None)
_base_model: ContextVar[tuple[str, str | None] | None] = ContextVar("_base_model", default=None)


@contextmanager
def use_chat(open_chat: _Open) -> Iterator[None]:
    """Open language-model judges with `open_chat` inside the block, instead of with this process's own network.

    The isolated child of a job has no network; its judge's requests go through the worker.
    """
    token = _open_chat.set(open_chat)
    try:
        yield
    finally:
        _open_chat.reset(token)


@contextmanager
def of_base_model(source: str, revision: str | None = None) -> Iterator[None]:
    """Open judges named `base` with this base model inside the block: a folder, or a hub id with its revision."""
    token = _base_model.set((source, revision))
    try:
        yield
    finally:
        _base_model.reset(token)


def open_judge(spec: JudgeSpec) -> Judge:
    """Open the judge that a spec names, from this or an installed package; on ranks other than 0, a `SilentJudge`."""
    if distributed.rank():
        return SilentJudge()
    opened: Judge = JUDGES.load(spec.name)(spec)
    return opened


def open_refusal(spec: JudgeSpec) -> Judge:
    """Open the judge that recognizes refusals by words; it needs neither an endpoint nor canaries."""
    return RefusalJudge()


def open_llm(spec: JudgeSpec) -> Judge:
    """Open a language model as a judge, checked by canaries: replies of known harm in every batch."""
    return _with_canaries(LlmJudge(open_chat(spec), spec.model, spec.concurrency), spec)


def open_chat(spec: JudgeSpec) -> Chat:
    """Open the judge's endpoint, or its replacement inside `use_chat`."""
    opened = _open_chat.get()
    if opened is None:
        # Imported only here: it needs openai, an optional dependency.
        opened = importlib.import_module("spard.evaluation.judges.endpoint").open_chat
    return opened(spec)


def open_classifier(spec: JudgeSpec) -> Judge:
    """Open a classifier as a judge, with canaries; torch is imported only here."""
    classifier = importlib.import_module("spard.evaluation.judges.classifier")
    return _with_canaries(classifier.open_classifier(spec.model, spec.family, _template(spec)), spec)


def open_base(spec: JudgeSpec) -> Judge:
    """Open the run's base model as a judge, with canaries; outside of runs, the model that `spec.model` names."""
    judge = importlib.import_module("spard.evaluation.judges.base_model").BaseModelJudge
    source = _base_model.get() or (spec.model, None)
    return _with_canaries(judge(importlib.import_module("spard.models.base").load_base(*source)), spec)


def open_local(spec: JudgeSpec) -> Judge:
    """Open a classifier of one's own, from the file `spec.model`; it needs no canaries, since digests are compared."""
    local = importlib.import_module("spard.evaluation.judges.local")
    judge: Judge = local.open_local_judge(Path(spec.model), _base_model.get())
    return judge


def open_consensus(spec: JudgeSpec) -> Judge:
    """Open a judge that returns the majority of its members; raise `InvalidRecipe` for fewer than two."""
    if len(spec.members) < 2:
        raise InvalidRecipe("judge.members: a consensus needs two judges or more", "judge.members")
    return ConsensusJudge(tuple(map(open_judge, spec.members)))


def _with_canaries(judge: Judge, spec: JudgeSpec) -> Judge:
    return CanaryJudge(judge, spec.canaries) if spec.canaries else judge


def _template(spec: JudgeSpec) -> str | None:
    if spec.template is None:
        return None
    try:
        text = Path(spec.template).read_text()
    except OSError as error:
        raise InvalidRecipe(f"judge.template cannot be read: {error.strerror}", "judge.template") from error
    if "{prompt}" not in text or "{reply}" not in text:
        raise InvalidRecipe("judge.template must hold {prompt} and {reply}", "judge.template")
    return text
