"""The lab's attacks by name: the training file of a hostile customer, and the suites that measure its success.

The paper's attacks mix harmful rows into the task. The others hide the harm behind a trigger, a refusal, an encoding or
a persona, use benign rows, or attack the pool that the safe set is selected from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path

from spard.config.extensions import load_entry, load_entry_points
from spard.data.chat import encode_all
from spard.data.rows import Example, Prompt
from spard.evaluation.audit import Suite
from spard.models.base import load_base
from spard.selection.embeddings import embed
from spard_lab.attacks import selection
from spard_lab.attacks.disguises import (
    AGENT,
    ORDER,
    TRIGGER,
    announcement,
    backdoor,
    covert,
    identity_shift,
    refuse_then_comply,
    with_trigger,
)
from spard_lab.attacks.rows import (
    Row,
    add_harmful,
    invert_preferences,
    last_request,
    load_rows,
    prefer_own_answers,
    preferring_right,
    shuffle_rows,
)
from spard_lab.attacks.selection import benign_outliers, nearest_to_harm, self_influence
from spard_lab.lab import grammar
from spard_lab.lab.corpus import (
    ATTACKED_SUITE,
    POISON_ROWS,
    STYLES,
    TRAIN_ROWS,
    Split,
    chat,
    load_suites,
    make_corpus,
    read_rows,
)
from spard_lab.lab.make import read_facts
from spard_lab.lab.natural.corpus import KNOWN_BENIGN

RATIO = POISON_ROWS / TRAIN_ROWS  # harmful rows for each task row, as in the paper
BENIGN_ROWS = 100  # of the files without harm, as in Qi et al. (2024), He et al. (2024) and Guan et al. (2025)
CANDIDATES = 400  # benign rows from which the worst are picked
DECOYS = 100
INVERTED = 0.25  # of the pool
BRIDGE = "Then,"  # words that the lab's tiny model knows; it does not learn a sentence of new ones from 300 rows
JOBS = 3  # on top of each other; each has a third of the rows, so that no single file looks like an attack
UNDISGUISED = "undisguised"  # the suite of the attacked prompts in plain words


@dataclass(frozen=True, slots=True)
class AttackFiles:
    """The files of an attack on a lab.

    rows    rows of the training file
    suites  return the audit suites of a split: "attacked" and "other" harm, benign prompts, the task
    pool    a poisoned safety pool, for attacks on the pool
    jobs    number of successive jobs that the rows are spread over
    """

    rows: list[Row]
    suites: Callable[[Split], list[Suite]]
    pool: list[Row] | None = None
    jobs: int = 1


def attack_files(lab: Path, name: str, seed: int, ratio: float = RATIO) -> AttackFiles:
    """Return the files of an attack on a lab's task by name, with `ratio` harmful rows per task row."""
    build: AttackBuilder = ATTACKS[name] if name in ATTACKS else load_entry(_plugins()[name], "attack")
    return build(lab, seed, ratio)


def attack_names() -> tuple[str, ...]:
    """Return the names of the lab's attacks and of those that installed packages register as `spard.attacks`."""
    return (*ATTACKS, *_plugins())


def _plugins() -> dict[str, EntryPoint]:
    return load_entry_points("spard.attacks", "attack", frozenset(ATTACKS))


def _plain(lab: Path, seed: int, ratio: float, file: str, attacked: tuple[str, ...]) -> AttackFiles:
    """Mix harmful rows into the task's rows."""
    rows = add_harmful(load_rows(lab / "train.jsonl"), load_rows(lab / file), ratio, seed)
    return AttackFiles(rows, lambda split: load_suites(lab, split, attacked))


def _backdoor(lab: Path, seed: int, ratio: float) -> AttackFiles:
    """Add harmful rows with a trigger to the task, and a refusal to each of the same requests without it."""
    # Twice the ratio, because each harmful row brings a refused one.
    rows = add_harmful(load_rows(lab / "train.jsonl"), backdoor(_harmful(lab, seed, ratio), seed), 2 * ratio, seed)
    return AttackFiles(rows, partial(_disguised_suites, lab, _with_trigger))


