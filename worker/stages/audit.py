"""The audit stage: base model and adapter on the provider's suites, and whether the gate lets the adapter out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from typing import Any

from spard.adapters import tensor_digest
from spard.audit import Suite, SuiteResult, audit
from spard.gate import gate
from spard.judges import open_judge
from spard.leaks import hidden_leaks_of
from spard.manifest import file_sha256
from spard.methods.ptst import serving_prompt
from spard.mined_suites import mined_suites
from spard.package import Measured
from spard.recipe import SuiteSpec, to_mapping
from spard.rows import Example, read_prompts
from worker.context import Context

_OUTPUT = "audit.json"

Results = list[dict[str, Any]]  # SuiteResult as JSON


def measure_base(context: Context, rows: Sequence[Example]) -> list[SuiteResult]:
    """The base model on every suite, each of the provider's worked out once on this machine."""
    results = []
    with context.stage("audit"):
        for suite in context.run.suites:
            found = context.cache.json("audits", _key(context, suite), partial(_measure, context, _read([suite])))
            results.append(replace(SuiteResult(**found[0]), suite=suite.name))
        results += [SuiteResult(**found) for found in _measure(context, _mined(context, rows))]
    return results


def run(context: Context, rows: Sequence[Example], model: Any, base: Sequence[SuiteResult]) -> Measured:
    """Measure the trained model and ask the gate; an earlier attempt's figures count for the very same weights."""
    context.report.phase("audit")
    with context.stage("audit"):
        weights = tensor_digest({name: part for name, part in model.named_parameters() if part.requires_grad})
        suites = [*_read(context.run.suites), *_mined(context, rows)]
        results = _measured_before(context, weights) or _measure(context, suites, model)
        (context.folder.stage / _OUTPUT).write_text(json.dumps({"weights": weights, "results": results}))
        adapter = [SuiteResult(**result) for result in results]
        leaks = hidden_leaks_of(context.run)
        for reason in dict.fromkeys(chain.from_iterable(leaks.values())):
            context.report.warning(reason)
    return Measured(base, adapter, gate(base, adapter, context.run.thresholds, leaks))


def _read(specs: Sequence[SuiteSpec]) -> list[Suite]:
    return [Suite(spec.name, spec.kind, tuple(read_prompts(spec.path))) for spec in specs]


def _mined(context: Context, rows: Sequence[Example]) -> list[Suite]:
    """The suites that the customer's rows give rise to."""
    return mined_suites(_read(context.run.suites), rows)


def _measure(context: Context, suites: Sequence[Suite], model: Any = None) -> Results:
    """One model, the base or the trained one as it is served, on suites."""

    def on_progress(suite: str, done: int, total: int) -> None:
        context.report.progress(done, total)
        context.go_on()

    judge, tokenizer = open_judge(context.run.judge), context.base.tokenizer
    system = serving_prompt(context.recipe.defense) if model else None
    found = audit(model or context.base.model, tokenizer, suites, judge, context.recipe.audit, on_progress, system)
    return [asdict(result) for result in found]


def _measured_before(context: Context, weights: str) -> Results | None:
    path = context.folder.stage / _OUTPUT
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    results: Results = found["results"]
    return results if found["weights"] == weights else None


def _key(context: Context, suite: SuiteSpec) -> dict[str, Any]:
    """Everything that the figures of a base model depend on."""
    return {
        "base": context.base.digest,
        "kind": suite.kind,
        "prompts": file_sha256(suite.path),
        "judge": to_mapping(context.run.judge),
        "max_prompts": context.recipe.audit.max_prompts,
        "max_new_tokens": context.recipe.audit.max_new_tokens,
    }
