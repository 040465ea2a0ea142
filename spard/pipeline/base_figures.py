"""The base model's figures: on the provider's suites once for all runs that share a cache, by one engine each time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from spard.config import ON_FIGURES
from spard.config.run_spec import SuiteSpec, to_mapping
from spard.data.rows import Example
from spard.digests import file_sha256
from spard.evaluation.ask import Speaker
from spard.evaluation.audit import Suite
from spard.evaluation.bounded import in_dress
from spard.evaluation.results import SuiteResult
from spard.evaluation.vllm_offline.engine import Engine, transformers
from spard.pipeline import after_tuning, audit
from spard.pipeline.audit_engine import BaseFigures, engine_of, is_of
from spard.pipeline.context import Context
from spard.pipeline.judge_false_positives import takes_answers_for_harm
from spard.release.records import read_record
from spard.release.version import AUDIT_VERSION


def base_figures(context: Context, examples: Sequence[Example]) -> BaseFigures:
    """Measure the base model on every suite, and return what knows its figures.

    It is done before training, because full fine-tuning leaves no base model.
    """
    found = BaseFigures(context, partial(_measured, context, examples))
    _warn_of_dresses(context, found.results())
    return found


def base_key(context: Context) -> dict[str, Any]:
    """Return everything that transformers' figures of a base model depend on, its suites as they are in their files."""
    return {"suites": [_key(context, spec, transformers()) for spec in context.run.suites]}


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
    engine, mined = engine_of(context), audit.mined_of(context, examples)
    shared = list(zip(context.run.suites, audit.read_suites(context), strict=True))
    cached = {spec.name: _cached(context, _key(context, spec, engine)) for spec, _ in shared}
    missing = [suite for spec, suite in shared if cached[spec.name] is None]
    speaker, record = audit.by_engine(context, [*missing, *mined])
    if not is_of(asdict(record), engine):
        return _by_one_engine(context, examples)  # it has failed, and another one answers from now on
    results = []
    for spec, suite in shared:
        make = partial(_measure, context, suite, speaker)
        found = cached[spec.name] or context.cache.json("audits", _key(context, spec, engine), make)
        results.append(replace(read_record(SuiteResult, found[0]), suite=spec.name))
    return results + audit.measure(context, mined, None, None, speaker)


class _NotCached(Exception):
    """The figures of a base model on a suite are not there yet."""


def _cached(context: Context, key: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    def absent() -> None:
        raise _NotCached

    try:
        found: list[dict[str, Any]] = context.cache.json("audits", key, absent)
    except _NotCached:
        return None
    return found


def _measure(context: Context, suite: Suite, speaker: Speaker) -> list[dict[str, Any]]:
    return [asdict(result) for result in audit.measure(context, [suite], None, None, speaker)]


def _key(context: Context, spec: SuiteSpec, engine: Engine) -> dict[str, Any]:
    """Everything that the figures of a base model depend on."""
    key = {
        "base": context.base.digest,
        "audit": AUDIT_VERSION,
        "engine": asdict(engine),
        "kind": spec.kind,
        "prompts": file_sha256(spec.path),
        "judge": to_mapping(context.run.judge),
        "max_prompts": context.recipe.audit.max_prompts,
        "max_new_tokens": context.recipe.audit.max_new_tokens,
        "counts": "by_category, unasked_harm",  # which figures of earlier versions lack
    }
    key |= context.rounding | ({"language": spec.language} if spec.language else {})
    ending = context.recipe.ending
    return key | {"without_share_of": ending.prompts} if ending.compares else key
