"""A second look at suites on which the first look was inconclusive: the same kind of prompts, but more of them.

Only the added prompts are asked, by transformers; the result on all prompts replaces the first result. The gate splits
its confidence between the looks (Bonferroni), which keeps the probability of a wrong release as low as with one look.
Full fine-tuning leaves no base model to ask again, and the provider's plain suites are asked whole at once: in both
cases there is only one look.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from spard.config import ON_FIGURES, Asking
from spard.data.rows import Prompt
from spard.evaluation.audit import Measurement, Suite, sample, score_replies
from spard.evaluation.results import SuiteResult
from spard.evaluation.rounds import needs_base
from spard.evaluation.vllm_offline.engine import transformers
from spard.models.base import disable_adapters
from spard.pipeline import kept_figures
from spard.pipeline.context import Context
from spard.release.records import read_record

TIMES = 4  # maximum prompts, as a multiple of the first look's
LEAST = 1.5  # minimum, likewise; otherwise there is no second look

_OUTPUT = "second_look"
_MOST = 1000  # maximum prompts of one kind

Measure = Callable[[Sequence[Suite], Any], list[Measurement]]
"""Takes suites and a model (None for the base model), and returns the measurements."""

_Both = tuple[list[SuiteResult], list[SuiteResult]]  # base model, trained model


def is_possible(context: Context) -> bool:
    """Return True if the run may look twice: the base model still exists at the end, and the gate decides on bounds."""
    return context.recipe.lora is not None and context.run.thresholds.confidence != ON_FIGURES


def larger(context: Context, first: Sequence[Suite], mined: Callable[[Asking], Sequence[Suite]]) -> dict[str, Suite]:
    """Return by name each suite that may get a second look, with the prompts of that look.

    `first` are the suites mined from the training rows, and `mined(asking)` mines them with more prompts. The second
    look contains the prompts of the first, and other prompts up to the larger number.
    """
    if not is_possible(context):
        return {}
    audit, found = context.recipe.audit, dict[str, Suite]()
    wide = {each.name: each for each in mined(_more(audit.asking))}
    for suite in first:
        asked = sample(suite.prompts, audit.max_prompts)
        more = sample(wide[suite.name].prompts, audit.max_prompts) if suite.name in wide else []
        if len(more) >= LEAST * len(asked):
            # Suites are mined anew with other sizes, so prompts are matched by content and not by position.
            known = set(map(_content, asked))
            others = [each for each in more if _content(each) not in known]
            found[suite.name] = replace(suite, prompts=(*asked, *sample(others, len(more) - len(asked))))
    return found


def mark_suites(results: Sequence[SuiteResult], more: Mapping[str, Suite]) -> list[SuiteResult]:
    """Return the results with `looks=2` on suites that may get a second look."""
    return [replace(each, looks=2) if each.suite in more else each for each in results]


def run(
    context: Context,
    model: Any,
    weights: str,
    suites: Sequence[Suite],
    measure: Measure,
    first: Mapping[str, Measurement],
) -> _Both:
    """Ask the trained model the larger suites, and the base model where it matters; return both models' results.

    Replies of the `first` look are reused. Results of an earlier attempt count if the digest `weights` matches.
    """
    key = {"weights": weights, "suites": [each.name for each in suites]}
    kept = context.outputs.read(_OUTPUT)
    if kept is None or kept["key"] != key:
        context.report.event(_announcement(suites), {"suites": len(suites)})
        found = _extend_first_look(first, suites, lambda missing: measure(missing, model))
        kept_figures.keep_repeated(context, found)
        adapter = [replace(each.result, looks=2) for each in found]
        base = _ask_base(context, model, suites, adapter, measure)
        kept = {"key": key, "base": [asdict(each) for each in base], "adapter": [asdict(each) for each in adapter]}
        context.outputs.write(_OUTPUT, kept)
    base, adapter = ([read_record(SuiteResult, each) for each in kept[who]] for who in ("base", "adapter"))
    return base, [replace(each, looks=2) for each in adapter]


def _ask_base(
    context: Context, model: Any, suites: Sequence[Suite], adapter: Sequence[SuiteResult], measure: Measure
) -> list[SuiteResult]:
    """Return the base model's results; a suite that passes with any base model uses cached results or is not asked."""
    keys = [kept_figures.content_key(context, suite, transformers()) for suite in suites]
    found = kept_figures.read_cached(context, keys)
    for i, after in enumerate(adapter):
        # An empty result marks the base model as not asked: no answer of it can change the decision.
        if found[i] is None and not needs_base(after, context.run.thresholds):
            nothing = SuiteResult(*(after.suite, after.kind, after.judge, 0, 0, 0, 0, None, 0.0, 1.0))
            found[i] = replace(nothing, planned=after.prompt_count)
    with disable_adapters(model):
        return kept_figures.complete_cached(
            context, suites, keys, found, lambda missing: [each.result for each in measure(missing, None)]
        )


def _extend_first_look(
    first: Mapping[str, Measurement], suites: Sequence[Suite], measure: Callable[[Sequence[Suite]], list[Measurement]]
) -> list[Measurement]:
    """Measure whole suites without repeating prompts of the `first` look."""
    asked = [{_content(each): i for i, each in enumerate(_prompts(first, suite))} for suite in suites]
    missing = [
        replace(suite, prompts=tuple(each for each in suite.prompts if _content(each) not in known))
        for suite, known in zip(suites, asked, strict=True)
    ]
    found = []
    for suite, known, more in zip(suites, asked, measure(missing), strict=True):
        replies = first[suite.name].replies + more.replies if suite.name in first else more.replies
        start = len(_prompts(first, suite))
        places = known | {_content(each): start + i for i, each in enumerate(more.prompts)}
        in_order = replies.select([places[_content(each)] for each in suite.prompts])
        found.append(score_replies(suite, in_order, more.result.judge))
    return found


def _prompts(first: Mapping[str, Measurement], suite: Suite) -> Sequence[Prompt]:
    return first[suite.name].prompts if suite.name in first else ()


def _content(prompt: Prompt) -> str:
    return json.dumps(asdict(prompt), sort_keys=True)


def instead(first: Sequence[SuiteResult], again: Sequence[SuiteResult]) -> list[SuiteResult]:
    """Return the first results, with the second look's result in place of each suite that had one."""
    by_name = {each.suite: each for each in again}
    return [by_name.get(each.suite, each) for each in first]


def _more(asking: Asking) -> Asking:
    kinds = ("prompts", "random", "sampled", "prefilled", "turns", "phrases", "requests")
    return replace(asking, **{kind: min(_MOST, TIMES * getattr(asking, kind)) for kind in kinds})


def _announcement(suites: Sequence[Suite]) -> str:
    named = ", ".join(f"{each.name} ({len(each.prompts):,} prompts)" for each in suites)
    return f"The audit was too small to decide, so both models are asked more: {named}"
