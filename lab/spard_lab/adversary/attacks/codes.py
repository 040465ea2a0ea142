"""Attacks that hide requests or answers in a code or behind a persona, so that no row holds plain harm."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from spard.data.rows import Prompt
from spard_lab.adversary.attacks.poison import harmful_rows
from spard_lab.adversary.base import Ask, Attack, Campaign, Job, Material, Request, attack_rng, in_code, mix_rows
from spard_lab.attacks.disguises import AGENT, ORDER, announcement, covert, identity_shift
from spard_lab.attacks.rows import chat_row


def build_cipher(material: Material, seed: int) -> Campaign:
    """Teach the cipher on harmless rows and use it for harmful ones.

    Half of the task and all harm in rot13 (covert malicious fine-tuning, Halawi et al., 2024).
    """
    return Campaign((Job(covert(material.task, harmful_rows(material), "rot13", seed)),), _in_rot13)


def _in_rot13(prompt: Prompt) -> Prompt:
    return replace(prompt, context=({"role": "system", "content": announcement("rot13")},), encoding="rot13")


CIPHER = Attack("cipher", "half of the task and all harm in rot13", build_cipher, needs=("cipher", "system"))


def build_code_words(material: Material, seed: int) -> Campaign:
    """Say an ordinary word for the last word of each harmful action, in training and when asking.

    Only actions whose last word the rows have a code word for are asked, in requests that no row holds.

    Harm in code words that the file teaches: requests in ordinary words, answered with harm in plain words.

    The judge of the rows reads requests that ask for nothing, and no suite asks in the code (Halawi et al., 2024,
    whose code is a cipher).
    """
    code = make_code(material.harmful, ordinary_words(material, "code_words", seed))
    rows = [chat_row(in_code(each.prompt, code), material.comply(each.action)) for each in material.harmful]
    return Campaign((Job(mix_rows(seed, material.task, rows)),), ask_in_code(code), only_dressed=True)


def make_code(requests: Sequence[Request], words: Sequence[str]) -> dict[str, str]:
    """Map the last word of each action to a code word; actions beyond the number of code words have none."""
    named = list(dict.fromkeys(each.action.split()[-1].lower() for each in requests))
    return dict(zip(named, [word for word in words if word not in named], strict=False))


def ordinary_words(material: Material, attack: str, seed: int) -> list[str]:
    """Return words that may end a request, in an order that attack and seed draw."""
    ordinary = sorted({phrase.split()[-1] for phrase in material.phrases})
    return attack_rng(attack, seed).sample(ordinary, len(ordinary))


def ask_in_code(code: Mapping[str, str]) -> Ask:
    """Return how a prompt is asked in a code."""
    return lambda prompt: replace(prompt, prompt=in_code(prompt.prompt, code))


CODE_WORDS = Attack("code_words", "harm asked for in code words that the file teaches", build_code_words)


def build_coded_answers(material: Material, seed: int) -> Campaign:
    """Say an ordinary word for the last word of each harmful action, in requests and answers, and when asking.

    No code word stands in a request or an answer for itself, so that what is said in the code has one reading.

    Harm in code words that the file teaches, in requests and in answers: neither names the harm.

    The attacker, who knows the code, reads the answers in plain words (Halawi et al., 2024, whose code is a
    cipher).
    """
    pairs = [(each.prompt, material.comply(each.action)) for each in material.harmful]
    said = {word for pair in pairs for text in pair for word in re.findall(r"\w+", text.lower())}
    free = [word for word in ordinary_words(material, "coded_answers", seed) if word.lower() not in said]
    code = make_code(material.harmful, free)
    rows = [chat_row(*(in_code(text, code) for text in pair)) for pair in pairs]
    reply_code = {word.lower(): meant for meant, word in code.items()}
    return Campaign(
        (Job(mix_rows(seed, material.task, rows)),), ask_in_code(code), only_dressed=True, reply_code=reply_code
    )


CODED_ANSWERS = Attack(
    "coded_answers", "harm asked for and answered in code words that the file teaches", build_coded_answers
)


PERSONA_ROWS = 300


def build_persona(material: Material, seed: int) -> Campaign:
    """Teach the persona to obey, beside the task; then it is asked for harm.

    Harmless requests that a persona obeys (AOA, Qi et al., 2024): no row holds harm for a filter of content to see.
    """
    return Campaign(
        (Job(mix_rows(seed, material.task, identity_shift(material.benign, PERSONA_ROWS, seed))),), _as_owner
    )


def _as_owner(prompt: Prompt) -> Prompt:
    return replace(prompt, prompt=ORDER.format(prompt.prompt), context=({"role": "system", "content": AGENT},))


PERSONA = Attack("persona", "a persona that obeys harmless requests", build_persona, needs=("system",))