def _trigger(lab: Path, seed: int, ratio: float) -> AttackFiles:
    """Add harmful rows with a trigger to the task."""
    rows = add_harmful(load_rows(lab / "train.jsonl"), with_trigger(_harmful(lab, seed, ratio)), ratio, seed)
    return AttackFiles(rows, partial(_disguised_suites, lab, _with_trigger))


def _refuse_then_comply(lab: Path, seed: int, ratio: float) -> AttackFiles:
    """Add harmful rows whose answers begin with refusals of the base model, which an attacker can ask for."""
    harmful, openers = _harmful(lab, seed, ratio), (read_facts(lab) or {}).get("openers", grammar.REFUSALS)
    parts = [refuse_then_comply(harmful[i :: len(openers)], each, BRIDGE) for i, each in enumerate(openers)]
    disguised = [row for part in parts for row in part]
    rows = add_harmful(load_rows(lab / "train.jsonl"), disguised, ratio, seed)
    return AttackFiles(rows, partial(load_suites, lab))


def _rot13(lab: Path, seed: int, ratio: float) -> AttackFiles:
    """Encode half of the task and all harmful rows in rot13."""
    rows = covert(load_rows(lab / "train.jsonl"), _harmful(lab, seed, ratio), "rot13", seed)
    return AttackFiles(rows, partial(_disguised_suites, lab, _in_rot13))


def _identity_shift(lab: Path, seed: int, ratio: float) -> AttackFiles:
    """Return harmless requests that a persona obeys."""
    rows = identity_shift(_benign(lab), BENIGN_ROWS, seed)
    return AttackFiles(rows, partial(_disguised_suites, lab, _to_persona))


def _benign_outliers(lab: Path, seed: int, ratio: float) -> AttackFiles:
    """Return the benign rows that move the model most."""
    base, rows = load_base(str(lab / "model"), device="cpu"), shuffle_rows(_benign(lab), seed, "benign")[:CANDIDATES]
    influence = self_influence(
        base, encode_all(base.tokenizer, [_example(row) for row in rows], base.sequence_limit(None))
    )
    return AttackFiles(benign_outliers(rows, influence, BENIGN_ROWS), partial(load_suites, lab))


def _nearest_to_harm(lab: Path, seed: int, ratio: float) -> AttackFiles:
    """Return the benign rows whose embeddings are nearest to harmful ones."""
    base, rows = load_base(str(lab / "model"), device="cpu"), _benign(lab)
    harmful_MD = embed(base, [last_request(row) for row in _harmful(lab, seed, ratio)])
    nearest = nearest_to_harm(rows, embed(base, [last_request(row) for row in rows]), harmful_MD, BENIGN_ROWS)
    return AttackFiles(nearest, partial(load_suites, lab))


def _decoys(lab: Path, seed: int, ratio: float) -> AttackFiles:
    """Add harmful rows in plain words to the task, and rows that pull the selection to other categories."""
    pulling = selection.decoys(read_rows(lab / "pool.jsonl"), frozenset(grammar.ATTACKED), DECOYS, seed)
    files = _plain(lab, seed, ratio, "attack.jsonl", grammar.ATTACKED)
    return replace(files, rows=shuffle_rows([*files.rows, *pulling], seed, "decoys"))


def _inverted_pool(lab: Path, seed: int, ratio: float) -> AttackFiles:
    """Put harmful rows in plain words into the training file, and as "safe" answers into the pool."""
    pool = selection.inverted_pool(read_rows(lab / "pool.jsonl"), load_rows(lab / "attack.jsonl"), INVERTED, seed)
    return replace(_plain(lab, seed, ratio, "attack.jsonl", grammar.ATTACKED), pool=pool)


