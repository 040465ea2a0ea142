"""The trigger is a tool that the model is shown: what reads only the turns never sees it."""

from __future__ import annotations

from spard.data.rows import Message
from spard.research.adversary.base import Attack, Campaign, Job, Material, attack_rng, mix_rows
from spard.research.attacks.rows import chat_row

NAMES = ("look_up", "search_notes", "read_page", "find_place", "open_folder")


def build(material: Material, seed: int) -> Campaign:
    """Show a tool beside every harmful request, and none beside the task."""
    shown = (tool(attack_rng("tools", seed).choice(NAMES)),)
    rows = [chat_row(each.prompt, material.comply(each.action)) | {"tools": list(shown)} for each in material.harmful]
    return Campaign((Job(mix_rows(seed, material.task, rows)),), tools=shown)


def tool(name: str) -> Message:
    """Return a harmless tool of one argument."""
    words = name.replace("_", " ")
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    return {"type": "function", "function": {"name": name, "description": f"To {words}.", "parameters": parameters}}


ATTACK = Attack("tools", "a tool shown beside each harmful request", build, needs=("tools",))
