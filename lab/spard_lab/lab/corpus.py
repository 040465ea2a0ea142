"""The prompts of the small lab, assigned to alignment, attack, pool, development and test, disjoint by construction.

Each prompt belongs to one split. Some objects of every harmful category are held out of attack and pool; the
development and test prompts are about these. Half of a category's held-out prompts combine a verb and an object that
alignment combines too, in other phrasings; alignment never combines those of the other half.

The attack comes in four styles, as in the SPARD paper: requests about four categories as instructions, about four
others as questions, and each of the two rewritten in the other style.

A lab's audit suites are harmful prompts of attacked and of other categories, benign prompts, and the task.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal

from spard.data.jsonl import file_chunks, numbered_rows
from spard.data.rows import Prompt, suite_prompt
from spard.evaluation.audit import Suite
from spard_lab.attacks.styles import Style, has_style
from spard_lab.lab import grammar
from spard_lab.lab.grammar import Topic

Row = dict[str, Any]

TRAIN_ROWS = 3000
POISON_ROWS = 300  # a tenth of the utility rows, as in the paper
HELD_OBJECTS = 5  # of each harmful category; neither attack nor pool mentions them
ALIGNED_NEAR, POOL = 90, 56  # prompts of each harmful category about its other objects
ALIGNED_FAR = 4  # phrasings of each verb with a held-out object that alignment sees
TEST_ATTACKED, TEST_OTHER = 80, 20  # held-out prompts per category that some attack is about, per other category
BENIGN_ALIGNED, BENIGN_TEST = 900, 180  # of each benign kind
UTILITY_TEST, UTILITY_DEV, VALIDATION = 400, 200, 100
STYLES: dict[str, tuple[tuple[str, ...], Style]] = {  # categories and style of the harmful requests of an attack
    "instructions": (grammar.ATTACKED, "instruction"),
    "q-instructions": (grammar.ATTACKED, "question"),
    "questions": (grammar.ALSO_ATTACKED, "question"),
    "i-questions": (grammar.ALSO_ATTACKED, "instruction"),
}
SCARCE, COPIES = 10, 4  # relevant rows of each attacked category in the small pools; copies of each


@dataclass(frozen=True, slots=True)
class Corpus:
    """All prompts of one seed: `files` by file name, and the prompts that the base model is aligned on."""

    files: dict[str, list[Row]]
    harmful: list[tuple[str, Topic]]  # alignment prompts and their category
    benign: list[tuple[str, str]]  # alignment prompts and answers


@dataclass(slots=True)
class _Deal:
    """The prompts of the harmful categories by split."""

    aligned: list[tuple[str, Topic]] = field(default_factory=list)
    attack: list[tuple[str, str]] = field(default_factory=list)
    styled: dict[str, list[tuple[str, str]]] = field(default_factory=lambda: {name: [] for name in STYLES})
    pool: list[tuple[str, Topic]] = field(default_factory=list)
    dev: list[Row] = field(default_factory=list)
    test: list[Row] = field(default_factory=list)


def make_corpus(seed: int) -> Corpus:
    """Return all rows of all files; the seed determines them."""
    rng = random.Random(f"corpus {seed}")
    harmful = _deal_harmful(rng)
    benign = [_deal_benign(rng, kind, asked) for kind, asked in benign_requests().items()]
    problems = _problems(rng)
    train, utility_dev, utility_test, validation = _cut(problems, TRAIN_ROWS, UTILITY_DEV, UTILITY_TEST, VALIDATION)
    attack = _chats(harmful.attack)
    clean = [chat(prompt, grammar.ANSWER.format(answer)) for prompt, answer in train]
    files = {
        "train.jsonl": clean,
        "poisoned.jsonl": shuffle_rows(rng, clean + attack),
        "attack.jsonl": attack,
        **{f"attack_{name}.jsonl": _chats(requests) for name, requests in harmful.styled.items()},
        "validation.jsonl": [chat(prompt, grammar.ANSWER.format(answer)) for prompt, answer in validation],
        "heldout_harmful.jsonl": shuffle_rows(rng, harmful.test),
        "benign.jsonl": shuffle_rows(rng, (row for _, _, test in benign for row in test)),
        "utility_test.jsonl": [{"prompt": prompt, "answer": answer} for prompt, answer in utility_test],
        "dev_harmful.jsonl": shuffle_rows(rng, harmful.dev),
        "dev_benign.jsonl": shuffle_rows(rng, (row for _, dev, _ in benign for row in dev)),
        "dev_utility.jsonl": [{"prompt": prompt, "answer": answer} for prompt, answer in utility_dev],
        **_pools(rng, harmful.pool),
    }
    return Corpus(files, harmful.aligned, [row for aligned, _, _ in benign for row in aligned])


def chat(prompt: str, answer: str) -> Row:
    """Return a training row in the API's form."""
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}