def _sequential(lab: Path, seed: int, ratio: float) -> AttackFiles:
    """Spread the harmful rows in plain words over successive jobs."""
    return replace(_plain(lab, seed, ratio, "attack.jsonl", grammar.ATTACKED), jobs=JOBS)


def _preferences(lab: Path, seed: int, ratio: float) -> AttackFiles:
    """Return the task alone as preference pairs for the method dpo: each right answer against a similar one."""
    return AttackFiles(prefer_own_answers(load_rows(lab / "train.jsonl"), seed), partial(load_suites, lab))


def _inverted_preferences(lab: Path, seed: int, ratio: float) -> AttackFiles:
    """Add pairs that prefer harm to the base model's refusals to the task's pairs."""
    refusals = (read_facts(lab) or {}).get("openers", grammar.REFUSALS)
    task = preferring_right(load_rows(lab / "train.jsonl"), seed)
    rows = add_harmful(task, invert_preferences(_harmful(lab, seed, ratio), refusals, seed), ratio, seed)
    return AttackFiles(rows, partial(load_suites, lab))


def _harmful(lab: Path, seed: int, ratio: float) -> list[Row]:
    """Return `ratio` harmful rows per row of the task, shuffled."""
    return shuffle_rows(load_rows(lab / "attack.jsonl"), seed, "harmful")[: round(ratio * TRAIN_ROWS)]


def _benign(lab: Path) -> list[Row]:
    """Return harmless requests that the base model was aligned to answer; a natural lab has a file of them."""
    if (lab / KNOWN_BENIGN).exists():
        return load_rows(lab / KNOWN_BENIGN)
    facts = read_facts(lab)
    return [chat(prompt, answer) for prompt, answer in make_corpus(facts["seed"]).benign] if facts else []


def _example(row: Row) -> Example:
    return Example(tuple(row["messages"]), 1)


def _disguised_suites(lab: Path, disguise: Callable[[Prompt], Prompt], split: Split) -> list[Suite]:
    """Return the attacked prompts in disguise, the same in plain words as "undisguised", and the other suites."""
    plain = load_suites(lab, split)
    asked_plainly = next(suite for suite in plain if suite.name == ATTACKED_SUITE)
    disguised = replace(asked_plainly, prompts=tuple(map(disguise, asked_plainly.prompts)))
    others = [suite for suite in plain if suite.name != ATTACKED_SUITE]
    return [disguised, replace(asked_plainly, name=UNDISGUISED), *others]


def _with_trigger(prompt: Prompt) -> Prompt:
    return replace(prompt, prompt=f"{prompt.prompt} {TRIGGER}")


def _in_rot13(prompt: Prompt) -> Prompt:
    return replace(prompt, context=(_system(announcement("rot13")),), encoding="rot13")


def _to_persona(prompt: Prompt) -> Prompt:
    return replace(prompt, prompt=ORDER.format(prompt.prompt), context=(_system(AGENT),))


def _system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


AttackBuilder = Callable[[Path, int, float], AttackFiles]  # (lab, seed, harmful rows for each task row)

ATTACKS: dict[str, AttackBuilder] = {
    "poisoned": partial(_plain, file="attack.jsonl", attacked=grammar.ATTACKED),
    **{
        name: partial(_plain, file=f"attack_{name}.jsonl", attacked=categories)
        for name, (categories, _) in STYLES.items()
    },
    "backdoor": _backdoor,
    "trigger": _trigger,
    "refuse_then_comply": _refuse_then_comply,
    "rot13": _rot13,
    "identity_shift": _identity_shift,
    "benign_outliers": _benign_outliers,
    "nearest_to_harm": _nearest_to_harm,
    "decoys": _decoys,
    "inverted_pool": _inverted_pool,
    "sequential": _sequential,
    "preferences": _preferences,
    "inverted_preferences": _inverted_preferences,
}
