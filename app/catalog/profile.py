"""What the rows of a pool or a suite are like: lengths, writing systems, near duplicates, benign rows."""

from __future__ import annotations

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence

from pydantic import BaseModel

from spard.data.clusters import clusters
from spard.data.row_rules import is_benign

_LETTERS = 200  # of a prompt that are looked at
_GROUPS = 10  # of near duplicates that are listed
_LINES = 20  # of a group that are listed

Numbered = tuple[int, dict[str, object]]


class Lengths(BaseModel):
    """How many words texts have."""

    median: int
    p95: int
    longest: int


class CorpusProfile(BaseModel):
    """The rows of a pool or a suite. `near_duplicates` are the rows that a group of alike prompts has beside its first.

    `scripts` counts prompts by the writing system of most of their letters, as Unicode names it; `groups` are the
    lines of the largest groups. Prompts are alike by the rule with which the gate looks for leaks.
    """

    rows: int
    benign_rows: int
    prompt_words: Lengths
    answer_words: Lengths | None
    scripts: dict[str, int]
    near_duplicates: int
    groups: list[list[int]]


def profile(rows: Sequence[Numbered]) -> CorpusProfile:
    """Describe rows, each with the number of its line; there is at least one."""
    prompts = [str(row["prompt"]) for _, row in rows]
    answers = [str(text) for _, row in rows if (text := row.get("safe", row.get("answer"))) is not None]
    found: defaultdict[int, list[int]] = defaultdict(list)
    for (line, _), label in zip(rows, clusters(prompts), strict=True):
        found[label].append(line)
    groups = sorted((group for group in found.values() if len(group) > 1), key=lambda group: (-len(group), group))
    return CorpusProfile(
        rows=len(rows),
        benign_rows=sum(is_benign(row) for _, row in rows),
        prompt_words=_lengths(prompts),
        answer_words=_lengths(answers) if answers else None,
        scripts=dict(Counter(map(_script, prompts)).most_common()),
        near_duplicates=sum(len(group) - 1 for group in groups),
        groups=[group[:_LINES] for group in groups[:_GROUPS]],
    )


def _lengths(texts: Sequence[str]) -> Lengths:
    counts = sorted(len(text.split()) for text in texts)
    return Lengths(median=counts[len(counts) // 2], p95=counts[(len(counts) - 1) * 95 // 100], longest=counts[-1])


def _script(text: str) -> str:
    """Return the first word of the Unicode names of most of a text's letters: LATIN, CYRILLIC, CJK, ..."""
    letters = [char for char in text if char.isalpha()][:_LETTERS]
    names = Counter(unicodedata.name(char, "UNKNOWN").split()[0] for char in letters)
    return names.most_common(1)[0][0].capitalize() if names else "None"


def benign_warnings(benign_rows: int | None) -> list[str]:
    """Warn of a pool that has no benign rows; None, for a pool that nobody has counted, warns of nothing."""
    if benign_rows != 0:
        return []
    return [
        'The safety pool has no benign rows ({"prompt": ..., "benign": true}): nothing holds what the model answers. '
        "Models trained with it refuse more harmless requests, and the gate stops jobs for that. Import it with "
        "harmless prompts that look like the harmful ones, about as many as safe rows."
    ]
