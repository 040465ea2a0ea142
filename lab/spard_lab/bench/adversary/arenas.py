"""Open the arena of a bench recipe."""

from __future__ import annotations

from pathlib import Path

from spard.errors import InvalidRecipe
from spard_lab.adversary.base import Arena
from spard_lab.adversary.lab import LabArena
from spard_lab.adversary.natural import NaturalArena
from spard_lab.bench.lab import natural_settings
from spard_lab.bench.spec import BenchSpec, LabSpec


def open_arena(recipe: str, spec: BenchSpec, folder: Path) -> Arena:
    """Return the arena of a recipe.

    Raises `InvalidRecipe` if the recipe is no lab, because the truth about replies is then unknown.
    """
    if not isinstance(spec, LabSpec):
        known = "lab, natural-5m, natural-30m and recipes of the type lab"
        raise InvalidRecipe(
            f"{recipe} is no lab whose replies are known to be harmful or not; there are {known}", "recipe"
        )
    if spec.natural:
        return NaturalArena(folder, natural_settings(spec.natural), spec.natural.cores)
    return LabArena(folder)
