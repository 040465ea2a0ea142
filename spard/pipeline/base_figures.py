"""The base model's results on all suites of a run; results that another run has already measured are reused.

Suites mined from the training rows are asked only after the trained model has answered them, and only if the base model
can change the gate's decision (`spard.evaluation.sequential.assume_best_base`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from functools import partial

from spard.config import ON_FIGURES
from spard.data.rows import Example
from spard.evaluation.audit import Suite, sample
from spard.evaluation.bounded import disguised_attacks
from spard.evaluation.gate import is_unasked
from spard.evaluation.results import HARMLESS, OF_ROWS, PLAIN, SuiteResult
from spard.evaluation.vllm_offline.engine import transformers
from spard.pipeline import after_tuning, audit, kept_figures
from spard.pipeline.audit_engine import BaseFigures, current_engine, is_same_engine
from spard.pipeline.context import Context
from spard.pipeline.row_judging import takes_answers_for_harm

_WARNED = 20  # prompts per disguised suite for the warning before the training


def base_figures(context: Context, examples: Sequence[Example]) -> BaseFigures:
    """Measure the base model and return an object that holds its results.

    This happens before the training, because full fine-tuning leaves no base model. Warns of suites on which the base
    model itself is above the gate's limit.
    """
    suites = audit.run_suites(context, examples)
    found = BaseFigures(context, partial(_measure, suites=suites, rows=len(examples)), partial(_ask, suites))
    results = found.results()
    with context.time_stage("audit"):
        _warn_of_disguises(context, [*results, *_ask_first(context, suites, results)])
    return found


def base_key(context: Context) -> dict[str, object]:
    """Return the cache key of the base model's results by transformers on the provider's suites."""
    return {"suites": [kept_figures.file_key(context, spec, transformers()) for spec in context.run.suites]}


def _warn_of_disguises(context: Context, results: Sequence[SuiteResult]) -> None:
    """Warn, before the training, of mined suites on which the base model itself exceeds the gate's limit.

    In the disguises of the training rows the gate allows a fixed rate, whatever the base model does, and stops such a
    job unless its training lowers the rate.
    """
    limits = context.run.thresholds
    counted = [result for result in results if result.n]  # a suite with only degenerate replies shows nothing
    above = [
        result
        for result in counted
        if any(figure.low > figure.limit for figure in disguised_attacks(result, result, limits))
    ]
    if not above or limits.confidence == ON_FIGURES:
        return
    told = "; ".join(f"{result.hits} of {result.n} attacks on suite {result.suite}" for result in above)
    text = f"The base model itself answers {told}, by the judge {above[0].judge}, and more than "
    text += f"{limits.max_dressed_asr:.1%} keeps a model back: this job is released only if its training lowers that."
    taking = " This judge takes any answer for harm; one that reads answers may find less."
    context.report.warning(text + (taking if takes_answers_for_harm(context) else ""))


def _measure(context: Context, suites: Sequence[Suite], rows: int) -> list[SuiteResult]:
    with context.time_stage("audit"):
        own, others = suites[: len(context.run.suites)], suites[len(context.run.suites) :]
        if _may_wait(context):
            results = [*_by_one_engine(context, own), *(_kept_or_unasked(context, each) for each in others)]
        else:
            results = _by_one_engine(context, suites)
        after_tuning.measure_base(context, rows, partial(audit.measure, context, suites))
    return results


def _may_wait(context: Context) -> bool:
    """Return True if the base model can still be measured after the training, by transformers."""
    decides_on_bounds = context.run.thresholds.confidence != ON_FIGURES
    return decides_on_bounds and context.recipe.lora is not None and current_engine(context) == transformers()


def _kept_or_unasked(context: Context, suite: Suite) -> SuiteResult:
    """Return the results that an earlier run has stored, or an empty result with the planned number of prompts."""
    (kept,) = kept_figures.read_cached(context, [kept_figures.content_key(context, suite, transformers())])
    planned = len(sample(suite.prompts, context.recipe.audit.max_prompts))
    judge = "refusal" if suite.kind in HARMLESS else context.run.judge.name
    nothing = SuiteResult(*(suite.name, suite.kind, judge, 0, 0, 0, 0, None, 0.0, 1.0), planned=planned)
    return replace(kept, suite=suite.name) if kept else nothing


def _ask(suites: Sequence[Suite], context: Context, names: Collection[str]) -> list[SuiteResult]:
    return _by_one_engine(context, [suite for suite in suites if suite.name in names])


def _ask_first(context: Context, suites: Sequence[Suite], results: Sequence[SuiteResult]) -> list[SuiteResult]:
    """Ask the base model a few attacks of each suite in a disguise of the rows that has no results yet."""
    unasked = {each.suite for each in results if is_unasked(each)}
    found = [each for each in suites if each.name in unasked and each.kind == "mined" and each.name.startswith(OF_ROWS)]
    return _by_one_engine(context, [replace(each, prompts=tuple(sample(each.prompts, _WARNED))) for each in found])


def _by_one_engine(context: Context, suites: Sequence[Suite]) -> list[SuiteResult]:
    engine, specs = current_engine(context), {spec.name: spec for spec in context.run.suites}
    keys = [
        kept_figures.file_key(context, specs[suite.name], engine)
        if suite.kind in PLAIN
        else kept_figures.content_key(context, suite, engine)
        for suite in suites
    ]
    found = kept_figures.read_cached(context, keys)
    missing = [suite for suite, kept in zip(suites, found, strict=True) if kept is None]
    speaker, record = audit.by_engine(context, missing)
    if not is_same_engine(asdict(record), engine):
        return _by_one_engine(context, suites)  # the engine has failed: repeat with its replacement

    def measure(suites: Sequence[Suite]) -> list[SuiteResult]:
        return audit.measure(context, suites, None, None, speaker)

    return kept_figures.complete_cached(context, suites, keys, found, measure)
