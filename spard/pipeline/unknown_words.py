"""A warning, before the training, that the base model was never trained on text like the file's."""

from __future__ import annotations

import math

from spard.pipeline.context import Context
from spard.pipeline.rows import Rows
from spard.training.references import evaluate_validation

LOOKED_AT = 16  # number of rows, evenly spaced
CLEARLY = 1.35
"""Warn if the base model's loss is above this multiple of the loss of a uniform guess among all tokens.

A model with random weights stays below it. A trained model is far below it on text like its training data, and above it
on other text, whose tokens it has learned not to expect.
"""


def warn_of_unknown_words(context: Context, rows: Rows) -> None:
    """Warn if the base model's loss on the file's answers is clearly above the loss of a uniform guess."""
    # The base model alone is measured, which says nothing of a run that starts from an adapter.
    if context.recipe.dpo is not None or context.run.start_from is not None:
        return
    places = [i * len(rows.task) // LOOKED_AT for i in range(LOOKED_AT)]
    loss = evaluate_validation(context.base, rows.task, context.recipe, None, sorted(set(places))).loss
    by_chance = math.log(context.base.model.get_input_embeddings().weight.shape[0])
    if loss > CLEARLY * by_chance:
        text = f"The base model has not learned words like your file's: it expects its answers with {loss:.1f} nats a "
        text += f"token, and by guessing among all tokens it would be {by_chance:.1f}. Training will hardly teach them"
        context.report.warning(f"{text}; choose a base model that has read such text.")
