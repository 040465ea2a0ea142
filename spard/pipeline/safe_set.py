"""The safe set as tokens: the selected pool rows, their answers as the selection asks for, and variants of them."""

from __future__ import annotations

from collections.abc import Sequence

from spard.config import JudgeSpec, Recipe
from spard.data.chat import Encoded, encode_all
from spard.data.rows import Example
from spard.evaluation.judges import open_judge
from spard.models.base import Base
from spard.pipeline.augment import variants
from spard.pipeline.self_answers import MAX_NEW_TOKENS, with_own_answers


def safe_set(
    base: Base, chosen: Sequence[Example], rows: Sequence[Example], recipe: Recipe, judge: JudgeSpec, limit: int
) -> list[Encoded]:
    """Return the selected pool rows and, after them, the variants derived from the customer's `rows`."""
    pool = encode_all(base.tokenizer, chosen, limit)
    if recipe.selection.safe_answers == "self":
        own = with_own_answers(base, chosen, open_judge(judge))
        encoded = encode_all(base.tokenizer, own, limit + MAX_NEW_TOKENS)
        fits = [len(row.ids) <= limit for row in encoded]
        chosen = [mine if fit else theirs for mine, theirs, fit in zip(own, chosen, fits, strict=True)]
        pool = [mine if fit else theirs for mine, theirs, fit in zip(encoded, pool, fits, strict=True)]
    kinds = recipe.defense.augmentations
    return [*pool, *(variants(base.tokenizer, chosen, rows, kinds, recipe.seed, limit) if kinds else [])]
