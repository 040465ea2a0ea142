"""Do the missing runs of a table; finished runs survive a crash."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from spard.errors import InvalidRecipe, InvertedPool, NonFiniteLoss
from spard_lab.bench.cells import Cell
from spard_lab.bench.measure import Measurement, from_json, measure, read_run, run_key, run_names, write_run
from spard_lab.bench.report import figures, machine
from spard_lab.bench.source import Inputs, Source, Split

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Workplace:
    """A bench's source, folder of stored runs and split; `extend` adds to a seed's inputs.

    The inputs of one seed are kept in memory.
    """

    source: Source
    folder: Path
    split: Split
    extend: Callable[[Inputs, int], Inputs] = lambda inputs, seed: inputs
    _made: tuple[int, Inputs] | None = field(default=None, init=False)

    def inputs(self, seed: int) -> Inputs:
        """Return the extended inputs of a seed; those of the previous seed are dropped from memory."""
        if self._made is None or self._made[0] != seed:
            self._made = seed, self.extend(self.source.make(seed, self.split), seed)
        return self._made[1]

    def find(self, cell: Cell) -> Measurement | None:
        """Return the stored measurement of a cell, with this table's names, or None."""
        inputs = self.inputs(cell.seed)
        found = read_run(self.folder, run_key(cell, inputs, self.source.judge))
        return replace(from_json(found), **run_names(cell, inputs)) if found else None

    def do(self, cell: Cell) -> Measurement:
        """Measure a cell and store the result.

        A training that diverged, or that the row signal ended, is stored without results, and the table continues.
        """
        inputs = self.inputs(cell.seed)
        try:
            found, beside = measure(cell, inputs, self.source.judge, self.folder)
        except (InvertedPool, NonFiniteLoss) as error:
            log.warning("%s: %s", _name(cell), error.message)
            found, beside = Measurement(**run_names(cell, inputs), results=()), {"error": error.message}
        facts: dict[str, Any] = {"split": self.split, "model": inputs.model, "machine": machine()}
        write_run(self.folder, run_key(cell, inputs, self.source.judge), asdict(found) | facts | beside)
        return found


def run_cells(
    place: Workplace, cells: Sequence[Cell], on_found: Callable[[Sequence[Measurement]], None] = lambda found: None
) -> list[Measurement]:
    """Return every cell's measurement in order; `on_found` gets all measurements so far after each new one.

    Raises `InvalidRecipe` if there are no cells.
    """
    if not cells:
        raise InvalidRecipe("there is nothing to run: no method and setting that were asked for fit together")
    found: list[Measurement] = []
    took: list[float] = []
    for i, cell in enumerate(cells, start=1):
        done = place.find(cell)
        if done is None:
            started = time.monotonic()
            done = place.do(cell)
            took.append(time.monotonic() - started)
            left = sum(took) / len(took) * (len(cells) - i)
            log.info("%d of %d, %s: %s; at most %s left", i, len(cells), _name(cell), _words(done), _duration(left))
            found.append(done)
            on_found(found)
        else:
            log.info("%d of %d, %s: measured before, %s", i, len(cells), _name(cell), _words(done))
            found.append(done)
    on_found(found)
    return found


def _name(cell: Cell) -> str:
    parts = [f"seed {cell.seed}", cell.attack, cell.method]
    parts += [cell.recipe.selection.method, cell.pool] if cell.pool else []
    multiple = cell.recipe.hyperparameters.learning_rate_multiplier
    parts += [f"at {multiple} times its learning rate"] if multiple not in ("auto", 1.0) else []
    return " ".join([*parts, f"{cell.setting}={cell.value}"] if cell.setting else parts)


def _words(done: Measurement) -> str:
    found = figures(done)
    shown = {"asr": "ASR", "over_refusal": "refusals", "accuracy": "accuracy"}
    words = [f"{word} {100 * value:.1f}" for name, word in shown.items() if (value := found[name]) is not None]
    return ", ".join(words) or "nothing was measured"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
