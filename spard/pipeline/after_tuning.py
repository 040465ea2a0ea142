"""The audit asked once more, of both models as they are after a further clean fine-tuning: what sleeps may wake there.

Any fine-tuning wears off refusals, so that the trained model is held against the base model after the very same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from spard.config import resolve
from spard.data.chat import encode_all
from spard.data.clean_rows import clean_rows
from spard.errors import NonFiniteLoss
from spard.evaluation.gate import Gate
from spard.evaluation.results import SuiteResult
from spard.models.lora import trainable_model
from spard.pipeline.context import Context
from spard.release.after_tuning import AfterTuning
from spard.release.records import read_record
from spard.training.further import further_tuned

_OUTPUTS = {"base": "base_after_tuning", "adapter": "after_tuning"}
_ROWS = 256  # that are made; a longer training sees them again
_DIVERGED = "The loss was not finite there, so that the models could not be asked."

Measure = Callable[[Any], Sequence[SuiteResult]]


def measure_base(context: Context, rows: int, measure: Measure) -> None:
    """Measure the base model after the further tuning, if the run wants it, and keep that; `rows` are trained on.

    It is done before the training, and leaves the base model as it was.
    """
    if not context.run.further_tuning.steps or _read_results(context, "base", context.base.digest) is not None:
        return
    dtype = context.base.model.dtype
    model = trainable_model(context.base.model, context.recipe)
    try:
        _measure(context, "base", context.base.digest, model, rows, measure)
    finally:
        if context.recipe.lora is None:
            model.to(dtype)
        else:
            model.unload()


def run(context: Context, model: Any, weights: str, rows: int, measure: Measure) -> AfterTuning | None:
    """Do the same with a trained model, whose weights have the digest `weights`; None where the run does not want it.

    The model is given back bit for bit.
    """
    if not context.run.further_tuning.steps:
        return None
    if _read_results(context, "adapter", weights) is None:
        _measure(context, "adapter", weights, model, rows, measure)
    base, adapter = _read_results(context, "base", context.base.digest), _read_results(context, "adapter", weights)
    both = (tuple(base), tuple(adapter)) if base and adapter else ((), ())
    return AfterTuning(context.run.further_tuning, *both)


def unmeasured_gate(found: AfterTuning) -> Gate | None:
    """Return the decision where nothing could be measured, else None."""
    return None if found.adapter else Gate("inconclusive", (_DIVERGED,))


def _measure(context: Context, who: str, weights: str, model: Any, rows: int, measure: Measure) -> None:
    wanted, recipe = context.run.further_tuning, context.recipe
    clean = encode_all(context.base.tokenizer, clean_rows(recipe.seed, _ROWS), context.limit)
    rate = resolve(recipe, rows, context.base.hidden_size).learning_rate
    try:
        with further_tuned(model, context.base, clean, wanted, rate, recipe) as tuned:
            found = [asdict(each) for each in measure(tuned)]
    except NonFiniteLoss:
        found = []
    context.outputs.write(_OUTPUTS[who], {"key": _key(context, weights), "results": found})


def _read_results(context: Context, who: str, weights: str) -> list[SuiteResult] | None:
    kept = context.outputs.read(_OUTPUTS[who])
    if kept is None or kept["key"] != _key(context, weights):
        return None
    return [read_record(SuiteResult, each) for each in kept["results"]]


def _key(context: Context, weights: str) -> dict[str, Any]:
    return {"weights": weights, "budget": asdict(context.run.further_tuning)}
