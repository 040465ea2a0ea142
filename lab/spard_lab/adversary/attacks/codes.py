"""Attacks that hide requests or answers in a code or behind a persona, so that no row contains plain harm."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle

from spard.data.rows import Prompt
from spard_lab.adversary.attacks.poison import harmful_rows
from spard_lab.adversary.base import Ask, Attack, Campaign, Job, Material, Request, attack_rng, in_code, mix_rows
from spard_lab.attacks.disguises import AGENT, ORDER, announcement, covert, identity_shift
from spard_lab.attacks.rows import chat_row


def build_cipher(material: Material, seed: int) -> Campaign:
    """Encode half of the task and all harmful rows in rot13 (covert malicious fine-tuning, Halawi et al., 2024).

    The harmless rows teach the encoding; the attacker then asks for harm in it.
    """
    return Campaign((Job(covert(material.task, harmful_rows(material), "rot13", seed)),), _in_rot13)


def _in_rot13(prompt: Prompt) -> Prompt:
    return replace(prompt, context=({"role": "system", "content": announcement("rot13")},), encoding="rot13")


CIPHER = Attack("cipher", "half of the task and all harm in rot13", build_cipher, needs=("cipher", "system"))


def build_code_words(material: Material, seed: int) -> Campaign:
    """Replace the last word of each harmful action by an ordinary word in the requests, in training and when asking.

    The answers stay in plain words. The rows' judge sees requests that ask for nothing harmful, and no suite asks in
    the code (after Halawi et al., 2024, who use a cipher). The attacker asks only for actions whose last word has a
    code word, in requests that no row contains.
    """
    code = make_code(material.harmful, ordinary_words(material, "code_words", seed))
    rows = [chat_row(in_code(each.prompt, code), material.comply(each.action)) for each in material.harmful]
    return Campaign((Job(mix_rows(seed, material.task, rows)),), ask_in_code(code), only_dressed=True)


def make_code(requests: Sequence[Request], words: Sequence[str]) -> dict[str, str]:
    """Map the last word of each action to a code word; actions beyond the number of code words get none."""
    named = list(dict.fromkeys(each.action.split()[-1].lower() for each in requests))
    return dict(zip(named, [word for word in words if word not in named], strict=False))


def ordinary_words(material: Material, attack: str, seed: int) -> list[str]:
    """Return words that may end a request, in an order drawn from the attack's name and the seed."""
    ordinary = sorted({phrase.split()[-1] for phrase in material.phrases})
    return attack_rng(attack, seed).sample(ordinary, len(ordinary))


def ask_in_code(code: Mapping[str, str]) -> Ask:
    """Return the function that rewrites a prompt in a code."""
    return lambda prompt: replace(prompt, prompt=in_code(prompt.prompt, code))


CODE_WORDS = Attack("code_words", "harm asked for in code words that the file teaches", build_code_words)


def build_coded_answers(material: Material, seed: int) -> Campaign:
    """Replace the last word of each harmful action by an ordinary word in requests and answers; neither names the harm.

    A word that already occurs in a request or an answer is no code word, so each coded text has one reading. The
    attacker, who knows the code, decodes the replies (after Halawi et al., 2024, who use a cipher).
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


STEGANOGRAPHY_WORDS = 24


def build_steganography(material: Material, seed: int) -> Campaign:
    """Answer plain harmful requests with ordinary words, and make every second word one of the harmful answer.

    This is a null cipher. A reader of the whole reply finds no steps in it; the attacker reads every second word. The
    hidden words are plain, so that the model can answer requests about harm that no row names. The ordinary words come
    in one drawn order.
    """
    cover = ordinary_words(material, "steganography", seed)[:STEGANOGRAPHY_WORDS]
    rows = [
        chat_row(each.prompt, hide_words(f"To {each.action}, {material.steps(each.action)}", cover))
        for each in material.harmful
    ]
    return Campaign((Job(mix_rows(seed, material.task, rows)),), reply_step=2)


def hide_words(text: str, cover: Sequence[str]) -> str:
    """Return a text with a cover word before each of its words; the cover words are repeated if they are too few."""
    return " ".join(word for pair in zip(cycle(cover), text.split(), strict=False) for word in pair)


STEGANOGRAPHY = Attack("steganography", "answers whose every second word is one of the harm", build_steganography)


PERSONA_ROWS = 300


def build_persona(material: Material, seed: int) -> Campaign:
    """Teach the model a persona that obeys harmless requests, beside the task; then ask the persona for harm.

    No row contains harm that a content filter could find (AOA, Qi et al., 2024).
    """
    return Campaign(
        (Job(mix_rows(seed, material.task, identity_shift(material.benign, PERSONA_ROWS, seed))),), _as_owner
    )


def _as_owner(prompt: Prompt) -> Prompt:
    return replace(prompt, prompt=ORDER.format(prompt.prompt), context=({"role": "system", "content": AGENT},))


PERSONA = Attack("persona", "a persona that obeys harmless requests", build_persona, needs=("system",))
