"""Profile the rows of a pool or suite: lengths, writing systems, near duplicates, benign rows."""

from __future__ import annotations

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence

from pydantic import BaseModel

from spard.data.overlap import clusters
from spard.data.row_rules import is_benign

_LETTERS = 200  # letters of a prompt that decide its script
_GROUPS = 10  # listed groups of near duplicates
_LINES = 20  # listed lines of a group

Numbered = tuple[int, dict[str, object]]


class Lengths(BaseModel):
    """Lengths of texts, in words."""

    median: int
    p95: int
    longest: int


class CorpusProfile(BaseModel):
    """The profile of a pool's or suite's rows.

    `near_duplicates` counts all rows of groups of similar prompts except the first of each group, and `groups` lists
    the lines of the largest groups; prompts are similar by the gate's rule for leaks. `scripts` counts prompts by the
    writing system of most of their letters, as Unicode names it.
    """

    rows: int
    benign_rows: int
    prompt_words: Lengths
    answer_words: Lengths | None
    scripts: dict[str, int]
    near_duplicates: int
    groups: list[list[int]]


def profile(rows: Sequence[Numbered]) -> CorpusProfile:
    """Return the profile of at least one row; each row comes with its line number."""
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
    """Return the script of most of a text's letters, from their Unicode names: Latin, Cyrillic, Cjk, ... or None."""
    letters = [char for char in text if char.isalpha()][:_LETTERS]
    names = Counter(unicodedata.name(char, "UNKNOWN").split()[0] for char in letters)
    return names.most_common(1)[0][0].capitalize() if names else "None"


def benign_warnings(benign_rows: int | None) -> list[str]:
    """Return a warning for a pool with 0 benign rows; none if their number is unknown (None)."""
    if benign_rows != 0:
        return []
    return [
        'The safety pool has no benign rows ({"prompt": ..., "benign": true}), so nothing anchors harmless answers. '
        "Models trained with it refuse more harmless requests, and the gate stops jobs for that. Import it with "
        "harmless prompts that look like the harmful ones, about as many as safe rows."
    ]
