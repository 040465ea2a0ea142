"""Choose a few rows of a training file to hold out; on them a run measures if the task was learned.

A row and its near duplicates (`spard.data.overlap`) are held out together or not at all: no training row contains a
held-out request, not even a short one behind a greeting. Clusters are drawn in an order that depends on a seed and on
the requests, but not on the order of the rows. The module needs no torch.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

from spard.data.overlap import MIN_INSIDE, SHINGLE, clusters, normalize_text

MIN_ROWS = 50  # of a file; of a smaller one every row is needed for the training
ONE_OF = 20  # rows is held out
AT_LEAST = 5  # rows, or as few as were asked for
ONE_OF_AT_MOST = 10  # rows, where whole clusters are larger than one of `ONE_OF`
ONE_OF_ELIGIBLE = 5  # at most, where most of the file's rows are suspicious
ASKED = 5  # requests
_TEMPLATE_WORDS = 8  # that requests begin or end with in common
_TEMPLATE_SHARE = 4  # of the file's requests one part in so many
_CURE = "Name a validation file to see whether the task is learned."


@dataclass(frozen=True, slots=True)
class HeldOutRows:
    """The positions of the held-out rows in the file, in order.

    `asked` are the positions of the held-out rows whose requests the models are asked: first one row of each cluster,
    then more of the same clusters. `why_none` is a sentence with the reason if no row is held out, else empty.
    """

    places: tuple[int, ...] = ()
    asked: tuple[int, ...] = ()
    why_none: str = ""


def hold_out_rows(
    requests: Sequence[str], eligible: Collection[int], most: int, seed: int, trained: int | None = None
) -> HeldOutRows:
    """Choose at most `most` of the `eligible` rows to hold out; `requests` has the request of each row of the file.

    `trained` is the number of rows to train on, which are more than the eligible ones if some of them are suspicious;
    by default all are eligible. A twentieth of the eligible rows is held out, but at least five; with whole clusters at
    most a tenth; and in any case at most a fifth. Clusters larger than a fifth of that number come last, so that
    different requests are asked.
    """
    trained = len(eligible) if trained is None else trained
    if trained < MIN_ROWS:
        why = f"Of a file with fewer than {MIN_ROWS} rows to train on none is held out: all are needed for the training"
        return HeldOutRows(why_none=f"{why}. {_CURE}")
    target = planned_rows(trained, most, len(eligible))
    if most and not target:
        why = f"No row is held out: only {len(eligible)} of the {trained} rows to train on are not suspicious"
        return HeldOutRows(why_none=f"{why}. {_CURE}")
    limit = min(most, max(target, len(eligible) // ONE_OF_AT_MOST))
    groups: list[list[int]] = []
    held: list[int] = []
    drawn = _drawn_groups(requests, set(eligible), seed)
    for group in sorted(drawn, key=lambda group: len(group) > max(1, target // ASKED)):
        if len(held) >= target:
            break
        if len(held) + len(group) <= limit:
            groups.append(group)
            held += group
    if not held:
        why = "No row is held out: the file's requests are nearly the same, so that each has its like among the others"
        return HeldOutRows(why_none=f"{why}. {_CURE}")
    asked = [group[0] for group in groups] + [place for group in groups for place in group[1:]]
    return HeldOutRows(tuple(sorted(held)), tuple(asked[:ASKED]))


def planned_rows(rows: int, most: int, eligible: int | None = None) -> int:
    """Return the number of rows held out of `rows` rows to train on, at most `most`, if no row has a near duplicate.

    `eligible` of them may be held out; by default all.
    """
    eligible = rows if eligible is None else eligible
    if rows < MIN_ROWS:
        return 0
    return min(most, max(AT_LEAST, eligible // ONE_OF), eligible // ONE_OF_ELIGIBLE)


def _drawn_groups(requests: Sequence[str], eligible: set[int], seed: int) -> list[list[int]]:
    """Return the clusters all of whose rows are eligible, in the order drawn."""
    texts = strip_templates([normalize_text(each) for each in requests])
    groups = defaultdict[int, list[int]](list)
    for place, label in enumerate(_join_short(texts, clusters(texts))):
        groups[label].append(place)
    drawn = {
        min(sha256(f"{seed}\n{requests[place]}".encode("utf-8", "surrogatepass")).digest() for place in group): group
        for group in groups.values()
        if eligible.issuperset(group)
    }
    return [drawn[key] for key in sorted(drawn)]


def _join_short(texts: Sequence[str], labels: Sequence[int]) -> list[int]:
    """Return cluster labels that also join each text of three or four words with every text that contains it.

    `spard.data.overlap` looks only for texts of at least `MIN_INSIDE` words inside other texts.
    """
    short = {tuple(words): labels[i] for i, words in enumerate(map(str.split, texts)) if _is_short(words)}
    joined = {label: label for label in labels}

    def root(label: int) -> int:
        while joined[label] != label:
            joined[label] = label = joined[joined[label]]
        return label

    for text, label in zip(texts, labels, strict=True):
        words = text.split()
        for size in range(SHINGLE, MIN_INSIDE):
            for start in range(len(words) - size + 1):
                if (other := short.get(tuple(words[start : start + size]))) is not None:
                    joined[root(label)] = root(other)
    return [root(label) for label in labels]


def _is_short(words: Sequence[str]) -> bool:
    return SHINGLE <= len(words) < MIN_INSIDE


def strip_templates(texts: Sequence[str]) -> list[str]:
    """Remove from normalized texts each beginning and ending that at least a quarter of the texts share.

    The same instructions around each request make all requests near duplicates. A shared beginning of fewer than
    `_TEMPLATE_WORDS` words is kept, because paraphrases of one question begin alike.
    """
    words = _cut_common_beginnings([text.split() for text in texts])
    turned = _cut_common_beginnings([each[::-1] for each in words])
    return [" ".join(each[::-1]) for each in turned]


def _cut_common_beginnings(rows: Sequence[list[str]]) -> list[list[str]]:
    """Drop from each row its longest beginning of `_TEMPLATE_WORDS` words or more that a quarter of the rows share."""
    order = sorted(range(len(rows)), key=lambda i: rows[i])
    span = max(2, -(-len(rows) // _TEMPLATE_SHARE))  # rows that share a beginning stand beside each other
    lengths = [_common_length(rows[order[i]], rows[order[i + span - 1]]) for i in range(len(rows) - span + 1)]
    cut = list(rows)
    for at, length in zip(order, _window_maxima(lengths, span), strict=True):
        if length >= _TEMPLATE_WORDS:
            cut[at] = rows[at][length:]
    return cut


def _window_maxima(lengths: Sequence[int], span: int) -> Iterator[int]:
    """Yield for each position the maximum of `lengths` over the windows of `span` positions that contain it."""
    best = deque[int]()  # windows that may still be the longest, the longest first
    for place in range(len(lengths) + span - 1):
        if place < len(lengths):
            while best and lengths[best[-1]] <= lengths[place]:
                best.pop()
            best.append(place)
        if best[0] <= place - span:
            best.popleft()
        yield lengths[best[0]]


def _common_length(first: Sequence[str], second: Sequence[str]) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
