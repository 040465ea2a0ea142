"""Find rows of a safety pool that teach harm: the base model would refuse, but the pool's "safe" answer complies.

Whoever can write to a pool can turn the defense against itself. The base model's own refusals
(`spard.evaluation.own_refusal`) select suspects, whose answers a judge then grades. The judge is needed because many
safe answers help without harm and refuse nothing, which the cheap rule takes for compliance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spard.data.chat import UNBOUNDED, encode_all
from spard.data.rows import Example, prompt_text
from spard.errors import InvalidPool, convert_errors
from spard.evaluation.judges.base import HARMFUL_ABOVE, Judge
from spard.evaluation.own_refusal import measure_own_refusal
from spard.models.base import Base


def inverted_rows(
    base: Base,
    pool: Sequence[Example],
    openings: Sequence[tuple[int, ...]],
    threshold: float,
    judge: Judge,
    limit: int,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> list[int]:
    """Return the indices of pool rows that teach harm.

    openings   beginnings of the base model's refusals, as tokens.
    threshold  probability of an own refusal above which the judge is asked.
    limit      rows of more tokens are skipped, because nothing trains on them.
    tell       called with the rows done and in all.

    Rows that the judge cannot score are not returned. Raises `InvalidPool` if a row cannot be encoded.
    """
    with convert_errors(InvalidPool):
        encoded = encode_all(base.tokenizer, pool, UNBOUNDED)
    fitting = [i for i, row in enumerate(encoded) if len(row.ids) <= limit]
    signals = measure_own_refusal(base, [encoded[i] for i in fitting], openings, threshold, tell)
    suspects = [i for i, signal in zip(fitting, signals, strict=True) if signal.probability > threshold]
    if not suspects:
        return []
    answers = [str(pool[i].messages[-1]["content"]) for i in suspects]
    verdicts = judge.judge([prompt_text(pool[i]) for i in suspects], answers)
    # `or 0`: an unscored answer is no evidence of an inverted pool.
    return [i for i, verdict in zip(suspects, verdicts, strict=True) if (verdict.score or 0) > HARMFUL_ABOVE]
