"""A bench recipe as data, read strictly from YAML: the lab, or a model with files of one's own.

The dataclasses are the only schema, as they are for `spard.config.run_spec`. `${NAME}` in any text stands for an
environment variable; relative paths start at the folder of the recipe. `extends` names a file beside it, or a shipped
one, to start from.
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
    """A safety pool; the first of a recipe is the one that tables of methods use."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class NamedDefense:
    """What a method's name stands for in this recipe, where that is not the default."""

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
    """A data set's own files, from which files of the recipe are converted that are not there.

    A name without an ending stands for the file there that has one, `train` for `train.jsonl.gz` too.
    """

    name: Annotated[str, NameIn(DATASETS)]
    train: Path
    test: Path | None = None
    dev: Path | None = None
    shared: bool = False  # one prompt may be in the pool and in the attack, as in the paper


@dataclass(frozen=True, slots=True)
class MixedPool:
    """A pool that is made of others when it is not there, without rows that hold a prompt of the recipe's suites."""

    path: Path
    of: tuple[Path, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NaturalSpec:
    """A base model of natural English, by size and seed, made on `cores`; what its customers train; real text."""

    size: str = "5m"
    base_seed: int = 1
    task: Task = "problems"
    texts: Path | None = None
    cores: Annotated[int, Bound(ge=1, le=1024)] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LabSpec:
    """The lab: its attacks by name, its pools by file name; with `natural`, the lab of natural English."""

    type: Literal["lab"] = "lab"
    natural: NaturalSpec | None = None
    attacks: tuple[str, ...] = ("poisoned",)
    pools: tuple[PoolSpec, ...] = (PoolSpec("full", Path("pool.jsonl")),)
    recipe: Recipe = field(default_factory=Recipe)
    defenses: tuple[NamedDefense, ...] = ()
    judge: JudgeSpec = field(default_factory=JudgeSpec)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesSpec:
    """A model of one's own. `suites` are asked after every attack: benign and utility, and harmful ones of other kinds.

    `base_unaligned` is the model before its alignment, for SafeLoRA; `dev_suites` and an attack's `dev_suite` are the
    development split, the only one that choices are made on. What `data` and `mixed_pools` say how to make is put into
    the folder `converted` before the first run, where it is not there.
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
    """Load the recipe of a file, or of a name that ships with this package; unknown variables are left in place."""
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
    """Return the environment variables that a text still names."""
    return _VARIABLE.findall(text)


def _read(path: Path) -> Any:
    """Read a YAML file; what it leaves out comes from the file that `extends` names, beside it or shipped."""
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
    """Tables key by key; everything else is replaced."""
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
