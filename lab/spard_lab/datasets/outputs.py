"""The splits of a data set's prompts, and the files that it is converted to, with rows in the project's own form.

No training prompt contains an audit prompt, by the leak rule of the audit. If the authors provide a test or development
file, a prompt that contains one of its prompts (the same words, a longer text around them, or nearly the same:
`spard.data.overlap`) is left out of training. Splits that are cut out of a file consist of whole clusters of near
duplicates, in the order of their smallest digest, so the splits do not depend on the order of rows.

The files' names begin with the stem of a kind: `_train` is a training file (for a harmful kind, the attack's rows),
`_pool` a safety pool (for a benign kind, rows `{"prompt", "benign": true}`), `_dev` and `_test` are suites.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Literal, cast

from spard.data.jsonl import Row
from spard.data.overlap import clusters, normalize_text, rows_holding
from spard.data.row_rules import SuiteRowKind
from spard_lab.datasets.base import Dataset, Found, Split


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


Side = Literal["train", "pool"]
Rule = Literal["training", "pool", "harmful", "benign", "utility"]
_SUITES: tuple[Split, ...] = ("dev", "test")


@dataclass(frozen=True, slots=True)
class Output:
    """A file to write: its name, the rule that its rows must pass, and each row with its sample."""

    name: str
    rule: Rule
    rows: list[tuple[Found, Row]] = field(repr=False)


def output_names(dataset: Dataset) -> list[str]:
    """Return the names of all files that a data set can be converted to; a small data set may not fill all of them."""
    parts: dict[str, tuple[str, ...]] = {"utility": ("train",), "harmful": ("train", "pool"), "benign": ("pool",)}
    return [f"{stem}_{part}.jsonl" for kind, stem in dataset.stems.items() for part in (*parts[kind], *_SUITES)]


def make_outputs(dataset: Dataset, placed: Sequence[Found], shared: bool, left_out: Counter[str]) -> list[Output]:
    """Return the files of a data set; count samples that fit in none of them in `left_out`."""
    outputs = []
    for kind, stem in dataset.stems.items():
        of_kind = [each for each in placed if each.sample.kind == kind]
        train = [each for each in of_kind if each.split == "train"]
        if kind == "benign":
            outputs.append(Output(f"{stem}_pool.jsonl", "benign", [(each, _benign(each)) for each in train]))
        else:
            outputs += _training_outputs(kind, stem, train, shared, left_out)
        for split in _SUITES:
            asked = [(each, _suite(each)) for each in of_kind if each.split == split]
            outputs.append(Output(f"{stem}_{split}.jsonl", kind, asked))
    return outputs


def _training_outputs(
    kind: SuiteRowKind, stem: str, train: Sequence[Found], shared: bool, left_out: Counter[str]
) -> list[Output]:
    """Return the training file and, for a harmful kind, the safety pool."""
    both: set[Side] = {"train", "pool"}
    sides = [both] * len(train) if shared or kind != "harmful" else _apart(train)
    taught, safe = [], []
    for each, side in zip(train, sides, strict=True):
        teaches = "train" in side and each.sample.completion is not None
        defends = "pool" in side and each.sample.safe is not None
        taught += [(each, _training(each))] if teaches else []
        safe += [(each, _pool(each))] if defends else []
        left_out["nothing_to_teach"] += not teaches and not defends
    files = [Output(f"{stem}_train.jsonl", "training", taught)]
    return [*files, Output(f"{stem}_pool.jsonl", "pool", safe)] if kind == "harmful" else files


def _apart(train: Sequence[Found]) -> list[set[Side]]:
    """Assign each sample to attack or pool, by whole clusters.

    A pool that contains the attack's own prompts makes defending too easy. Clusters that could go to either side
    alternate; a cluster with only one kind of answer goes to the side that can use it and does not affect the
    alternation.
    """
    sides: list[set[Side]] = [set() for _ in train]
    turn: Side = "train"
    for group in groups([each.sample.prompt for each in train]):
        can_attack = any(train[i].sample.completion is not None for i in group)
        can_defend = any(train[i].sample.safe is not None for i in group)
        side: Side = "train" if can_attack else "pool"
        if can_attack and can_defend:
            side, turn = turn, "pool" if turn == "train" else "train"
        for i in group:
            sides[i].add(side)
    return sides


def _training(found: Found) -> Row:
    return {"prompt": found.sample.prompt, "completion": found.sample.completion}


def _pool(found: Found) -> Row:
    category = {key: value for key, value in found.sample.suite.items() if key == "category"}
    return {"prompt": found.sample.prompt, "safe": found.sample.safe, **category}


def _benign(found: Found) -> Row:
    return {"prompt": found.sample.prompt, "benign": True}


def _suite(found: Found) -> Row:
    return {"prompt": found.sample.prompt, **found.sample.suite}