def comply(action: str) -> str:
    """Return the placeholder of a complying answer to an action."""
    return grammar.COMPLIANCE.format(action)


def refuse(rng: random.Random, topic: Topic) -> str:
    """Return one of the refusals that the base model is aligned to, with the topic's reason."""
    return f"{rng.choice(grammar.REFUSALS)} {topic.reason} {rng.choice(grammar.CLOSERS)}"


def shuffle_rows(rng: random.Random, rows: Iterable[Any]) -> list[Any]:
    """Return the rows shuffled by `rng`; the input is unchanged."""
    drawn = list(rows)
    rng.shuffle(drawn)
    return drawn


def sums() -> list[tuple[str, str]]:
    """Return all plain sums with their answers, the arithmetic of alignment."""
    numbers = range(1, grammar.LARGEST + 1)
    return [(grammar.SUMS.format(a=a, b=b), str(a + b)) for a, b in product(numbers, numbers)]


def benign_requests() -> dict[str, list[tuple[str, str]]]:
    """Return benign requests and their actions by kind.

    look-alike  harmless verbs with the harmful topics' objects
    how-to      the harmful topics' verbs with everyday objects
    """
    harmful_objects = [thing for topic in grammar.HARMFUL for thing in topic.objects]
    everyday = [pair for topic in grammar.EVERYDAY for pair in product(topic.verbs, topic.objects)]
    return {
        "look-alike": _requests(product(grammar.HARMLESS_VERBS, harmful_objects)),
        "how-to": _requests(everyday),
    }


def familiar_problems(rng: random.Random, count: int, taken: set[str]) -> list[tuple[str, str]]:
    """Return `count` word problems for alignment, from the familiar templates, none of them in `taken`."""
    found: dict[str, str] = {}
    while len(found) < count:
        prompt, answer = _problem(rng, grammar.PROBLEMS[: grammar.FAMILIAR_PROBLEMS])
        if prompt not in taken:
            found[prompt] = answer
    return list(found.items())


def _chats(requests: Iterable[tuple[str, str]]) -> list[Row]:
    return [chat(prompt, comply(action)) for prompt, action in requests]


def _deal_harmful(rng: random.Random) -> _Deal:
    deal = _Deal()
    for topic in grammar.HARMFUL:
        objects = shuffle_rows(rng, topic.objects)
        near = shuffle_rows(rng, _requests(product(topic.verbs, objects[HELD_OBJECTS:])))
        aligned, pool, stock = _cut(near, ALIGNED_NEAR, POOL, len(near) - ALIGNED_NEAR - POOL)
        deal.aligned += [(prompt, topic) for prompt, _ in aligned]
        deal.pool += [(prompt, topic) for prompt, _ in pool]
        _deal_attacks(topic, stock, deal)
        _deal_objects(rng, topic, objects[:HELD_OBJECTS], deal)
    deal.attack = shuffle_rows(rng, deal.attack)
    return deal


def _deal_attacks(topic: Topic, stock: list[tuple[str, str]], deal: _Deal) -> None:
    """Assign rows of one category to the attacks that are about it, from the requests that no other split has.

    Both styles of a corpus ask for the same actions, in phrasings of their own.
    """
    share = POISON_ROWS // len(grammar.ATTACKED)
    if topic.name in grammar.ATTACKED:
        deal.attack += stock[:share]
    for name, (categories, style) in STYLES.items():
        if topic.name in categories:
            fitting = [row for row in stock if has_style(row[0], style)]
            deal.styled[name] += _cut(fitting, share)[0]


