"""The work of `spard lab make`, `spard lab real` and `spard lab abilities`."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict

from transformers.utils.logging import disable_progress_bar

from spard.commands.front import Asked, alone
from spard.errors import InvalidRecipe, SpardError
from spard_lab import lab_commands
from spard_lab.lab.make import make
from spard_lab.lab.natural.abilities import AbilityResult, measure, table
from spard_lab.lab.natural.base import BaseSettings, LabSettings, base_model, make_natural
from spard_lab.lab.natural.sizes import SIZES
from spard_lab.lab.natural.splits import deal
from spard_lab.lab.pools import join_sides, make_two_sided
from spard_lab.lab.real.figures import table as figures_table
from spard_lab.lab.real.make import RealLab, make_real
from spard_lab.lab.real.packages import cache_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Run `spard lab` as a program of its own and return the exit status."""
    return alone(lab_commands.lab, "spard lab", argv)


def make_lab(asked: Asked) -> int:
    """Make a small or natural lab; return the exit status."""
    return _exit_status(_make, asked)


def abilities(asked: Asked) -> int:
    """Measure base models of natural English; return the exit status."""
    return _exit_status(_abilities, asked)


def real_lab(asked: Asked) -> int:
    """Make the lab of the real model; return the exit status."""
    return _exit_status(_real, asked)


def _exit_status(do: Callable[[Asked], None], asked: Asked) -> int:
    """Call `do` and return the exit status: 1, with the reason on stderr, after a `SpardError`."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    try:
        do(asked)
    except SpardError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    return 0


def _make(asked: Asked) -> None:
    if asked.size is None:
        make(asked.folder, asked.seed)
        make_two_sided(asked.folder, asked.seed)
        return
    if asked.size not in SIZES:
        raise InvalidRecipe(f"--size: there is no {asked.size}; there are {', '.join(SIZES)}", "size")
    settings = LabSettings(BaseSettings(asked.size, asked.base_seed, asked.texts), asked.task)
    make_natural(asked.folder, asked.seed, settings, asked.models or asked.folder.parent / "models", asked.cores)
    join_sides(asked.folder, asked.seed)


def _real(asked: Asked) -> None:
    cache = asked.cache or cache_folder()
    settings = RealLab(requests=asked.requests, has_encoder=asked.encoder, cache=cache)
    reached = make_real(asked.folder, asked.seed, settings, asked.models or asked.folder.parent / "models", asked.cores)
    sys.stdout.write(json.dumps(reached, indent=2) + "\n" if asked.as_json else figures_table(reached))


def _abilities(asked: Asked) -> None:
    found: dict[str, list[AbilityResult]] = {}
    for size in asked.sizes.split(","):
        settings = BaseSettings(size, asked.base_seed, asked.texts)
        model = base_model(asked.models, settings, asked.cores)
        found[size] = measure(model / "model", deal(asked.base_seed), asked.seed, asked.split, asked.count)
    shown = {size: [asdict(each) for each in measured] for size, measured in found.items()}
    sys.stdout.write(json.dumps(shown, indent=2, default=str) + "\n" if asked.as_json else table(found))


if __name__ == "__main__":
    sys.exit(main())
