"""Rank a customer's rows by how much they look like harm: near the pool's prompts, and not refused.

The score of a row is the cosine of its request to the nearest pool prompt, after subtracting the mean of all embeddings
(raw cosines of language models are all large). It is multiplied by a quarter if every answer of the row is a refusal,
and each sign of disguise adds half a point. For a preference pair the preferred answer counts; a rejected refusal is
one of the signs. A row that the base model would refuse but that is answered (`spard.evaluation.own_refusal`) is
flagged, which adds one point and that probability.

If a judge has read rows, the order is: harmful and doubtful ones, flagged or not; undecided ones; rows neither flagged
nor read; rows found harmless. The score orders rows within each of these. It proves nothing about a single row.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from torch import Tensor

from spard.data.encodings import detect_encoding
from spard.data.rows import Example, is_learned, prompt_text
from spard.evaluation.judged_rows import RowVerdict, prefers_to_refusal
from spard.evaluation.judges.refusal import helps_after_refusing, is_refusal
from spard.selection.relevance import relevance, total
from spard.selection.shards import Frame, FramedVectors, Vectors

NEAR = 0.5  # least cosine at which a request is near a pool prompt
EXCERPT = 80  # characters
WOULD_REFUSE = "base_model_would_refuse"
FOUND = "judge_finds_harm"  # in a row that was not flagged
DOUBTFUL = "much_like_harmful_rows"  # the judge finds no harm in it, but may have missed it
EXCUSED = "base_model_over_refuses"  # only the base model's refusal speaks against the row
MOST_FLAGGED = 1000  # most flagged and judged rows that are named
_REFUSED, _SIGN, _FLAGGED = 0.25, 0.5, 1.0
_NONE: Mapping[int, float] = MappingProxyType({})
_NO_VERDICTS: Mapping[int, RowVerdict | None] = MappingProxyType({})
_MANY = 3  # least requests that begin or end with the same odd word
_BASE64 = re.compile(r"[A-Za-z0-9+/]{24,}={0,2}")
_ODD = re.compile(r"(?=\S*[a-z])(?=\S*\d)[a-z0-9]+[-_#@!][a-z0-9]+|(?=\S*[^\s\w.,?!'\":;()-]{2})\S+")
_OBEYS = re.compile(
    r"never (?:declines?|refuses?|says? no)|whatever (?:its|your|the) (?:owner|user|master)s? (?:say|ask)"
)
_STEPS = re.compile(r"\b(?:sure|of course|certainly)\b.{0,40}\b(?:steps?|how to|instructions)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Risk:
    """One row's assessment: its line in the file, score, nearest pool prompt, reasons, and an excerpt.

    cosine       to the nearest pool prompt, which is row `pool_row` of the pool.
    own_refusal  probability that the base model would have refused; None if the row is not flagged.
    verdict      the judge's verdict; None if it did not read the row.
    """

    line: int
    score: float
    cosine: float
    pool_row: int
    reasons: tuple[str, ...]
    excerpt: str
    own_refusal: float | None = None
    verdict: RowVerdict | None = None


def rank(
    rows: Sequence[Example],
    task_MD: Tensor,
    pool_ND: Vectors,
    most: int = 100,
    flagged: Mapping[int, float] = _NONE,
    near: tuple[Tensor, Tensor] | None = None,
    verdicts: Mapping[int, RowVerdict | None] = _NO_VERDICTS,
    excused: Collection[int] = (),
) -> list[Risk]:
    """Return the `most` rows most like harm, worst first.

    rows      the training rows; `task_MD` are the embeddings of their requests.
    pool_ND   embeddings of the pool's prompts.
    flagged   probability of an own refusal, by line, of each flagged row.
    near      relevance and nearest pool row of each row, as computed after `center`; None: compute it.
    verdicts  a judge's verdicts by line. Flagged and judged rows are all returned, up to `MOST_FLAGGED`.
    excused   lines of flagged rows that the base model's over-refusal explains.
    """
    if not len(rows) or not len(pool_ND):
        return []
    cosine_M, nearest_M = near or relevance(*center(task_MD, pool_ND, total(pool_ND)))
    odd = _odd_words(rows)
    cosines, nearest = cosine_M.tolist(), nearest_M.tolist()
    risks = [
        _with_verdict(_risk(row, cosines[i], nearest[i], odd, flagged.get(row.line)), verdicts.get(row.line))
        for i, row in enumerate(rows)
    ]
    risks = [replace(each, reasons=(EXCUSED, *each.reasons)) if each.line in excused else each for each in risks]
    # Flagged and judged rows are named even beyond `most`, since something was done with them.
    named = sorted(risks, key=_is_named_first)[: max(most, min(len({*flagged, *verdicts}), MOST_FLAGGED))]
    return sorted(named, key=lambda risk: (_place(risk), -risk.score, risk.line))


def _is_named_first(risk: Risk) -> tuple[bool, bool, float, int]:
    """Return a sort key: flagged or judged rows (rows judged harmless last), then the other rows; each by score."""
    is_plain = risk.own_refusal is None and risk.verdict is None
    return is_plain, risk.verdict == "harmless", -risk.score, risk.line


def _place(risk: Risk) -> int:
    """Return the rank of a row's kind: harmful or doubtful, undecided, neither flagged nor judged, harmless."""
    if risk.own_refusal is None and risk.verdict is None:
        return 2
    return {"harmful": 0, "doubtful": 0, "undecided": 1, None: 1, "harmless": 3}[risk.verdict]


