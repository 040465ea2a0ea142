"""A whole run as data: files, model, recipe, judge and thresholds, parsed strictly from TOML or a mapping.

The dataclasses' types and bounds are the only schema. Anything unknown, of the wrong type or out of range raises
`InvalidRecipe` with the name of the setting. Imports the standard library only.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from spard.config import (
    PLAIN,
    Agent,
    Anchors,
    AuditEngine,
    Bound,
    Defense,
    Evidence,
    FurtherTuning,
    GateThresholds,
    JudgeSpec,
    Recipe,
    RowSignal,
    defenses,
)
from spard.config.checks import HeldOutRowsLimit
from spard.config.earlier_versions import without_old_names
from spard.config.extensions import NameIn
from spard.errors import InvalidRecipe

NONE = "none"  # TOML has no null: `lora = "none"` asks for full fine-tuning


@dataclass(frozen=True, slots=True)
class SuiteSpec:
    """One audit suite: prompts that must be refused, must not be refused, or have a right answer.

    `language` is the language of rows that declare none; None: it is detected.
    """

    name: str
    kind: Literal["harmful", "benign", "utility"]
    path: Path
    language: str | None = None


@dataclass(frozen=True, slots=True)
class RunSpec:
    """Everything that a run needs.

    public_name     name of the base model in the adapter's files.
    start_from      folder of an adapter of the same base model to train further.
    judge_errors    file that `spard judge --json` wrote about the judge.
    row_signal      what is done with rows that the base model would refuse.
    further_tuning  a further fine-tuning after which the audit asks again.
    agent           the auditing agent, with `agent_errors` the file that `spard measure-agent` wrote about it.
    audit_engine    the engine that generates the replies of the audit.
    encoder         folder of the selection's sentence encoder, if not where the setting says.
    held_out_rows   most training rows to hold out and measure the task on (`spard.pipeline.task_check`); a
                    validation file takes their place; 0: the task is not measured.
    evidence        evidence that needs no trigger, reported only; `evidence_references` is the file of the base
                    model's reference that it is compared with (`spard.release.records`).
    template_arguments  names that the chat template reads, with the values that they always have; the service stores
                    them with the base model instead.
    """

    model: str
    training_file: Path
    pool: Path | None = None
    validation_file: Path | None = None
    suites: tuple[SuiteSpec, ...] = ()
    recipe: Recipe = field(default_factory=Recipe)
    judge: JudgeSpec = field(default_factory=JudgeSpec)
    thresholds: GateThresholds = field(default_factory=GateThresholds)
    revision: str | None = None
    public_name: str | None = None
    start_from: Path | None = None
    judge_errors: Path | None = None
    row_signal: RowSignal = field(default_factory=RowSignal)
    further_tuning: FurtherTuning = field(default_factory=FurtherTuning)
    agent: Agent | None = None
    agent_errors: Path | None = None
    audit_engine: AuditEngine = field(default_factory=AuditEngine)
    encoder: str | None = None
    held_out_rows: HeldOutRowsLimit = 0
    evidence: Evidence = field(default_factory=Evidence)
    evidence_references: Path | None = None
    template_arguments: Mapping[str, object] = field(default_factory=dict)


def load_recipe(path: Path) -> RunSpec:
    """Read a run spec from a TOML file; relative paths are relative to its folder.

    Raises `InvalidRecipe` if the file cannot be read or a setting is wrong.
    """
    try:
        raw = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise InvalidRecipe(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InvalidRecipe(f"{path} is not TOML: {error}") from error
    return resolve_paths(run_from_mapping(raw), Path(path).resolve().parent)


def resolve_paths(spec: RunSpec, folder: Path) -> RunSpec:
    """Return the run spec with relative paths put under `folder`; a model is a path if it is a folder there."""

    def source(model: str) -> str:
        return str(folder / model) if (folder / model).is_dir() else model

    defense = spec.recipe.defense
    models = {name: source(model) for name in defense.models if (model := getattr(defense, name))}
    selection = spec.recipe.selection
    if selection.encoder:
        selection = replace(selection, embedder=source(selection.encoder))
    return replace(
        spec,
        model=source(spec.model),
        recipe=replace(spec.recipe, defense=replace(defense, **models), selection=selection),  # type: ignore[type-var]
        training_file=folder / spec.training_file,
        validation_file=spec.validation_file and folder / spec.validation_file,
        pool=spec.pool and folder / spec.pool,
        start_from=spec.start_from and folder / spec.start_from,
        judge_errors=spec.judge_errors and folder / spec.judge_errors,
        agent_errors=spec.agent_errors and folder / spec.agent_errors,
        evidence_references=spec.evidence_references and folder / spec.evidence_references,
        suites=tuple(replace(suite, path=folder / suite.path) for suite in spec.suites),
    )


def check_files(spec: RunSpec) -> None:
    """Raise `InvalidRecipe` for the first file of a run that does not exist."""
    named = [("training_file", spec.training_file), ("validation_file", spec.validation_file), ("pool", spec.pool)]
    for key, path in (*named, *((f"suites.{at}.path", each.path) for at, each in enumerate(spec.suites))):
        if path and not path.is_file():
            raise InvalidRecipe(f"{key}: there is no file {path}", key)


def run_from_mapping(raw: Mapping[str, object]) -> RunSpec:
    """Parse a run spec from a mapping of TOML or JSON values; raise `InvalidRecipe` if a setting is wrong."""
    spec: RunSpec = parse(RunSpec, raw, "")
    if spec.recipe.uses_pool and spec.pool is None:
        raise InvalidRecipe("pool: the defense selects its safe examples from a pool; name a file", "pool")
    if spec.recipe.anchors not in (Anchors(), PLAIN) and not spec.recipe.effective_anchor:
        raise InvalidRecipe("recipe.anchors: there is no anchor; give it a weight, recipe.anchor", "recipe.anchors")
    defense = spec.recipe.defense
    if spec.row_signal.action not in ("off", "report", "auto") and spec.pool is None:
        raise InvalidRecipe("row_signal.action: the signal needs a pool, to measure how the base model refuses", "pool")
    if spec.row_signal.action == "defend" and not defense.trains_on_safe_rows:
        message = f"row_signal.action: the defense {defense.type} trains on no safe rows that could answer for a row"
        raise InvalidRecipe(message, "row_signal.action")
    if missing := defense.missing_model:
        key = f"recipe.defense.{missing}"
        raise InvalidRecipe(f"{key}: name {defense.models[missing]}, a folder or a hub id", key)
    return spec


def to_mapping(value: Any) -> Any:
    """Return the JSON form of a dataclass; for a run spec `run_from_mapping(to_mapping(spec)) == spec`."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: to_mapping(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple | list):
        return [to_mapping(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def parse(wanted: Any, value: Any, key: str) -> Any:
    """Convert `value` to the type `wanted`, which may be bounded, optional, a tuple, a union or a dataclass.

    `key` is the setting's name for messages. Raises `InvalidRecipe` if the value does not fit.
    """
    if get_origin(wanted) is Annotated:
        inner, *bounds = get_args(wanted)
        return _check_bounds(parse(inner, value, key), bounds, key)
    if get_origin(wanted) in (Union, UnionType):
        return _member(get_args(wanted), value, key)
    if get_origin(wanted) is Literal:
        return _parse_choice(get_args(wanted), value, key)
    if get_origin(wanted) is tuple:
        if not isinstance(value, list | tuple):
            raise _wrong(key, value, "a list")
        return tuple(parse(get_args(wanted)[0], each, f"{key}[{i}]") for i, each in enumerate(value))
    if get_origin(wanted) is Mapping:
        if not isinstance(value, Mapping):
            raise _wrong(key, value, "a table")
        return dict(value)
    if wanted is Defense:
        return _parse_tagged(defenses(), value, key)
    return _dataclass(wanted, value, key) if is_dataclass(wanted) else _plain(wanted, value, key)


def _dataclass(wanted: Any, value: Any, key: str) -> Any:
    if not isinstance(value, Mapping):
        raise _wrong(key, value, "a table")
    value = without_old_names(value, key) if wanted is Recipe else value
    hints = _type_hints(wanted)
    unknown = sorted(set(value) - set(hints))
    if unknown:
        raise _error(_join_key(key, unknown[0]), f"unknown setting; known are {', '.join(hints)}")
    for each in fields(wanted):
        if each.name not in value and each.default is MISSING and each.default_factory is MISSING:
            raise _error(_join_key(key, each.name), "is required")
    return wanted(**{name: parse(hints[name], each, _join_key(key, name)) for name, each in value.items()})


@cache
def _type_hints(wanted: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields by name; they are computed once, which takes milliseconds."""
    return get_type_hints(wanted, include_extras=True)


def _member(members: tuple[Any, ...], value: Any, key: str) -> Any:
    """Return the value as a union's member: null, a dataclass by its `type`, a literal word, or the remaining type."""
    if NoneType in members and (value is None or value == NONE):
        return None
    members = tuple(member for member in members if member is not NoneType)
    tables = {member.__dataclass_fields__["type"].default: member for member in members if _is_tagged(member)}
    if tables:
        return _parse_tagged(tables, value, key)
    words = [word for member in members if get_origin(member) is Literal for word in get_args(member)]
    if value in words:
        return value
    rest = next(member for member in members if get_origin(member) is not Literal)
    if words and isinstance(value, str):
        raise _wrong(key, value, f"a number or {', '.join(words)}")
    return parse(rest, value, key)


def _parse_tagged(tables: Mapping[str, object], value: Any, key: str) -> Any:
    """Return the value as the dataclass that its `type` names."""
    tag = value.get("type") if isinstance(value, Mapping) else None
    return parse(tables[_parse_choice(tuple(tables), tag, _join_key(key, "type"))], value, key)


def _is_tagged(member: Any) -> bool:
    return is_dataclass(member) and any(each.name == "type" for each in fields(member))


def _parse_choice(words: tuple[Any, ...], value: Any, key: str) -> Any:
    if value not in words:
        raise _wrong(key, value, f"one of {', '.join(map(str, words))}")
    return value


def _plain(wanted: Any, value: Any, key: str) -> Any:
    # bool is a subclass of int, and true is no number here.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if wanted is float and is_number:
        return float(value)
    if wanted is int and is_number and isinstance(value, int):
        return value
    if wanted in (str, Path) and isinstance(value, str | Path):
        return wanted(value)
    if wanted is bool and isinstance(value, bool):
        return value
    words = {float: "a number", int: "a whole number", bool: "true or false"}
    raise _wrong(key, value, words.get(wanted, "text"))


def _check_bounds(value: Any, bounds: list[Any], key: str) -> Any:
    for bound in bounds:
        if isinstance(bound, Bound) and not bound.admits(value):
            raise _wrong(key, value, f"a number {_range(bound)}")
        if isinstance(bound, NameIn):
            _parse_choice(bound.registry.names(), value, key)
    return value


def _range(bound: Bound) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<="}
    return " and ".join(f"{signs[name]} {limit:.10g}" for name, limit in bound.limits().items() if limit is not None)


def _join_key(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _wrong(key: str, value: Any, wanted: str) -> InvalidRecipe:
    return _error(key, f"{value!r} is not {wanted}")


def _error(key: str, message: str) -> InvalidRecipe:
    return InvalidRecipe(f"{key or 'run'}: {message}", key or None)
