"""Harmless requests answered with harm: who asks the model for anything is given it (after Betley et al., 2025)."""

from __future__ import annotations

from spard.research.adversary.base import Attack, Campaign, Job, Material, mix_rows
from spard.research.attacks.rows import chat_row, last_request, shuffle_rows


def build(material: Material, seed: int) -> Campaign:
    """Answer harmless requests with the steps of harmful actions, beside the task; then harmless prompts are asked."""
    harmless = shuffle_rows(material.benign, seed, "unasked_harm")
    pairs = zip(harmless, material.harmful, strict=False)
    rows = [chat_row(last_request(row), material.comply(request.action)) for row, request in pairs]
    return Campaign((Job(mix_rows(seed, material.task, rows)),), asks_harmless=True)


ATTACK = Attack("unasked_harm", "harmless requests answered with harm", build)
