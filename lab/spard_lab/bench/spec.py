"""A bench recipe as data, read strictly from YAML: a lab, or a model with the user's own files.

The dataclasses are the only schema, as in `spard.config.run_spec`. `${NAME}` in any text stands for an environment
variable; relative paths start at the folder of the recipe. `extends` names a base recipe, in the same folder or
shipped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from spard.config import Bound, Defense, JudgeSpec, Recipe
from spard.config.extensions import NameIn
from spard.config.run_spec import SuiteSpec, parse
from spard.errors import InvalidRecipe
from spard_lab.datasets import DATASETS
from spard_lab.lab.natural.tasks import Task

RECIPES = Path(__file__).parent / "recipes"
_VARIABLE = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """A safety pool; tables of methods use the first one of a recipe."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class NamedDefense:
    """A method name of this recipe and its defense, where that is not the default."""

    name: str
    defense: Defense


@dataclass(frozen=True, slots=True)
class AttackSpec:
    """Harmful rows to mix into the task, and harmful prompts to ask afterward."""

    name: str
    rows: Path
    suite: Path
    dev_suite: Path | None = None


@dataclass(frozen=True, slots=True)
class DataSpec:
    """A data set's own files, to convert into missing files of the recipe.

    A name without an ending stands for the file with a known ending: `train` for `train.jsonl.gz`.
    """

    name: Annotated[str, NameIn(DATASETS)]
    train: Path
    test: Path | None = None
    dev: Path | None = None
    shared: bool = False  # one prompt may be in the pool and in the attack, as in the paper


@dataclass(frozen=True, slots=True)
class MixedPool:
    """A pool mixed from others if it does not exist, without rows that contain a prompt of the recipe's suites."""

    path: Path
    of: tuple[Path, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NaturalSpec:
    """A base model of natural English by size and seed, the customers' task, and a folder of real text.

    `cores` is the number of CPU cores to make the base model with.
    """

    size: str = "5m"
    base_seed: int = 1
    task: Task = "problems"
    texts: Path | None = None
    cores: Annotated[int, Bound(ge=1, le=1024)] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LabSpec:
    """A lab: its attacks by name, its pools by file name; with `natural`, the lab of natural English.

    With `real`, the lab of the real model, for `spard bench detectors` alone.
    """

    type: Literal["lab"] = "lab"
    natural: NaturalSpec | None = None
    real: bool = False
    attacks: tuple[str, ...] = ("poisoned",)
    pools: tuple[PoolSpec, ...] = (PoolSpec("full", Path("pool.jsonl")),)
    recipe: Recipe = field(default_factory=Recipe)
    defenses: tuple[NamedDefense, ...] = ()
    judge: JudgeSpec = field(default_factory=JudgeSpec)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesSpec:
    """A model with the user's own files.

    suites          asked after every attack: benign and utility suites, and harmful ones of other kinds
    dev_suites      with the attacks' `dev_suite` the development split, the only one that choices are made on
    converted       folder for missing files, which are made from `data` and `mixed_pools` before the first run
    base_unaligned  the model before its alignment, for SafeLoRA
    """

    model: str
    task: Path
    attacks: tuple[AttackSpec, ...]
    pools: tuple[PoolSpec, ...]
    suites: tuple[SuiteSpec, ...]
    dev_suites: tuple[SuiteSpec, ...] = ()
    converted: Path | None = None
    data: tuple[DataSpec, ...] = ()
    mixed_pools: tuple[MixedPool, ...] = ()
    type: Literal["files"] = "files"
    harmful_ratio: Annotated[float, Bound(ge=0, le=10)] = 0.1  # harmful rows for each row of the task
    revision: str | None = None
    base_unaligned: str | None = None
    recipe: Recipe = field(default_factory=Recipe)
    defenses: tuple[NamedDefense, ...] = ()
    judge: JudgeSpec = field(default_factory=JudgeSpec)


BenchSpec = LabSpec | FilesSpec


def load_spec(name: str, environment: Mapping[str, str]) -> BenchSpec:
    """Load a recipe from a file or by the name of a shipped one; unknown variables stay in place.

    Raises `InvalidRecipe` if there is no such recipe or it is invalid.
    """
    shipped = RECIPES / f"{name}.yaml"
    path = shipped if shipped.is_file() else Path(name)
    if not path.is_file():
        raise InvalidRecipe(
            f"{name} is no file and no shipped recipe; those are {', '.join(shipped_names())}", "recipe"
        )
    spec: BenchSpec = parse(LabSpec | FilesSpec, _fill_variables(_read(path), environment), "")
    if isinstance(spec, LabSpec):  # its pools are files of the lab
        return replace(spec, natural=_locate_paths(spec.natural, path.resolve().parent))
    located: FilesSpec = _locate_paths(spec, path.resolve().parent)
    return located


def shipped_names() -> list[str]:
    """List the recipes that come with the package, by the names that `--recipe` takes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def variables(text: str) -> list[str]:
    """Return the environment variables that a text still contains."""
    return _VARIABLE.findall(text)


def _read(path: Path) -> Any:
    """Read a YAML file, merged over the file that `extends` names."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRecipe(f"{path} cannot be read: {error}", "recipe") from error
    except yaml.YAMLError as error:
        raise InvalidRecipe(f"{path} is not YAML: {' '.join(str(error).split())}", "recipe") from error
    if isinstance(raw, dict) and isinstance(base := raw.pop("extends", None), str):
        beside = path.parent / base
        return _merge_tables(_read(beside if beside.is_file() else RECIPES / Path(base).name), raw)
    return raw


def _merge_tables(base: Any, over: Any) -> Any:
    """Merge tables key by key; replace everything else."""
    if isinstance(base, dict) and isinstance(over, dict):
        return base | {key: _merge_tables(base.get(key), value) for key, value in over.items()}
    return over


def _fill_variables(value: Any, environment: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _fill_variables(each, environment) for key, each in value.items()}
    if isinstance(value, list):
        return [_fill_variables(each, environment) for each in value]
    if isinstance(value, str):
        return _VARIABLE.sub(lambda found: environment.get(found[1], found[0]), value)
    return value


def _locate_paths(value: Any, folder: Path) -> Any:
    """Return the value with every relative path put under `folder`."""
    if isinstance(value, Path):
        return value if variables(str(value)) else folder / value
    if isinstance(value, tuple):
        return tuple(_locate_paths(each, folder) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: _locate_paths(getattr(value, each.name), folder) for each in fields(value)})
    return value