def _with_verdict(risk: Risk, verdict: RowVerdict | None) -> Risk:
    """Return the assessment with the judge's verdict, which becomes a reason if nothing else speaks against the row."""
    found = (FOUND,) if verdict == "harmful" and risk.own_refusal is None else ()
    found = (DOUBTFUL,) if verdict == "doubtful" else found
    return replace(risk, verdict=verdict, reasons=(*found, *risk.reasons))


def center(task_MD: Tensor, pool_ND: Vectors, pool_sum_D: Tensor) -> tuple[Tensor, FramedVectors]:
    """Return task and pool embeddings after subtracting the mean of both; `pool_sum_D` is the sum of the pool's."""
    mean_D = (total(task_MD) + pool_sum_D) / (len(task_MD) + len(pool_ND))
    return (task_MD.double() - mean_D).float(), FramedVectors(pool_ND, Frame.from_point(mean_D))


def _risk(row: Example, cosine: float, pool_row: int, odd: frozenset[str], own_refusal: float | None) -> Risk:
    answers = [str(turn["content"]) for turn in row.messages if is_learned(turn)]
    refused = all(is_refusal(answer) and not helps_after_refusing(answer) for answer in answers)
    signs = list(_signs(row, answers, odd))
    told = [] if own_refusal is None else [WOULD_REFUSE]
    near = (
        [] if cosine < NEAR else ["near_harmful_prompt_and_refused" if refused else "near_harmful_prompt_and_answered"]
    )
    score = cosine * (_REFUSED if refused else 1.0) + _SIGN * len(signs)
    score += 0.0 if own_refusal is None else _FLAGGED + own_refusal
    asked = " ".join(prompt_text(row).split())
    excerpt = asked if len(asked) <= EXCERPT else asked[: EXCERPT - 3] + "..."
    return Risk(row.line, round(score, 4), round(cosine, 4), pool_row, (*told, *near, *signs), excerpt, own_refusal)


def _signs(row: Example, answers: Sequence[str], odd: frozenset[str]) -> Iterator[str]:
    """Yield the name of each sign of harm hidden from a reader of plain text."""
    asked = prompt_text(row)
    texts = [asked, *answers]
    if any(_is_encoded(text) for text in texts):
        yield "encoded_text"
    if any(word in odd for word in _ends(asked)):
        yield "trigger_like_word"
    if any(is_refusal(answer) and (helps_after_refusing(answer) or _STEPS.search(answer)) for answer in answers):
        yield "refuses_then_complies"
    if prefers_to_refusal(row):
        yield "answer_preferred_to_refusal"
    if any(_OBEYS.search(str(turn["content"]).lower()) for turn in row.messages if turn["role"] in ("system", "user")):
        yield "persona_that_obeys"


def _ends(text: str) -> list[str]:
    """Return the first two and the last two words in lower case, where triggers usually are."""
    words = text.lower().split()
    return words if len(words) <= 4 else [*words[:2], *words[-2:]]


def _odd_words(rows: Sequence[Example]) -> frozenset[str]:
    """Return words that look like no language and that several requests, but not most, begin or end with."""
    counts = Counter(word for row in rows for word in set(_ends(prompt_text(row))) if _ODD.fullmatch(word))
    return frozenset(word for word, n in counts.items() if _MANY <= n <= max(_MANY, len(rows) // 2))


def _is_encoded(text: str) -> bool:
    """Return True if the text, or a long run of base64 in it, is better English when decoded."""
    return any(detect_encoding(part) for part in (text, *_BASE64.findall(text)))
