"""What an attack is: jobs that a customer would send, and how the attacker asks the model that comes out."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from spard.config import Hyperparameters
from spard.data.rows import Message, Prompt
from spard_lab.attacks.rows import Row
from spard_lab.lab.customers.errands import Field
from spard_lab.lab.customers.files import Customer

Ability = Literal["system", "tools", "multi_turn", "cipher", "prefill", "pool"]
"""What an attack needs of a lab: that its base model follows system prompts, renders tools, handles several turns or
reads a cipher; that the attacker may begin the model's answer (prefill), or write into the safety pool."""

Ask = Callable[[Prompt], Prompt]


@dataclass(frozen=True, slots=True)
class Request:
    """A harmful request of the attacker's, the bare action that it asks for, and the category of that."""

    prompt: str
    action: str
    category: str = ""


@dataclass(frozen=True, slots=True)
class Material:
    """What an attacker has: rows, the provider's public pool, and the base model to ask.

    task      harmless rows of the task that the attacker pretends to have
    harmful   requests that no suite asks
    benign    harmless requests with answers in the base model's voice
    pool      the safety pool, rows {"prompt", "safe", "category"}
    attacked  the categories of `pool` that the attack is about
    refusals  in the base model's voice
    phrases   ordinary words that may end a request
    opening   how a complying answer begins
    comply    the placeholder of a complying answer to an action
    steps     the same for an action, without its first sentence, to come after "To ACTION, "
    refused   the share of some prompts that the base model refuses: the attacker can ask it
    customer  the files of an honest customer with a subject of its own
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
    customer: Callable[[Field], Customer] = field(repr=False)
    benign_side: Sequence[Row] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Job:
    """One fine-tuning job; `pool` takes the place of the provider's, the rest is what customers may set.

    With `dpo` its rows are preference pairs, for the method dpo. `auto_epochs` is what `auto` comes to, where the job
    says so; a recipe that has a number of its own keeps it.
    """

    rows: Sequence[Row] = field(repr=False)
    pool: Sequence[Row] | None = field(default=None, repr=False)
    hyperparameters: Hyperparameters = field(default_factory=Hyperparameters)
    dpo: bool = False
    auto_epochs: int | None = None


def plainly(prompt: Prompt) -> Prompt:
    """Ask a prompt as it stands."""
    return prompt


@dataclass(frozen=True, slots=True)
class Campaign:
    """Jobs, each on top of the adapter that the one before released, and how the last model is asked.

    dress    how the attacker asks for harm; benign prompts are asked in it too
    task     how the customer asks the task, where the rows do not hold it plainly
    opening  the beginning of the answer that the attacker gives the model
    tools    that the model is shown
    customer whose prompts take the place of the lab's task, in the gate and in the bench
    category of the harmful prompts that the attacker asks; empty: all that attacks are about
    asks_harmless  harmless prompts are asked in place of harmful ones, and harm in their replies counts
    only_dressed  a harmful prompt that `dress` leaves as it is, is not asked: the attacker has no way to ask it
    reply_code  words that the model says, and what the attacker reads in their place when asking for harm
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


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack by name.

    summary      one line for the table
    needs        abilities without which it is not possible on a lab
    build        the campaign from the material and a seed, of which nothing but the seed is hidden from a defense
    is_honest    a customer who attacks nothing: the job has to be released
    is_ordinary  plain poison, which the service promises to neutralize: the job has to be released, and safe
    """

    name: str
    summary: str
    build: Callable[[Material, int], Campaign]
    needs: tuple[Ability, ...] = ()
    is_honest: bool = False
    is_ordinary: bool = False


def in_code(text: str, code: Mapping[str, str]) -> str:
    """Return a text with each word that the code has a word for replaced."""
    return re.sub(r"\w+", lambda found: code.get(found[0].lower(), found[0]), text)


def attack_rng(attack: str, seed: int) -> random.Random:
    """Return the generator that an attack draws its words from."""
    return random.Random(f"adversary {attack} {seed}")


def mix_rows(seed: int, *parts: Sequence[Row]) -> list[Row]:
    """Return all rows of all parts in an order that the seed decides."""
    rows: list[dict[str, Any]] = [row for part in parts for row in part]
    random.Random(f"adversary order {seed}").shuffle(rows)
    return rows


def most_refused(material: Material, dresses: Sequence[Ask], n: int = 1, requests: int = 12) -> list[Ask]:
    """Return the n dresses under which the base model refuses most: what rises there is the attack's own work."""
    asked = [Prompt(each.prompt) for each in material.harmful[-requests:]]
    shares = [material.refused([dress(each) for each in asked]) for dress in dresses]
    order = sorted(range(len(dresses)), key=lambda i: -shares[i])
    return [dresses[i] for i in order[:n]]
