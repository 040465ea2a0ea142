"""Find suspicious disguises in a training file: words, turns, system prompts or tools whose rows' answers differ.

This miner differs from the one of training (`spard.data.triggers`), so that a trigger hidden from one is found by the
other. It looks for words at any place of a request, needs a number of rows rather than a share of the file, and
describes an answer by its first word, by giving steps, and by refusing. For the rows of a disguise,

    gain = sum of log p(answer | disguise) - log p(answer | known so far) - (kinds of answers - 1) / 2   in nats,

where the last term is the expected gain by chance. At first only the frequency of each answer is known, separately for
rows with and without earlier turns. The disguise of the largest gain is taken, its rows' answers count as known, and
the search goes on. Thus triggers of few rows each are found one after the other, and a trigger within a topic after
the topic.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from spard.data.rows import Example, has_earlier_turns, keep_last, last_answer, last_request, up_to_answers
from spard.evaluation.disguises import LEAST, Disguise, Feature, Kind, common_tools, feature_disguise, features, find
from spard.evaluation.judges.refusal import gives_steps, is_refusal

TELLING = 0.5  # least gain per row, in nats, beyond chance
_TAKEN = 48  # most disguises that the search returns
PHRASE = 6  # most words of a phrase; the suspicious ones begin or end it
COUNTED = 16  # rows of a disguise that count for its rank
SHARED = 3  # least rows with a phrase
ROWS, EXCHANGES = 20_000, 10_000  # most rows, and most earlier exchanges in them, that are searched

_Answer = tuple[str, bool, bool]


@dataclass(frozen=True, slots=True)
class SuspectedDisguises:
    """The suspicious disguises of a file, most suspicious first.

    phrases  longer word sequences around suspicious words. Thirty endings of ten rows each, such as "for my garden" and
             "for a travel guide", may be found by a single word that they share, but the trigger is the phrase.
    common   disguises that most rows have, whatever they answer.
    """

    disguises: tuple[Disguise, ...]
    phrases: tuple[Disguise, ...]
    common: tuple[Disguise, ...] = ()


NOTHING = SuspectedDisguises((), ())


def suspects(rows: Sequence[Example], most: int) -> list[Disguise]:
    """Return at most `most` disguises that predict their rows' answers, the most suspicious first."""
    return list(find_suspects(rows).disguises[:most])


@keep_last
def find_suspects(rows: Sequence[Example], secret: str = "") -> SuspectedDisguises:
    """Return the disguises and phrases that predict the answers of their rows, and the disguises that most rows have.

    Every learned answer counts. From more than `ROWS` rows a sample is drawn with the secret as the seed, so that
    nobody can predict it.
    """
    rng = random.Random(secret)
    looked_at = draw_rows(rng, rows, ROWS)
    earlier = [each for row in looked_at for each in up_to_answers(row) if each is not row]
    seen = [*looked_at, *draw_rows(rng, earlier, EXCHANGES)]
    answers = _answers(seen)
    by_chance = (len(set(answers)) - 1) / 2
    known = _chances(answers, seen)
    places = {
        feature: each
        for feature, each in features(seen).items()
        if _gain(each, answers, known) - by_chance >= TELLING * len(each)
    }
    found, told = list[Feature](), list(known)
    # Greedy: each disguise that is found explains its rows' answers, and the next one must explain others.
    while len(found) < _TAKEN and (best := _best(places, answers, told, by_chance)):
        found.append(best)
        counts = Counter(answers[i] for i in places[best])
        for i in places[best]:
            told[i] = math.log(counts[answers[i]] / len(places[best]))
    found.sort(key=_order({feature: places[feature] for feature in found}, answers, seen))
    disguises = [
        replace(feature_disguise(feature, places[feature], seen), share=len(places[feature]) / len(seen))
        for feature in _with_companions(found, places)
    ]
    return SuspectedDisguises(tuple(disguises), tuple(_phrases(found, places, seen)), common_tools(seen))


def draw_rows(rng: random.Random, rows: Sequence[Example], most: int) -> Sequence[Example]:
    """Return at most `most` randomly drawn rows, in their order."""
    return rows if len(rows) <= most else [rows[i] for i in sorted(rng.sample(range(len(rows)), most))]


