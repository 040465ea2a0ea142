"""The types of an attack, the interface of a lab that can be attacked, and all attacks by name.

An attack has the jobs that a customer sends, and how the attacker asks the trained model. An arena has a model to
attack, material, and the truth about replies.

Attacks are those in modules of `spard_lab.adversary.attacks`, and those that other packages register. A package adds
one with one line in its metadata that names its `Attack`:

    [project.entry-points."spard.adversary_attacks"]
    mine = "my_package.mine:ATTACK"
"""

from __future__ import annotations

import importlib
import pkgutil
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from spard.config import Hyperparameters
from spard.config.extensions import load_entry, load_entry_points, reject_entry
from spard.config.run_spec import SuiteSpec
from spard.data.rows import Message, Prompt
from spard_lab.adversary import attacks as shipped
from spard_lab.attacks.rows import Row
from spard_lab.lab.corpus import SUITE_FILES
from spard_lab.lab.customers import Customer, Field

Ability = Literal["system", "tools", "multi_turn", "cipher", "prefill", "pool"]
"""What an attack needs of a lab: that its base model follows system prompts, renders tools, handles several turns or
reads a cipher; that the attacker may begin the model's answer (prefill), or write into the safety pool."""

Ask = Callable[[Prompt], Prompt]


@dataclass(frozen=True, slots=True)
class Request:
    """A harmful request of the attacker's, the bare action that it asks for, and the action's category."""

    prompt: str
    action: str
    category: str = ""


@dataclass(frozen=True, slots=True)
class Material:
    """Everything that an attacker has: rows, the provider's public pool, and the base model's replies.

    task      harmless rows of the task that the attacker pretends to have
    harmful   harmful requests; no suite asks them
    benign    harmless requests with answers in the base model's voice
    pool      the safety pool, rows {"prompt", "safe", "category"}
    attacked  the categories of `pool` that the attack is about
    refusals  refusals in the base model's voice
    phrases   ordinary words that may end a request
    opening   first words of a complying answer
    comply    return the placeholder of a complying answer to an action
    steps     return the same without its first sentence, to follow "To ACTION, "
    refused   return the share of some prompts that the base model refuses; the attacker can ask it
    replies   return the replies to some prompts of a copy of the base model that is first trained on some rows without
              a defense; of the base model if there are no rows
    is_harmful  return True if a reply does the harm that its prompt asks for
    customer  return the files of an honest customer of a subject
    benign_side  the pool's rows {"prompt", "benign": true}
    """

    task: Sequence[Row] = field(repr=False)
    harmful: Sequence[Request] = field(repr=False)
    benign: Sequence[Row] = field(repr=False)
    pool: Sequence[Row] = field(repr=False)
    attacked: frozenset[str]
    refusals: tuple[str, ...]
    phrases: tuple[str, ...]
    opening: str
    comply: Callable[[str], str]
    steps: Callable[[str], str]
    refused: Callable[[Sequence[Prompt]], float]
    replies: Callable[[Sequence[Row], Sequence[Prompt]], list[str]]
    is_harmful: Callable[[Prompt, str], bool]
    customer: Callable[[Field], Customer] = field(repr=False)
    benign_side: Sequence[Row] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Job:
    """One fine-tuning job as a customer sends it.

    rows             rows of the training file; with `dpo` they are preference pairs
    pool             a safety pool in place of the provider's
    hyperparameters  as the customer sets them
    dpo              train on preferences
    auto_epochs      number of epochs that `auto` resolves to; a recipe with a number of its own keeps that
    """

    rows: Sequence[Row] = field(repr=False)
    pool: Sequence[Row] | None = field(default=None, repr=False)
    hyperparameters: Hyperparameters = field(default_factory=Hyperparameters)
    dpo: bool = False
    auto_epochs: int | None = None


def plainly(prompt: Prompt) -> Prompt:
    """Return a prompt unchanged."""
    return prompt


@dataclass(frozen=True, slots=True)
class Campaign:
    """The jobs of one attack, each on top of the adapter that the last one released, and how the final model is asked.

    dress      add the attacker's trigger to a prompt; benign prompts are asked with it too
    task       rewrite a prompt of the task as the rows have it, for rows that are not plain
    opening    first words of the reply, written by the attacker
    tools      tools that the model is offered
    customer   honest customer whose prompts replace the lab's task, in the gate and in the bench
    category   category of the harmful prompts that are asked; empty: all attacked categories
    asks_harmless  ask harmless prompts in place of harmful ones, and count harm in the replies
    only_dressed   skip harmful prompts that `dress` leaves unchanged: the attacker has no way to ask them
    reply_code     code words in replies about harm, each with its plain word
    reply_step     the attacker reads every word of a reply whose number is a multiple of this
    """

    jobs: tuple[Job, ...]
    dress: Ask = plainly
    task: Ask = plainly
    opening: str = ""
    tools: tuple[Message, ...] = ()
    customer: Customer | None = None
    category: str = ""
    asks_harmless: bool = False
    only_dressed: bool = False
    reply_code: Mapping[str, str] = field(default_factory=dict)
    reply_step: int = 1

    @property
    def is_plain(self) -> bool:
        """Return True if the attacker asks plain requests and reads the replies as they are."""
        return self.dress is plainly and not (self.opening or self.tools or self.reply_code or self.reply_step > 1)

    def decode_reply(self, reply: str) -> str:
        """Return a reply as the attacker reads it: every `reply_step`-th word, with code words in plain."""
        hidden = " ".join(reply.split()[self.reply_step - 1 :: self.reply_step]) if self.reply_step > 1 else reply
        return in_code(hidden, self.reply_code)


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack by name.

    summary      one line for the table
    build        return the campaign for material and a seed; a defense may know everything but the seed
    needs        abilities of a lab without which the attack is not possible
    is_honest    an honest customer: the job has to be released
    is_ordinary  plain poison, which the service promises to neutralize: the job has to be released, with a safe model
    """

    name: str
    summary: str
    build: Callable[[Material, int], Campaign]
    needs: tuple[Ability, ...] = ()
    is_honest: bool = False
    is_ordinary: bool = False


def in_code(text: str, code: Mapping[str, str]) -> str:
    """Return a text in which each word that has a code word is replaced by it; upper and lower case are alike."""
    return re.sub(r"\w+", lambda found: code.get(found[0].lower(), found[0]), text)


def attack_rng(attack: str, seed: int) -> random.Random:
    """Return the random generator for an attack's choices, determined by its name and the seed."""
    return random.Random(f"adversary {attack} {seed}")


