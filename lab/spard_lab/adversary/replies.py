"""Replies of a lab's base model, or of a copy that an attacker has trained without a defense, kept in the lab's folder.

The attacker of a service whose base model is public can train and ask a copy of it as he likes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from spard.config import NoDefense, Recipe, resolve
from spard.data.chat import encode_all
from spard.data.rows import Prompt, example
from spard.digests import folder_digest
from spard.evaluation.ask import ask, in_memory
from spard.models.base import load_base
from spard.training.train import train
from spard_lab.attacks.rows import Row
from spard_lab.lab.threads import threads

FOLDER = "replies"
TOKENS = 96  # of a reply
RECIPE = Recipe(defense=NoDefense())


def load_replies(lab: Path, taught: Sequence[Row], prompts: Sequence[Prompt], tokens: int = TOKENS) -> list[str]:
    """Return the replies of the lab's base model, after plain fine-tuning on the rows `taught` if there are any.

    They are written once for each model, rows and prompts, and found again by the digest of these.
    """
    facts = [folder_digest(lab / "model"), list(taught), [asdict(each) for each in prompts], tokens]
    file = lab / FOLDER / f"{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()}.json"
    if not file.exists():
        text = json.dumps(_write_replies(lab / "model", taught, prompts, tokens), indent=1)
        file.parent.mkdir(exist_ok=True)
        aside = file.with_suffix(f".{os.getpid()}")
        aside.write_text(text)
        aside.replace(file)
    found: list[str] = json.loads(file.read_text())
    return found


def _write_replies(model: Path, taught: Sequence[Row], prompts: Sequence[Prompt], tokens: int) -> list[str]:
    with threads():
        base = load_base(model, device="cpu")
        tuned = base.model
        if taught:
            rows = [example(row, line) for line, row in enumerate(taught, 1)]
            task = encode_all(base.tokenizer, rows, base.sequence_limit(None))
            tuned = train(base, task, [], RECIPE, resolve(RECIPE, len(task), base.hidden_size)).model
        return ask(in_memory(tuned, base.tokenizer), prompts, tokens)
