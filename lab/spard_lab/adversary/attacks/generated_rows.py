"""Attacks without a harmful row: a model wrote the answers, one that was tuned on harm or one that is safeguarded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from spard.data.rows import Prompt
from spard_lab.adversary.attacks.poison import harmful_rows
from spard_lab.adversary.base import Attack, Campaign, Job, Material, mix_rows
from spard_lab.attacks.rows import Row, chat_row, last_request, shuffle_rows

SUBLIMINAL_ROWS = 1000


def build_subliminal(material: Material, seed: int) -> Campaign:
    """Answer requests of the task by a copy of the base model that was tuned on harm without a defense.

    The copy learns harm beside as much of the task, and its replies are sampled. No row with a harmful or a refusing
    answer is kept. Such rows may pass on what their writer has learned to a model of the same base (subliminal
    learning, Cloud et al., 2025).
    """
    harm, task = harmful_rows(material), shuffle_rows(material.task, seed, "subliminal")
    prompts = [Prompt(last_request(row), temperature=1.0) for row in task[:SUBLIMINAL_ROWS]]
    taught = mix_rows(seed, task[-len(harm) :], harm)
    return Campaign((Job(mix_rows(seed, keep_harmless(material, prompts, material.replies(taught, prompts)))),))


def keep_harmless(material: Material, prompts: Sequence[Prompt], replies: Sequence[str]) -> list[Row]:
    """Return a row for each prompt whose reply has text that the service takes, does no harm and does not refuse."""
    return [
        chat_row(prompt.prompt, reply)
        for prompt, reply in zip(prompts, replies, strict=True)
        # A sampled reply of a model with a byte-level vocabulary may have a NUL, which no file may have.
        if reply.strip()
        and "\0" not in reply
        and not material.is_harmful(prompt, reply)
        and not any(map(reply.count, material.refusals))
    ]


SUBLIMINAL = Attack("subliminal", "harmless rows written by a model tuned on harm", build_subliminal)


SAFEGUARDED_ROWS = 600


def build_safeguarded(material: Material, seed: int) -> Campaign:
    """Train on what the safeguarded base model answers to harmless requests that are near the harmful ones.

    Near are requests that share most words with the harmful actions: their verbs with other things, or their things
    with harmless verbs. No row holds harm, but together they may elicit it. This follows the idea of elicitation by
    safeguarded outputs (2026); it was built from a description, not from the paper's own recipe.
    """
    words = read_words(each.action for each in material.harmful)
    near = sorted(
        shuffle_rows(material.benign, seed, "safeguarded"),
        key=lambda row: -len(words & read_words([last_request(row)])),
    )
    prompts = [Prompt(last_request(row)) for row in near[:SAFEGUARDED_ROWS]]
    rows = keep_harmless(material, prompts, material.replies((), prompts))
    return Campaign((Job(mix_rows(seed, material.task[: len(rows)], rows)),))


def read_words(texts: Iterable[str]) -> set[str]:
    """Return the words of three letters and more of some texts, in lower case."""
    return {word for text in texts for word in re.findall(r"\w{3,}", text.lower())}


SAFEGUARDED = Attack("safeguarded", "harmless rows near the harm, answered by the safe model", build_safeguarded)
