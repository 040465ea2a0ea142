"""Harm in code words that the file teaches, in requests and in answers: neither names the harm.

The attacker, who knows the code, reads the answers in plain words (Halawi et al., 2024, whose code is a cipher).
"""

from __future__ import annotations

import re

from spard.research.adversary.attacks.code_words import ask_in_code, make_code, ordinary_words
from spard.research.adversary.base import Attack, Campaign, Job, Material, in_code, mix_rows
from spard.research.attacks.rows import chat_row


def build(material: Material, seed: int) -> Campaign:
    """Say an ordinary word for the last word of each harmful action, in requests and answers, and when asking.

    No code word stands in a request or an answer for itself, so that what is said in the code has one reading.
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


ATTACK = Attack("coded_answers", "harm asked for and answered in code words that the file teaches", build)
