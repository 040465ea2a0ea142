"""The encoded safe set: the selected pool rows, with the answers that the selection asks for, and their variants."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spard.config import JudgeSpec, Recipe
from spard.data.chat import Encoded
from spard.data.rows import Example
from spard.models.base import Base
from spard.pipeline.augment import variants
from spard.pipeline.self_answers import answer_rows
from spard.release.row_records import SafeAnswers


def safe_set(
    base: Base,
    chosen: Sequence[Example],
    rows: Sequence[Example],
    recipe: Recipe,
    judge: JudgeSpec,
    limit: int,
    on_answers: Callable[[SafeAnswers], None] | None = None,
) -> list[Encoded]:
    """Return the selected pool rows, followed by the variants derived from the customer's `rows`.

    `on_answers` is called with the result of comparing the pool's answers with the base model's, if they were compared.
    """
    chosen, pool, found = answer_rows(base, chosen, recipe.selection, judge, limit)
    if found and on_answers:
        on_answers(found)
    kinds = recipe.defense.augmentations
    return [*pool, *(variants(base.tokenizer, chosen, rows, kinds, recipe.seed, limit) if kinds else [])]
