"""Selects the engine that answers a run's audit: the requested one, or transformers once that engine has failed.

Results before and after the training must come from the same engine. If vLLM fails after it has answered for the base
model, transformers measures the base model again (`BaseFigures`); cache keys contain the engine, which keeps the
results of both apart. Comparisons of ends of epochs, the audit after a further tuning and the auditing agent's
questions always use transformers, for both models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

from spard.data.rows import Prompt
from spard.evaluation.ask import Speaker, in_memory
from spard.evaluation.audit import Suite, sample
from spard.evaluation.gate import gate, is_unasked
from spard.evaluation.results import SuiteResult
from spard.evaluation.rounds import needs_base
from spard.evaluation.vllm_offline.engine import Engine, EngineFailed, transformers, vllm, why_not
from spard.evaluation.vllm_offline.replies import (
    Limits,
    Probe,
    Subject,
    generate_replies,
    is_asked,
    open_speaker,
    prompt_rows,
)
from spard.models.base import disable_adapters
from spard.pipeline.context import Context
from spard.release.records import AuditEngineRecord

_OUTPUT = "audit_engine"
_BEAT_S = 10.0  # between two keep-alives


class BaseFigures:
    """The base model's results, measured again if the audit engine has changed since.

    `measure(context)` returns results for all suites, some of which may be unasked; `ask(context, names)` measures the
    suites with these names. `found` holds the results by engine.
    """

    def __init__(
        self,
        context: Context,
        measure: Callable[[Context], list[SuiteResult]],
        ask: Callable[[Context, Collection[str]], list[SuiteResult]],
        found: dict[Engine, list[SuiteResult]] | None = None,
    ) -> None:
        self._context, self._measure, self._ask = context, measure, ask
        self._found: dict[Engine, list[SuiteResult]] = {} if found is None else found

    def with_context(self, context: Context) -> BaseFigures:
        """Return an object that shares these results and asks the rest in `context`, with its own way to stop."""
        return BaseFigures(context, self._measure, self._ask, self._found)

    def results(self, model: Any = None) -> list[SuiteResult]:
        """Return the base model's results by the current engine, measuring them if there are none.

        `model` is the trained model once there is one: its adapters are disabled to measure the base model inside it.
        """
        if current_engine(self._context) not in self._found:
            with nullcontext() if model is None else disable_adapters(model):
                found = self._measure(self._context)
            self._found[current_engine(self._context)] = found  # the engine may have fallen back meanwhile
        return self._found[current_engine(self._context)]

    def ask(self, names: Collection[str], model: Any) -> list[SuiteResult]:
        """Ask the base model inside `model` the named suites, store and return its results."""
        known = self.results(model)
        with disable_adapters(model):
            found = {each.suite: each for each in self._ask(self._context, names)}
        self._found[current_engine(self._context)] = [found.get(each.suite, each) for each in known]
        return list(found.values())

    def compare(self, adapter: Sequence[SuiteResult], model: Any, sampled: Collection[str] = ()) -> list[SuiteResult]:
        """Return the base model's results after asking the unasked suites that can change the gate's decision.

        `adapter` are the trained model's results and `sampled` the suites of which only a part was asked. Nothing is
        asked if another suite fails the gate anyway.
        """
        limits, known = self._context.run.thresholds, {each.suite: each for each in self.results(model)}
        open_ones = [each for each in adapter if each.suite in known and is_unasked(known[each.suite])]
        needed = [each.suite for each in open_ones if needs_base(each, limits, is_sampled=each.suite in sampled)]
        others = [each for each in adapter if each.suite not in needed]
        if needed and gate(list(known.values()), others, limits, sampled=sampled).decision != "fail":
            self.ask(needed, model)
        return self.results(model)


def current_engine(context: Context) -> Engine:
    """Return the engine that answers the run's audit from now on."""
    if context.run.audit_engine.name == "transformers" or _why_not(context) is not None:
        return transformers()
    return vllm(context.base, context.processes)


