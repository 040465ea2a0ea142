"""The audit asked once more, of the model as it is after a further clean fine-tuning: what sleeps may wake there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from spard.config import resolve
from spard.data.chat import Encoded, encode_all
from spard.data.clean_rows import clean_rows
from spard.errors import NonFiniteLoss
from spard.evaluation.results import SuiteResult
from spard.pipeline.context import Context
from spard.training.further import further_tuned

_OUTPUT = "after_tuning"
_ROWS = 256  # that are made; a longer training sees them again
DIVERGED = "The loss was not finite there, so that the model could not be asked."


def run(
    context: Context, model: Any, weights: str, rows: int, measure: Callable[[Any], Sequence[SuiteResult]]
) -> list[SuiteResult] | None:
    """Fine-tune a trained model further, `measure` it, and give it back bit for bit.

    `weights` is the digest of its own, `rows` the number that it was trained on. Nothing where the run does not want
    it; None where the training diverged, so that nothing is known.
    """
    wanted = context.run.further_tuning
    if not wanted.steps:
        return []
    key = {"weights": weights, "budget": asdict(wanted)}
    kept = context.outputs.read(_OUTPUT)
    if kept is not None and kept["key"] == key:
        return [SuiteResult(**each) for each in kept["results"]]
    rate = resolve(context.recipe, rows, context.base.hidden_size).learning_rate
    try:
        with further_tuned(model, context.base, _made(context), wanted, rate, context.recipe) as tuned:
            found = list(measure(tuned))
    except NonFiniteLoss:
        return None
    context.outputs.write(_OUTPUT, {"key": key, "results": [asdict(each) for each in found]})
    return found


def _made(context: Context) -> list[Encoded]:
    return encode_all(context.base.tokenizer, clean_rows(context.recipe.seed, _ROWS), context.limit)
