"""Which rows of a customer's file look like harm: near what the safety pool refuses, and not refused there.

The score of a row is the cosine of its request to the nearest pool prompt, both seen from the mean of all embeddings
(raw cosines of language models are all large), a quarter of it when every answer of the row is a refusal, and half a
point for each sign of disguise in its text. Of a preference pair the preferred answer is the row's; that the other one
is a refusal counts as a sign. A row that the base model would refuse and that is answered
(`spard.evaluation.own_refusal`) is flagged: it gets a point, and that probability. Where a judge has read the flagged
rows, those that it finds harmful come first, flagged or not, those that it could not decide on next, then all else
that was not flagged, and last what it finds harmless. The score orders the rows of each of these; it proves nothing
about one.
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
from spard.selection.shards import Frame, Framed, Vectors

NEAR = 0.5  # the cosine from which a request counts as near a pool prompt
EXCERPT = 80  # characters
WOULD_REFUSE = "base_model_would_refuse"
FOUND = "judge_finds_harm"  # in a row that the base model would hardly have refused
DOUBTFUL = "much_like_harmful_rows"  # of a row in which the judge finds no harm
EXCUSED = "base_model_over_refuses"  # of a row that nothing but the base model speaks against
MOST_FLAGGED = 1000  # rows that are named however many there are of them
_REFUSED, _SIGN, _FLAGGED = 0.25, 0.5, 1.0
_NONE: Mapping[int, float] = MappingProxyType({})
_NO_VERDICTS: Mapping[int, RowVerdict | None] = MappingProxyType({})
_MANY = 3  # rows that hold the same odd word at an end of their request
_BASE64 = re.compile(r"[A-Za-z0-9+/]{24,}={0,2}")
_ODD = re.compile(r"(?=\S*[a-z])(?=\S*\d)[a-z0-9]+[-_#@!][a-z0-9]+|(?=\S*[^\s\w.,?!'\":;()-]{2})\S+")
_OBEYS = re.compile(
    r"never (?:declines?|refuses?|says? no)|whatever (?:its|your|the) (?:owner|user|master)s? (?:say|ask)"
)
_STEPS = re.compile(r"\b(?:sure|of course|certainly)\b.{0,40}\b(?:steps?|how to|instructions)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Risk:
    """One row of the file: its line, how much it looks like harm, the pool prompt nearest to it, and the reasons.

    `own_refusal` is the probability that the base model would have refused; None for rows that are not flagged by it.
    `verdict` is the judge's on a row that is flagged or that it found; None for all others.
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
    """Return the `most` rows most like harm, the worst first; `task_MD` are the embeddings of their requests.

    `flagged` is the probability of a refusal of the base model's by the line of each row that was flagged for it.
    `verdicts` are a judge's on these and on others, by line; all of both are returned, up to `MOST_FLAGGED`. `near` is
    the relevance of both sides as `center` gives them, where it is known. `excused` are the lines of flagged rows
    that the base model's over-refusal explains.
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
    named = sorted(risks, key=_is_named_first)[: max(most, min(len({*flagged, *verdicts}), MOST_FLAGGED))]
    return sorted(named, key=lambda risk: (_place(risk), -risk.score, risk.line))


def _is_named_first(risk: Risk) -> tuple[bool, bool, float, int]:
    """Return what decides which rows are named at all: the flagged ones first, and of them what is harm."""
    is_plain = risk.own_refusal is None and risk.verdict is None
    return is_plain, risk.verdict == "harmless", -risk.score, risk.line


def _place(risk: Risk) -> int:
    """Return the place of a row's kind among the rows that are named."""
    if risk.own_refusal is None and risk.verdict is None:
        return 2
    return {"harmful": 0, "doubtful": 0, "undecided": 1, None: 1, "harmless": 3}[risk.verdict]


def _with_verdict(risk: Risk, verdict: RowVerdict | None) -> Risk:
    """Return the row with the judge's verdict, which is a reason where nothing else has found the row."""
    found = (FOUND,) if verdict == "harmful" and risk.own_refusal is None else ()
    found = (DOUBTFUL,) if verdict == "doubtful" else found
    return replace(risk, verdict=verdict, reasons=(*found, *risk.reasons))


def center(task_MD: Tensor, pool_ND: Vectors, pool_sum_D: Tensor) -> tuple[Tensor, Framed]:
    """Return both sides as they are from the mean of all embeddings, given the sum of the pool's."""
    mean_D = (total(task_MD) + pool_sum_D) / (len(task_MD) + len(pool_ND))
    return (task_MD.double() - mean_D).float(), Framed(pool_ND, Frame.from_point(mean_D))


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
    """Yield what may hide harm from a reader of plain text: one name for each kind that is found."""
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
    """Return the first two and the last two words, where triggers stand."""
    words = text.lower().split()
    return words if len(words) <= 4 else [*words[:2], *words[-2:]]


def _odd_words(rows: Sequence[Example]) -> frozenset[str]:
    """Words of no language that several requests, but not most, begin or end with."""
    counts = Counter(word for row in rows for word in set(_ends(prompt_text(row))) if _ODD.fullmatch(word))
    return frozenset(word for word, n in counts.items() if _MANY <= n <= max(_MANY, len(rows) // 2))


def _is_encoded(text: str) -> bool:
    """Return whether the text, or a long run of base64 in it, makes better English decoded."""
    return any(detect_encoding(part) for part in (text, *_BASE64.findall(text)))
