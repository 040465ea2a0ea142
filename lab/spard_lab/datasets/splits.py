"""Assign prompts to splits so that no training prompt contains an audit prompt, by the leak rule of the audit.

If the authors provide a test or development file, a prompt that contains one of its prompts (the same words, a longer
text around them, or nearly the same: `spard.data.overlap`) is left out of training. Splits that are cut out of a file
consist of whole clusters of near duplicates (`spard.data.overlap`), in the order of their smallest digest, so the
splits do not depend on the order of rows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import cast

from spard.data.overlap import clusters, normalize_text, rows_holding
from spard_lab.datasets.base import Split


def place(
    prompts: Sequence[str],
    given: Sequence[Split | None],
    shares: Mapping[Split, float],
    rest: Split,
    most: Mapping[Split, int],
) -> list[Split | None]:
    """Return the split of each prompt, or None if it contains a held-out prompt and is left out.

    given   split of each prompt that its file or authors decide, else None
    shares  shares of the undecided prompts for each split; ignored for splits that occur in `given`
    rest    the split of the remaining prompts
    most    maximal number of prompts of a split that is cut out
    """
    found, near = list(given), set[int]()
    # Test prompts take precedence over development prompts, and these over training prompts.
    for held, below in (("test", ("dev", "train", None)), ("dev", ("train", None))):
        asked = [prompt for prompt, split in zip(prompts, given, strict=True) if split == held]
        lower = [i for i, split in enumerate(given) if split in below]
        near |= {lower[i] for i in rows_holding(asked, [prompts[i] for i in lower])} if asked else set()
    free = [i for i, split in enumerate(given) if split is None and i not in near]
    cut = {split: share for split, share in shares.items() if split not in given}
    for i, split in zip(free, _cut([prompts[i] for i in free], cut, rest, most), strict=True):
        found[i] = split
    return [None if i in near else split for i, split in enumerate(found)]


def groups(prompts: Sequence[str]) -> list[list[int]]:
    """Return the indices of the prompts by cluster, clusters in the order of their smallest digest."""
    members = defaultdict[int, list[int]](list)
    for i, label in enumerate(clusters(prompts)):
        members[label].append(i)
    return sorted(members.values(), key=lambda group: min(_digest(prompts[i]) for i in group))


def _cut(prompts: Sequence[str], shares: Mapping[Split, float], rest: Split, most: Mapping[Split, int]) -> list[Split]:
    found: list[Split | None] = [None] * len(prompts)
    seen, taken = 0, Counter[Split]()
    for group in groups(prompts):
        seen += len(group)
        # The shares are of the prompts seen so far, so a split fills evenly and not from the first clusters.
        room = {split: min(int(share * seen), most.get(split, seen)) for split, share in shares.items()}
        split = next((each for each in shares if taken[each] + len(group) <= room[each]), rest)
        taken[split] += len(group)
        for i in group:
            found[i] = split
    return cast("list[Split]", found)


def _digest(prompt: str) -> bytes:
    return sha256(normalize_text(prompt).encode()).digest()
