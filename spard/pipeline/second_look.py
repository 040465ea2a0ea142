"""A second look at suites on which the first one decided nothing: the same way of asking, with more prompts.

Both models are asked, by transformers, and what they did then stands in place of the first look. The gate splits its
confidence between the looks (Bonferroni), so that both together release no more than one look might. Full fine-tuning
leaves no base model that could be asked again, and the plain suites are asked whole at once: these have one look.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from spard.config import ON_FIGURES, Asking
from spard.evaluation.audit import Item, Suite
from spard.evaluation.results import SuiteResult
from spard.evaluation.vllm_offline.engine import transformers
from spard.models.base import adapters_off
from spard.pipeline import audited, kept_figures
from spard.pipeline.context import Context
from spard.release.records import read_record

TIMES = 4  # as many prompts at most
LEAST = 1.5  # times as many, else there is no second look

_OUTPUT = "second_look"
_MOST = 1000  # prompts of one kind

Measure = Callable[[Sequence[Suite], Any], list[tuple[SuiteResult, list[Item]]]]
"""From suites and a model, None for the base model, to what was measured."""

_Both = tuple[list[SuiteResult], list[SuiteResult]]  # base model, trained model


def is_possible(context: Context) -> bool:
    """Tell whether the run may look twice: its base model is there at the end, and its gate decides on bounds."""
    return context.recipe.lora is not None and context.run.thresholds.confidence != ON_FIGURES


def larger(context: Context, first: Sequence[Suite], mined: Callable[[Asking], Sequence[Suite]]) -> dict[str, Suite]:
    """Return by name each suite that may be looked at twice, as it would be asked then.

    `first` are the suites that came from the training rows, and `mined` makes them with more prompts.
    """
    if not is_possible(context):
        return {}
    audit = context.recipe.audit
    found = {each.name: each for each in mined(_more(audit.asking))}
    return {
        each.name: found[each.name]
        for each in first
        if each.name in found
        and min(len(found[each.name].prompts), audit.max_prompts) >= LEAST * min(len(each.prompts), audit.max_prompts)
    }


def marked(results: Sequence[SuiteResult], more: Mapping[str, Suite]) -> list[SuiteResult]:
    """Return results that say which suites may be looked at twice."""
    return [replace(each, looks=2) if each.suite in more else each for each in results]


def run(context: Context, model: Any, weights: str, suites: Sequence[Suite], measure: Measure) -> _Both:
    """Ask the base model and the trained one suites again; an earlier attempt's figures count for the same weights."""
    key = {"weights": weights, "suites": [each.name for each in suites]}
    kept = context.outputs.read(_OUTPUT)

    def ask_base(missing: Sequence[Suite]) -> list[SuiteResult]:
        return [result for result, _ in measure(missing, None)]

    if kept is None or kept["key"] != key:
        context.report.event(_told(suites), {"suites": len(suites)})
        keys = [kept_figures.content_key(context, suite, transformers()) for suite in suites]
        with adapters_off(model):
            base = kept_figures.complete(context, suites, keys, kept_figures.read(context, keys), ask_base)
        found = measure(suites, model)
        audited.keep_again(context, suites, found)
        adapter = [result for result, _ in found]
        kept = {"key": key, "base": [asdict(each) for each in base], "adapter": [asdict(each) for each in adapter]}
        context.outputs.write(_OUTPUT, kept)
    base, adapter = ([read_record(SuiteResult, each) for each in kept[who]] for who in ("base", "adapter"))
    return base, [replace(each, looks=2) for each in adapter]


def instead(first: Sequence[SuiteResult], again: Sequence[SuiteResult]) -> list[SuiteResult]:
    """Return results with those of a second look in the places of the first's."""
    by_name = {each.suite: each for each in again}
    return [by_name.get(each.suite, each) for each in first]


def _more(asking: Asking) -> Asking:
    kinds = ("prompts", "random", "sampled", "prefilled", "turns", "phrases", "requests")
    return replace(asking, **{kind: min(_MOST, TIMES * getattr(asking, kind)) for kind in kinds})


def _told(suites: Sequence[Suite]) -> str:
    named = ", ".join(f"{each.name} ({len(each.prompts):,} prompts)" for each in suites)
    return f"The audit was too small to decide, so both models are asked more: {named}"
