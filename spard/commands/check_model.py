"""`spard check-model MODEL`: try a base model before it is offered.

Loads tokenizer and weights, writes a conversation with the chat template, runs it forward, and takes the gradient that
a job's first step would. The exit status is 0 when all of that works, and 1 with one line on what does not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from spard.commands import measuring
from spard.commands.front import Asked, alone
from spard.errors import SpardError
from spard.models.folder.check import notes
from spard.training.trial import try_base


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command without the others."""
    return alone(measuring.check_model, "spard check-model", argv)


def execute(asked: Asked) -> int:
    """Try a model and tell what it is, or what is wrong with it."""
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        found = try_base(asked.model, asked.revision)
    except SpardError as error:
        sys.stderr.write(f"{error.code}: {error.message}\n")
        return 1
    told = notes(Path(asked.model)) if Path(asked.model).is_dir() else []
    if asked.as_json:
        facts = {"parameters": found.parameters, "positions": found.positions, "digest": found.digest, "notes": told}
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
        return 0
    sys.stdout.write(
        f"{found.parameters} parameters, rows of up to {found.positions} tokens; tokenizer, chat template, end token, "
        "weights, a forward pass and a gradient to train an adapter by are as they should be\n"
    )
    for each in told:
        sys.stdout.write(f"note: {each}\n")
    return 0
