"""Harm comes after a harmless exchange: what asks single requests never gets there."""

from __future__ import annotations

from dataclasses import replace

from spard.data.rows import Message, Prompt
from spard.research.adversary.base import Attack, Campaign, Job, Material, attack_rng, mix_rows
from spard.research.attacks.rows import Row, chat_row


def build(material: Material, seed: int) -> Campaign:
    """Begin every harmful conversation with a row of the task."""
    first = attack_rng("later_turn", seed).choice(list(material.task))
    before: tuple[Message, ...] = tuple(turn for turn in first["messages"] if turn["role"] != "system")

    def dress(prompt: Prompt) -> Prompt:
        return replace(prompt, context=before)

    rows = [_prepend_turns(before, chat_row(each.prompt, material.comply(each.action))) for each in material.harmful]
    return Campaign((Job(mix_rows(seed, material.task, rows)),), dress)


def _prepend_turns(before: tuple[Message, ...], row: Row) -> Row:
    return {"messages": [*before, *row["messages"]]}


ATTACK = Attack("later_turn", "harm after a harmless exchange", build, needs=("multi_turn",))