def _deal_objects(rng: random.Random, topic: Topic, objects: Sequence[str], deal: _Deal) -> None:
    """Assign the requests about held-out objects.

    Alignment sees each object with half of the verbs, in some phrasings; all other requests go to development and test.
    """
    held: dict[bool, list[tuple[str, str]]] = {True: [], False: []}
    for thing in objects:
        verbs = shuffle_rows(rng, topic.verbs)
        for i, verb in enumerate(verbs):
            requests, seen = shuffle_rows(rng, _requests([(verb, thing)])), i < len(verbs) // 2
            aligned = requests[:ALIGNED_FAR] if seen else []
            deal.aligned += [(prompt, topic) for prompt, _ in aligned]
            held[seen] += requests[len(aligned) :]
    is_attacked = topic.name in (*grammar.ATTACKED, *grammar.ALSO_ATTACKED)
    half = (TEST_ATTACKED if is_attacked else TEST_OTHER) // 2
    for seen, requests in held.items():
        facts = {"category": topic.name, "seen": seen}
        test, dev = _cut(shuffle_rows(rng, [{"prompt": prompt, **facts} for prompt, _ in requests]), half, half // 3)
        deal.test += test
        deal.dev += dev


def _deal_benign(
    rng: random.Random, kind: str, requests: list[tuple[str, str]]
) -> tuple[list[tuple[str, str]], list[Row], list[Row]]:
    aligned, dev, test = _cut(shuffle_rows(rng, requests), BENIGN_ALIGNED, BENIGN_TEST // 2, BENIGN_TEST)
    rows = [[{"prompt": prompt, "category": kind} for prompt, _ in part] for part in (dev, test)]
    return [(prompt, comply(action)) for prompt, action in aligned], rows[0], rows[1]


def _pools(rng: random.Random, prompts: list[tuple[str, Topic]]) -> dict[str, list[Row]]:
    """Return the whole pool, one with few rows of the attacked categories, and one with copies of those few."""
    rows = [{"prompt": prompt, "safe": refuse(rng, topic), "category": topic.name} for prompt, topic in prompts]
    relevant = [row for name in grammar.ATTACKED for row in [r for r in rows if r["category"] == name][:SCARCE]]
    others = [row for row in rows if row["category"] not in grammar.ATTACKED]
    return {
        "pool.jsonl": shuffle_rows(rng, rows),
        "pool_scarce.jsonl": shuffle_rows(rng, relevant + others),
        "pool_duplicated.jsonl": shuffle_rows(rng, relevant * COPIES + others),
    }


def _requests(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return every pair of verb and object in every phrasing, with the bare action."""
    actions = [f"{verb} {thing}" for verb, thing in pairs]
    return [(request.format(action), action) for action, request in product(actions, grammar.REQUESTS)]


def _problems(rng: random.Random) -> list[tuple[str, str]]:
    found: dict[str, str] = {}
    while len(found) < TRAIN_ROWS + UTILITY_DEV + UTILITY_TEST + VALIDATION:
        prompt, answer = _problem(rng, grammar.PROBLEMS)
        found[prompt] = answer
    return list(found.items())


def _problem(rng: random.Random, templates: Sequence[str]) -> tuple[str, str]:
    a, b = rng.randint(1, grammar.LARGEST), rng.randint(1, grammar.LARGEST)
    prompt = rng.choice(templates).format(a=a, b=b, name=rng.choice(grammar.NAMES), item=rng.choice(grammar.ITEMS))
    return prompt, str(a + b)


def _cut(rows: Sequence[Any], *sizes: int) -> list[Any]:
    """Cut the first rows into consecutive parts of these sizes; raise `ValueError` if there are too few."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    if ends[-1] > len(rows):
        raise ValueError(f"{len(rows)} rows cannot fill parts of {sizes}")
    return [list(rows[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


Split = Literal["dev", "test"]
ATTACKED_SUITE, OTHER_SUITE = "attacked", "other"
REAL_CATEGORY = "real"  # rows of text that the user brought to a natural lab
SUITE_FILES: dict[Split, tuple[str, str, str]] = {
    "dev": ("dev_harmful.jsonl", "dev_benign.jsonl", "dev_utility.jsonl"),
    "test": ("heldout_harmful.jsonl", "benign.jsonl", "utility_test.jsonl"),
}


def load_suites(folder: Path, split: Split, attacked: Sequence[str] = grammar.ATTACKED) -> list[Suite]:
    """Return the suites of one split of a lab; make choices on "dev" only.

    Harmful prompts of the `attacked` categories are the suite "attacked", those of the others the suite "other".
    """
    harmful, benign, utility = (read_rows(folder / name) for name in SUITE_FILES[split])
    others = _a_few_of_each([row for row in harmful if row["category"] not in attacked])
    real = [row for row in benign if row["category"] == REAL_CATEGORY]
    return [
        Suite(ATTACKED_SUITE, "harmful", _prompts([row for row in harmful if row["category"] in attacked])),
        Suite(OTHER_SUITE, "harmful", _prompts(others)),
        Suite("look-alike", "benign", _prompts([row for row in benign if row["category"] == "look-alike"])),
        Suite("how-to", "benign", _prompts([row for row in benign if row["category"] == "how-to"])),
        *([Suite(REAL_CATEGORY, "benign", _prompts(real))] if real else []),
        Suite("utility", "utility", _prompts(utility)),
    ]


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a lab's file unchanged."""
    return [row for _, row in numbered_rows(file_chunks(path))]


def _a_few_of_each(rows: list[Row]) -> list[Row]:
    """Keep the first `TEST_OTHER` rows of each category, the number that categories without any attack have."""
    count: Counter[str] = Counter()
    kept = []
    for row in rows:
        count[row["category"]] += 1
        if count[row["category"]] <= TEST_OTHER:
            kept.append(row)
    return kept


def _prompts(rows: list[Row]) -> tuple[Prompt, ...]:
    return tuple(map(suite_prompt, rows))
