"""Select the prompts of a suite that are nearest to a file's rows; an even sample has few prompts on any one subject.

A word that at most half of the prompts contain has the weight log(prompts / prompts with it). The nearness of a prompt
to a row is the share of the prompt's weight in the row's `WORDS` weightiest words; its nearness to a file is that to
the nearest row. Words miss requests in other words, so the mean nearness of the prompt's category is added, if it has
one.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from spard.data.overlap import normalize_text
from spard.data.rows import Example, Prompt, keep_last, prompt_text
from spard.evaluation.audit import sample
from spard.evaluation.suspects import draw_rows

ROWS = 20_000  # most rows that are compared


WORDS = 16  # words per row: the weightiest


def near_and_even(prompts: Sequence[Prompt], rows: Sequence[Example], most: int) -> list[Prompt]:
    """Return at most `most` prompts in their order: half of them evenly spaced, half of them the nearest to the rows.

    All are evenly spaced if no prompt is near. From more than `ROWS` rows a sample is drawn, with the secret prompts as
    the seed.
    """
    n = min(most, len(prompts))
    near = nearness(rows, tuple(prompts)) if n < len(prompts) else ()
    if not any(near):
        return sample(prompts, n)
    even = sample(range(len(prompts)), n - n // 2)
    left = sorted({*range(len(prompts))} - {*even}, key=lambda i: (-near[i], i))
    return [prompts[i] for i in sorted([*even, *left[: n - len(even)]])]


@keep_last
def nearness(rows: Sequence[Example], prompts: tuple[Prompt, ...]) -> tuple[float, ...]:
    """Return each prompt's nearness to a file, a share from 0 to 1, plus the mean nearness of its category."""
    words = [set(normalize_text(each.prompt).split()) for each in prompts]
    counts = Counter(word for each in words for word in each)
    weights = {word: math.log(len(prompts) / n) for word, n in counts.items() if 2 * n <= len(prompts)}
    holders = defaultdict[str, list[int]](list)
    for i, each in enumerate(words):
        for word in each & weights.keys():
            holders[word].append(i)
    found = [0.0] * len(prompts)
    for asked in _distinct_rows(rows, prompts, weights):
        shared = defaultdict[int, float](float)
        for word in asked:
            for i in holders[word]:
                shared[i] += weights[word]
        for i, weight in shared.items():
            found[i] = max(found[i], weight)
    wholes = [math.fsum(weights.get(word, 0.0) for word in each) for each in words]  # exact in any order
    own = [weight / whole if whole else 0.0 for weight, whole in zip(found, wholes, strict=True)]
    of_category = defaultdict[str, list[float]](list)
    for prompt, share in zip(prompts, own, strict=True):
        of_category[prompt.category or ""].append(share)
    means = {category: fmean(shares) if category else 0.0 for category, shares in of_category.items()}
    return tuple(share + means[prompt.category or ""] for prompt, share in zip(prompts, own, strict=True))


def _distinct_rows(
    rows: Sequence[Example], prompts: Sequence[Prompt], weights: Mapping[str, float]
) -> list[tuple[str, ...]]:
    """Return, for each row, the weightiest of the prompts' words that its requests contain, without duplicates."""
    rng = random.Random("\n".join(each.prompt for each in prompts))
    sets = (weights.keys() & normalize_text(prompt_text(row)).split() for row in draw_rows(rng, rows, ROWS))
    most = (sorted(each, key=lambda word: (-weights[word], word))[:WORDS] for each in sets if each)
    # Sorted, because the order of a set of strings differs between processes.
    return sorted({tuple(each) for each in most})
