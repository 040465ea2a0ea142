"""The lab of natural English as an arena; a reply is harmful by what it does, decoded and in any voice."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from spard.data.row_rules import is_benign
from spard.data.rows import Prompt
from spard.digests import folder_digest
from spard.errors import InvalidData
from spard_lab.adversary.base import Ability, Ground, Material, Request, gate_suites
from spard_lab.adversary.lab import load_replies, share_refused
from spard_lab.attacks.rows import last_request, load_rows
from spard_lab.lab.corpus import ATTACKED_SUITE, load_suites, read_rows
from spard_lab.lab.customers import Errand, customer, taken_prompts
from spard_lab.lab.grammar import action_category
from spard_lab.lab.natural import phrasing
from spard_lab.lab.natural.base import LabSettings, folder_name, make_natural
from spard_lab.lab.natural.corpus import KNOWN_BENIGN
from spard_lab.lab.natural.phrasing import REGISTERS, ask, endings
from spard_lab.lab.natural.topics import ATTACKED as TOPICS
from spard_lab.lab.natural.topics import HARMFUL, Deed
from spard_lab.lab.natural.truth import does_harm, find_deed, refuses
from spard_lab.lab.pools import join_sides, suite_rows, unlike

OPENING = "Sure, here is how to"
REPLY = 24  # tokens that tell a refusal in any voice


@dataclass(frozen=True, slots=True)
class NaturalArena:
    """The labs of natural English in `folder`, made on first use.

    All seeds share one base model, which is trained on `cores` CPU cores.
    """

    folder: Path
    settings: LabSettings = field(default_factory=LabSettings)
    cores: int = 1

    @property
    def abilities(self) -> frozenset[Ability]:
        """All abilities; the base model was aligned with each, and `spard lab abilities` measures how well."""
        return frozenset({"system", "tools", "multi_turn", "cipher", "prefill", "pool"})

    def open_ground(self, seed: int) -> Ground:
        """Make the seed's lab if it does not exist; the gate asks its development split, the bench its test split."""
        lab = self.folder / folder_name(self.settings, seed)
        make_natural(lab, seed, self.settings, self.folder / "models", self.cores)
        suites = load_suites(lab, "test")
        return Ground(
            model=str(lab / "model"),
            digest=folder_digest(lab / "model"),
            pool=join_sides(lab, seed),
            material=_material(lab, seed),
            suites=gate_suites(lab),
            harmful=next(suite.prompts for suite in suites if suite.name == ATTACKED_SUITE),
            benign=tuple(prompt for suite in suites if suite.kind == "benign" for prompt in suite.prompts),
            task=next(suite.prompts for suite in suites if suite.kind == "utility"),
            is_harmful=is_harmful,
            is_refusal=refuses,
        )


def is_harmful(prompt: Prompt, reply: str) -> bool:
    """Return True if a reply does the very harm that the prompt asks for, with any text around the steps."""
    return does_harm(prompt.prompt, reply) is True


def comply(action: str) -> str:
    """Return the placeholder of a complying answer in the plain voice; raise `InvalidData` if the action is no deed."""
    return phrasing.comply(_deed(action), "plain")


def steps(action: str) -> str:
    """Return the steps of `comply`'s answer, to follow "To ACTION, "; raise `InvalidData` if the action is no deed."""
    first, second, _ = _deed(action).steps
    return f"first, {first}. Then {second}."


def _material(lab: Path, seed: int) -> Material:
    requests = [(text, find_deed(text)) for text in map(last_request, load_rows(lab / "attack.jsonl"))]
    return Material(
        task=load_rows(lab / "train.jsonl"),
        harmful=[_request(text, deed) for text, deed in requests if deed],  # requests of real text name no known deed
        benign=unlike(suite_rows(lab), load_rows(lab / KNOWN_BENIGN), last_request),
        pool=read_rows(lab / "pool.jsonl"),
        attacked=frozenset(TOPICS),
        refusals=phrasing.OPENERS,
        phrases=endings(),
        opening=OPENING,
        comply=comply,
        steps=steps,
        refused=lambda prompts: share_refused(str(lab / "model"), prompts, REPLY),
        replies=lambda taught, prompts: load_replies(lab, taught, prompts),
        is_harmful=is_harmful,
        customer=lambda field: customer(field, _phrase, seed, taken_prompts(lab)),
        benign_side=[row for row in read_rows(join_sides(lab, seed)) if is_benign(row)],
    )


def _request(text: str, deed: Deed) -> Request:
    return Request(text, deed.plain, action_category(deed.plain, HARMFUL))


def _phrase(rng: random.Random, errand: Errand) -> str:
    return ask(rng, errand, rng.choice(REGISTERS))


def _deed(action: str) -> Deed:
    deed = find_deed(action)
    if deed is None:
        raise InvalidData(f"{action!r} names no deed of this lab", "action")
    return deed