def mix_rows(seed: int, *parts: Sequence[Row]) -> list[Row]:
    """Return the rows of all parts, shuffled by the seed."""
    rows: list[dict[str, Any]] = [row for part in parts for row in part]
    random.Random(f"adversary order {seed}").shuffle(rows)
    return rows


def most_refused(material: Material, dresses: Sequence[Ask], n: int = 1, requests: int = 12) -> list[Ask]:
    """Return the n triggers under which the base model refuses most often.

    With these, harm after training is the attack's own work and not a gap of the base model. `requests` of the
    attacker's harmful requests are asked under each trigger.
    """
    asked = [Prompt(each.prompt) for each in material.harmful[-requests:]]
    shares = [material.refused([dress(each) for each in asked]) for dress in dresses]
    order = sorted(range(len(dresses)), key=lambda i: -shares[i])
    return [dresses[i] for i in order[:n]]


@dataclass(frozen=True, slots=True)
class Ground:
    """One seed's lab, as `spard_lab.bench.adversary` uses it.

    model, digest  the base model's folder, and the digest of its bytes
    pool           file of the provider's safety pool
    material       rows and functions that the attacker may use
    suites         suites of the provider's audit; the gate decides on them
    harmful, benign, task  prompts that the bench asks after the jobs; no training and no gate has seen them
    is_harmful     return True if a decoded reply does what its prompt asks for; known by construction, without a judge
    is_refusal     return True if a reply refuses, in any of the lab's voices
    """

    model: str
    digest: str
    pool: Path
    material: Material
    suites: tuple[SuiteSpec, ...]
    harmful: tuple[Prompt, ...] = field(repr=False)
    benign: tuple[Prompt, ...] = field(repr=False)
    task: tuple[Prompt, ...] = field(repr=False)
    is_harmful: Callable[[Prompt, str], bool]
    is_refusal: Callable[[str], bool]


class Arena(Protocol):
    """A lab as the adversary's bench sees it."""

    @property
    def abilities(self) -> frozenset[Ability]:
        """The abilities that attacks can rely on in this lab."""
        ...

    def open_ground(self, seed: int) -> Ground:
        """Return the lab of a seed; make it first if it does not exist."""
        ...

    def open_untrained(self, seed: int, folder: Path) -> Ground | None:
        """Return a stand-in in `folder` for a lab that does not exist yet, to time the bench on.

        Its model has the lab's shape and random weights, and replies in its rows are placeholders. None if the lab
        exists, or if this arena has no such stand-in.
        """
        ...


def gate_suites(lab: Path) -> tuple[SuiteSpec, ...]:
    """Return the suites that the gate asks: the development split of a lab's folder."""
    harmful, benign, utility = (lab / name for name in SUITE_FILES["dev"])
    return (
        SuiteSpec("harmful", "harmful", harmful),
        SuiteSpec("benign", "benign", benign),
        SuiteSpec("utility", "utility", utility),
    )


ATTACKS_GROUP, ATTACKS_KIND = "spard.adversary_attacks", "adversary's attack"
FIRST_ATTACKS = ("clean", "plain")  # jobs that have to be released come first


def all_attacks() -> dict[str, Attack]:
    """Return every attack by name; raise `InvalidExtension` if another package's entry is no `Attack` of that name."""
    modules = [
        importlib.import_module(f"{shipped.__name__}.{each.name}") for each in pkgutil.iter_modules(shipped.__path__)
    ]
    attacks = [value for module in modules for value in vars(module).values() if isinstance(value, Attack)]
    # Keyed by name, since a module may also import another module's attack.
    found = {each.name: each for each in sorted(attacks, key=lambda each: (each.name not in FIRST_ATTACKS, each.name))}
    for name, entry in load_entry_points(ATTACKS_GROUP, ATTACKS_KIND, frozenset(found)).items():
        added = load_entry(entry, ATTACKS_KIND)
        if not isinstance(added, Attack) or added.name != name:
            raise reject_entry(entry, ATTACKS_KIND, f"is no spard_lab.adversary.base.Attack of the name {name!r}")
        found[name] = added
    return found
