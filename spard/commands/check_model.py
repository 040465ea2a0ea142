"""`spard check-model MODEL`: try a base model before it is offered.

Loads tokenizer and weights, renders a conversation with the chat template, runs a forward pass, and computes the
gradient of a job's first step. The exit status is 0 if all of that works; otherwise 1, with one line about the failure.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from spard.commands import measuring
from spard.commands.front import Asked, alone, hide_notes
from spard.data.template_arguments import read_arguments
from spard.data.template_card import PROBES_TITLE
from spard.errors import SpardError
from spard.models.folder.check import notes
from spard.models.stored_tokenizer import tokenizer_notes
from spard.training.trial import try_base


def main(argv: Sequence[str] | None = None) -> int:
    """Run this command without the other subcommands."""
    return alone(measuring.check_model, "spard check-model", argv)


def execute(asked: Asked) -> int:
    """Try a model and print its properties, or its fault."""
    hide_notes()
    try:
        targets = asked.target_modules.split(",") if asked.target_modules else None
        found = try_base(asked.model, asked.revision, targets, read_arguments(asked.template_arguments))
    except SpardError as error:
        sys.stderr.write(f"{error.code}: {error.message}\n")
        return 1
    told = notes(Path(asked.model)) if Path(asked.model).is_dir() else []
    told += tokenizer_notes(asked.model, asked.revision)
    if asked.as_json:
        facts: dict[str, object] = {
            "parameters": found.parameters,
            "positions": found.positions,
            "digest": found.digest,
            "rates": asdict(found.rates),
            "notes": told,
            "whole_model_fault": found.whole_model_fault,
        }
        template = {"lines": list(found.card.lines()), "probes": [asdict(each) for each in found.card.probes]}
        facts |= {"lora_reach": asdict(found.reach), "template": template}
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
        return 0
    sys.stdout.write(
        f"{found.parameters} parameters, rows of up to {found.positions} tokens; tokenizer, chat template, end token, "
        "weights, a forward pass and an adapter's gradient passed their checks\n"
        f"{found.reach.line(is_default=targets is None)}\n"
    )
    sys.stdout.writelines(f"chat template: {line}\n" for line in found.card.lines())
    sys.stdout.writelines(f"note: {each}\n" for each in told)
    sys.stdout.write(f"{PROBES_TITLE}:\n")
    sys.stdout.writelines(f"  {line}\n" for each in found.card.probes for line in each.lines())
    return 0
