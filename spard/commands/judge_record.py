"""Where `spard judge` writes the record of a judge's errors, and of which base model's replies the record is.

`--model FOLDER` writes it into the base model's folder, where every job on this model finds it
(`spard.evaluation.calibration.record`). A folder may hold records of several judges, each in a file of its own; a
second record of the same judge takes the place of the first only with `--replace`. `--out FILE` writes to a file for
`SPARD_JUDGE_ERRORS` instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from spard.commands.front import Asked
from spard.config.quantization import plain_digest
from spard.digests import folder_digest
from spard.errors import InvalidModel, InvalidRecipe, UnfitModel
from spard.evaluation.calibration.labeled import LabeledReply, labeled_base
from spard.evaluation.calibration.record import OF_MODEL, JudgeRecord, model_records, read_record, record_path
from spard.models.folder.check import fault

_OF_FOLDER = "sha256:"  # the beginning of a folder's digest; that of a model read from the hub is `name@commit`
_ELSEWHERE = "write the record to a file, --out judge.json, and set SPARD_JUDGE_ERRORS=judge.json"


def check_options(asked: Asked) -> None:
    """Raise `InvalidRecipe` for options that contradict each other, before anything is read."""
    if asked.model is not None and (not asked.labeled or asked.extend):
        message = "--model needs --labeled, and takes no --extend: its record is of labeled replies of that model alone"
        raise InvalidRecipe(message, "model")
    if asked.replace and asked.model is None and asked.out is None:
        raise InvalidRecipe("--replace needs --model or --out, where a record is written", "replace")
    if asked.own_harm and not asked.labeled:
        raise InvalidRecipe("--own-harm needs --labeled, whose harmful replies it takes", "own_harm")


def find_base(model: Path | None, labeled: Sequence[LabeledReply]) -> str | None:
    """Return the digest of the base model whose replies were labeled: the folder's, else the one that the labels name.

    Labels of a model in NF4 name the folder's digest with the quantization, by which jobs know it. Raises
    `InvalidModel` if the labels are of another model than the folder's, and `InvalidData` if they are of several.
    """
    stated = labeled_base(labeled)
    if model is None:
        return stated
    if not model.is_dir():
        message = f"--model: {model} is no folder; of a model from the hub, name the folder that its download has made"
        raise InvalidModel(message, "model")
    if found := fault(model):
        raise UnfitModel(f"--model: {model.name} is no base model: {found.sentence}", "model")
    own = folder_digest(model)
    if stated is None:
        return own
    if plain_digest(stated) != own:
        if stated.startswith(_OF_FOLDER):
            message = f"--model: the labels are of the base model {stated}, and {model.name} is {own}"
            raise InvalidModel(message, "model")
        sys.stderr.write(f"the labels are of {stated}: whether {model.name} has the same weights cannot be compared\n")
    return own + _form(stated)


def record_file(asked: Asked, judge: str, base_digest: str | None) -> Path | None:
    """Return the file for the record of a judge, None if it is only printed.

    Raises `InvalidRecipe` for a file that cannot be written, or that holds what nobody asked to replace.
    """
    if asked.out is not None:
        _require_free_name(asked.out, replace=asked.replace)
        return _writable(asked.out, "name another file with --out")
    if asked.model is None:
        return None
    if _is_in_hub_cache(asked.model):
        fault_ = f"--model: {asked.model} is in the hub's cache, from which it may be deleted"
        raise InvalidRecipe(f"{fault_}; {_ELSEWHERE}", "model")
    return _writable(_file_in_model(asked.model, judge, base_digest, replace=asked.replace), _ELSEWHERE)


def write_record(record: JudgeRecord, file: Path) -> None:
    """Write a record, and print to stderr where it is, what it replaces, and for which base model it counts."""
    before = read_record(file) if file.exists() else None
    try:
        record.write(file)
    except OSError as error:
        raise InvalidRecipe(f"{file} cannot be written: {error.strerror}; {_ELSEWHERE}", "out") from error
    told = f"the record is in {file}"
    if before is not None:
        told += f", in place of one of {before.judge} in {_languages(before)}"
    told += "" if record.base_digest is None else f"; it counts for the base model {record.base_digest} only"
    sys.stderr.write(f"{told}\n")


def _require_free_name(file: Path, *, replace: bool) -> None:
    if not file.exists():
        return
    if not replace:
        raise InvalidRecipe(f"--out: {file} exists; --replace writes the new record in its place", "out")
    read_record(file)  # raises for a file that is no record: a mistyped name must not cost the labels


def _file_in_model(model: Path, judge: str, base_digest: str | None, *, replace: bool) -> Path:
    """Return the file of this judge's earlier record, else a free one: records of other judges stay."""
    held = model_records(model)
    mine = judge, _form(base_digest)
    same = [path for path, each in held.items() if (each.judge, _form(each.base_digest)) == mine]
    if len(same) > 1:
        names = " and ".join(path.name for path in same)
        raise InvalidRecipe(f"{same[0].parent}: {names} are both records of {judge}; delete one of them", "model")
    if same:
        if not replace:
            fault_ = f"{same[0]} is a record of {judge} in {_languages(held[same[0]])} already"
            raise InvalidRecipe(f"{fault_}; --replace writes the new one in its place", "replace")
        return same[0]
    first, further = model / OF_MODEL, model / record_path("".join(mine))
    file = further if first in held else first
    if file in held:
        raise InvalidRecipe(f"{file} is a record of {held[file].judge}, not of {judge}; rename it", "model")
    return file


def _form(digest: str | None) -> str:
    """Return the part of a base model's digest that names its quantization, "" for plain weights."""
    return (digest or "").removeprefix(plain_digest(digest or ""))


def _writable(file: Path, cure: str) -> Path:
    """Return the file; raise `InvalidRecipe` if it cannot be written, before minutes of judging."""
    place = next(each for each in file.absolute().parents if each.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise InvalidRecipe(f"{file} cannot be written, because {place} is read-only or no folder; {cure}", "out")
    return file


def _is_in_hub_cache(model: Path) -> bool:
    parts = model.resolve().parts
    return "snapshots" in parts and any(each.startswith("models--") for each in parts)


def _languages(record: JudgeRecord) -> str:
    return ", ".join(each.language for each in record.languages) or "no language"