def generator(context: Context, suites: Sequence[Suite], model: Any = None) -> tuple[Speaker, AuditEngineRecord]:
    """Return a generator for the suites, for the base model (None) or a trained one, and a record of its engine.

    vLLM answers all prompts before this function returns; if it fails, transformers answers all of them.
    """
    asked_model, system = (context.base.model, None) if model is None else (model, context.system_prompt)
    # transformers answers the prompts that vLLM cannot (scorers by likelihood, sampled replies) in either case.
    own = in_memory(asked_model, context.base.tokenizer, system, context.report.repeat_activity)
    limit = context.recipe.audit.max_prompts
    prompts = [prompt for suite in suites for prompt in sample(suite.prompts, limit)]
    asked = context.run.audit_engine.name
    if asked == "vllm":
        why = _why_not(context)
        if why is None:
            try:
                return _of_vllm(context, prompts, asked_model, system, own)
            except EngineFailed as error:
                why = str(error)
        _fall_back(context, why)
    return own, make_record(transformers(), asked, {"transformers": len(prompts)}, why=_why_not(context))


def _of_vllm(
    context: Context, prompts: Sequence[Prompt], model: Any, system: str | None, own: Speaker
) -> tuple[Speaker, AuditEngineRecord]:
    """Generate all replies with vLLM; raise `EngineFailed` if it fails or its replies do not pass the probe."""
    engine, limits, tokenizer = current_engine(context), context.run.audit_engine, context.base.tokenizer
    rows = prompt_rows(tokenizer, prompts, system)
    by_vllm = sum(map(is_asked, prompts))
    counts = {"transformers": len(prompts) - by_vllm, "vllm": by_vllm}
    if not rows:
        return own, make_record(engine, engine.name, counts)
    subject = Subject(context.base, model, context.run.model, context.run.revision)
    bounds = Limits(context.recipe.audit.max_new_tokens, limits, _keep_alive(context))
    replies, probed = generate_replies(subject, engine, rows, bounds)
    return open_speaker(replies, tokenizer, system, own), make_record(engine, engine.name, counts, probed)


def make_record(
    engine: Engine, asked: str, replies: Mapping[str, int], probe: Probe | None = None, why: str | None = None
) -> AuditEngineRecord:
    """Return the record of the engine that answered; `why` says why another one than `asked` did."""
    reason = (why or "") if asked != engine.name else ""
    found = asdict(probe) if probe else {}
    return AuditEngineRecord(**asdict(engine), asked=asked, why=reason, replies=replies, **found)


def is_same_engine(record: Mapping[str, object] | None, engine: Engine) -> bool:
    """Return True if a record (as JSON) names this engine."""
    return record is not None and {name: record.get(name) for name in asdict(engine)} == asdict(engine)


def _why_not(context: Context) -> str | None:
    """Return why vLLM cannot answer in this run, or None if it can; an engine that failed once is not retried."""
    kept = context.outputs.read(_OUTPUT)
    if kept is not None:
        return str(kept["why"])
    if context.recipe.lora is None:
        return "full fine-tuning leaves no adapter that vLLM could load"
    return why_not(context.base, context.recipe.lora.rank)


def _fall_back(context: Context, why: str) -> None:
    """Switch to transformers for this and all later attempts, and report the reason once."""
    if context.outputs.read(_OUTPUT) is None:
        context.outputs.write(_OUTPUT, {"why": why})
        told = "vLLM was to answer the audit; transformers answers all of it, before and after the training"
        context.report.event(f"{told}: {why}.", {"audit_engine": "transformers"}, level="warn")


def _keep_alive(context: Context) -> Callable[[], None]:
    """Return a callback for waits: it raises `Stopped` on a stop and sends keep-alives."""
    told = time.monotonic()

    def check_and_report() -> None:
        nonlocal told
        context.raise_if_stopped()
        if time.monotonic() - told > _BEAT_S:
            told = time.monotonic()
            context.report.waiting("engine")

    return check_and_report
