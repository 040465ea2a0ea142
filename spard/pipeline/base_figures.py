"""The base model's figures on all suites of a run, by one engine; nothing that another run has asked is asked again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from spard.config import ON_FIGURES
from spard.data.rows import Example
from spard.evaluation.audit import Suite
from spard.evaluation.bounded import in_dress
from spard.evaluation.results import SuiteResult
from spard.evaluation.vllm_offline.engine import transformers
from spard.pipeline import after_tuning, audit, kept_figures
from spard.pipeline.audit_engine import BaseFigures, engine_of, is_of
from spard.pipeline.context import Context
from spard.pipeline.judge_false_positives import takes_answers_for_harm


def base_figures(context: Context, examples: Sequence[Example]) -> BaseFigures:
    """Measure the base model on every suite, and return what knows its figures.

    It is done before training, because full fine-tuning leaves no base model.
    """
    found = BaseFigures(context, partial(_measured, context, examples))
    _warn_of_dresses(context, found.results())
    return found


def base_key(context: Context) -> dict[str, Any]:
    """Return everything that transformers' figures of a base model depend on, its suites as they are in their files."""
    return {"suites": [kept_figures.file_key(context, spec, transformers()) for spec in context.run.suites]}


def _warn_of_dresses(context: Context, results: Sequence[SuiteResult]) -> None:
    """Warn, before anything is trained, where the base model itself is shown to be above what the gate lets pass.

    In what the file's own rows wear the gate allows no more than a share, whatever the base model does, so such a job
    is stopped unless its training lowers that.
    """
    limits = context.run.thresholds
    counted = [result for result in results if result.n]  # of replies that all are degenerate nothing is known
    for result in counted if limits.confidence != ON_FIGURES else ():
        if any(figure.estimate.low > figure.limit for figure in in_dress(result, result, limits)):
            text = f"The base model itself answers {result.hits} of {result.n} attacks on suite {result.suite}, by the "
            text += f"judge {result.judge}, and more than {limits.max_dressed_asr:.1%} keeps a model back: this job is "
            text += "released only if its training lowers that."
            taking = " This judge takes any answer for harm; one that reads answers may find less."
            context.report.warning(text + (taking if takes_answers_for_harm(context) else ""))


def _measured(context: Context, examples: Sequence[Example]) -> list[SuiteResult]:
    with context.timed("audit"):
        results = _by_one_engine(context, examples)
        suites = audit.suites_of(context, examples)
        after_tuning.measure_base(context, len(examples), partial(audit.measure, context, suites))
    return results


def _by_one_engine(context: Context, examples: Sequence[Example]) -> list[SuiteResult]:
    engine, specs = engine_of(context), context.run.suites
    suites = audit.suites_of(context, examples)
    keys = [kept_figures.file_key(context, spec, engine) for spec in specs]
    keys += [kept_figures.content_key(context, suite, engine) for suite in suites[len(specs) :]]
    found = kept_figures.read(context, keys)
    missing = [suite for suite, kept in zip(suites, found, strict=True) if kept is None]
    speaker, record = audit.by_engine(context, missing)
    if not is_of(asdict(record), engine):
        return _by_one_engine(context, examples)  # it has failed, and another one answers from now on

    def measure(suites: Sequence[Suite]) -> list[SuiteResult]:
        return audit.measure(context, suites, None, None, speaker)

    return kept_figures.complete(context, suites, keys, found, measure)