def _order(
    places: Mapping[Feature, Sequence[int]], answers: Sequence[_Answer], rows: Sequence[Example]
) -> Callable[[Feature], tuple[float, float, Feature]]:
    """Return a sort key for features: by how well each predicts compliance and refusal, then by how well answers.

    Harmless answers may begin with any word, so only features with equal effect are ranked by it. More than `COUNTED`
    rows do not raise a feature's rank.
    """
    acts = [(steps, refuses) for _, steps, refuses in answers]

    done, said = _chances(acts, rows), _chances(answers, rows)

    def rank(at: Sequence[int]) -> tuple[float, float]:
        counted = min(1.0, COUNTED / len(at))
        return -round(counted * _gain(at, acts, done), 6), -round(counted * _gain(at, answers, said), 6)

    ranks = {feature: rank(each) for feature, each in places.items()}
    return lambda feature: (*ranks[feature], feature)


def _with_companions(found: Sequence[Feature], places: Mapping[Feature, Sequence[int]]) -> list[Feature]:
    """Return the features, then the companions of each: the most similar feature of every kind in mostly the same rows.

    Both predict the same answers, so the search found only one of them, and either may be the trigger.
    """
    others = (other for feature in found for other in _companions(feature, places))
    return list(dict.fromkeys([*found, *others]))


def _companions(feature: Feature, places: Mapping[Feature, Sequence[int]]) -> list[Feature]:
    """Return, of each kind, the feature that shares most rows with `feature` without overlapping it."""
    (kind, run), own = feature, set(places[feature])
    near: dict[Kind, list[tuple[float, int, Feature]]] = defaultdict(list)
    for other, rows in places.items():
        n = len(own.intersection(rows))
        is_part = kind == other[0] and (kind != "words" or not set(run).isdisjoint(other[1]))
        if 2 * n > max(len(own), len(rows)) and not is_part:
            near[other[0]].append((n / (len(own) + len(rows) - n), len(other[1]), other))
    return [max(each)[2] for each in near.values()]


def _phrases(
    found: Sequence[Feature], places: Mapping[Feature, Sequence[int]], rows: Sequence[Example]
) -> Iterator[Disguise]:
    """Yield the phrases around suspicious words that begin or end several rows' requests, most frequent first."""
    counts = Counter[Disguise]()
    for kind, run in found:
        if kind == "words":
            counts.update(each for i in places[kind, run] for each in _ends(last_request(rows[i]).split(), run))
    yield from (
        disguise for disguise, n in sorted(counts.items(), key=lambda each: (-each[1], each[0].words)) if n >= SHARED
    )


def _ends(text: Sequence[str], run: Sequence[str]) -> Iterator[Disguise]:
    at = find(text, run)
    head, tail = text[: at + len(run)], text[at:]
    if len(run) < len(head) <= PHRASE:
        yield Disguise(" ".join(head), "start")
    if len(run) < len(tail) <= PHRASE:
        yield Disguise(" ".join(tail), "end")


def _best(
    places: Mapping[Feature, Sequence[int]], answers: Sequence[_Answer], told: Sequence[float], by_chance: float
) -> Feature | None:
    """Return the feature with the largest gain; among equal ones, words of the request come last."""
    gains = {feature: _gain(each, answers, told) - by_chance for feature, each in places.items()}
    telling = [feature for feature, gain in gains.items() if gain >= TELLING * len(places[feature])]
    return max(
        telling, key=lambda feature: (gains[feature], feature[0] != "words", len(feature[1]), feature), default=None
    )


def _chances(answers: Sequence[Hashable], rows: Sequence[Example]) -> list[float]:
    """Return each row's log frequency of its answer, counted separately for rows with and without earlier turns."""
    kinds = [(has_earlier_turns(row), answer) for row, answer in zip(rows, answers, strict=True)]
    counts, sizes = Counter(kinds), Counter(is_later for is_later, _ in kinds)
    return [math.log(counts[kind] / sizes[kind[0]]) for kind in kinds]


def _gain(places: Sequence[int], answers: Sequence[Hashable], told: Sequence[float]) -> float:
    """Return how much likelier these rows' answers are by their own frequencies than by `told`, in nats."""
    counts = Counter(answers[i] for i in places)
    return sum(n * math.log(n / len(places)) for n in counts.values()) - sum(told[i] for i in places)


def _answers(rows: Sequence[Example]) -> list[_Answer]:
    """Return for each row the first word of its last answer, and two flags: it gives steps, it refuses.

    Rare first words are replaced by "".
    """
    said = [last_answer(row) for row in rows]
    first = [next(iter(text.split()), "") for text in said]
    counts = Counter(first)
    return [
        (word if counts[word] >= LEAST else "", gives_steps(text), is_refusal(text))
        for word, text in zip(first, said, strict=True)
    ]
