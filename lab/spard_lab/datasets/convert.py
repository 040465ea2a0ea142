"""From the files of a data set to training files, pools and suites, and a manifest that says what they were made of."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from spard.data.jsonl import BadRow, Row
from spard.data.overlap import normalize_text
from spard.data.problems import Problem
from spard.data.row_rules import SUITE_RULES, RowRule, TrainingRows, pool_row
from spard.digests import file_sha256
from spard.errors import InvalidData
from spard_lab.datasets import DATASETS
from spard_lab.datasets.base import Dataset, Found, LeftOut, Split
from spard_lab.datasets.outputs import Output, make_outputs
from spard_lab.datasets.sources import records
from spard_lab.datasets.splits import place

_SHOWN = 20  # problems in a message


@dataclass(frozen=True, slots=True)
class Converted:
    """What a data set became: its files by name with their number of rows, and the records left out, by reason."""

    rows: Mapping[str, int]
    left_out: Mapping[str, int]


@dataclass(slots=True)
class _Reading:
    """What is gathered while files are read."""

    found: list[Found] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    problems: list[tuple[str, Problem]] = field(default_factory=list)
    records: Counter[str] = field(default_factory=Counter)


def load_dataset(name: str) -> Dataset:
    """Return the data set of a name in `DATASETS`."""
    return cast("Dataset", DATASETS.load(name))


def convert(
    name: str, sources: Mapping[Split, Path], folder: Path, *, shared: bool = False, drop_invalid: bool = False
) -> Converted:
    """Write what the files of a data set hold to `folder`, beside `NAME.manifest.json`.

    `sources` has the file to train on, and those of the splits that have one of their own. Pool and attack get
    different prompts unless they are `shared`. Raises `InvalidData` with every bad record's line, pointer and hint;
    with `drop_invalid` these are left out and counted. Nothing is written unless all of it can be.
    """
    dataset = load_dataset(name)
    reading = _read(dataset, sources)
    outputs = make_outputs(dataset, _place_records(dataset, reading), shared, reading.left_out)
    checked = [replace(each, rows=_valid(each, reading)) for each in outputs]
    if reading.problems and not drop_invalid:
        raise InvalidData(_list_problems(reading.problems))
    reading.left_out.update(problem.code for _, problem in reading.problems)
    texts = {each.name: "".join(json.dumps(row, ensure_ascii=False) + "\n" for _, row in each.rows) for each in checked}
    _write(folder, {each: text for each, text in texts.items() if text}, dataset)
    rows = {each.name: len(each.rows) for each in checked if each.rows}
    left_out = {reason: n for reason, n in sorted(reading.left_out.items()) if n}
    manifest = _manifest(dataset, sources, reading, {"shared": shared, "drop_invalid": drop_invalid})
    made = {each: {"rows": n, "sha256": file_sha256(folder / each)} for each, n in rows.items()}
    _write_aside(
        manifest_path(folder, name), json.dumps(manifest | {"outputs": made, "left_out": left_out}, indent=2) + "\n"
    )
    return Converted(rows, left_out)


def manifest_path(folder: Path, name: str) -> Path:
    """Return where the manifest of a data set lies."""
    return folder / f"{name}.manifest.json"


def _read(dataset: Dataset, sources: Mapping[Split, Path]) -> _Reading:
    """Read every record of every file; of records with one prompt in one split the first answer of each kind counts."""
    reading, by_prompt = _Reading(), dict[tuple[Split | None, str], Found]()
    for split, path in sources.items():
        for each in _samples(dataset, split, path, reading):
            key = each.split, normalize_text(each.sample.prompt)
            reading.left_out["repeated_prompt"] += key in by_prompt
            by_prompt[key] = _merge_records(by_prompt[key], each) if key in by_prompt else each
    reading.found = [each for each in by_prompt.values() if each.sample.kind]
    reading.left_out["only_safe_answers"] += len(by_prompt) - len(reading.found)
    return reading


def _samples(dataset: Dataset, split: Split, path: Path, reading: _Reading) -> Iterator[Found]:
    settled = None if split == "train" else split
    try:
        for line, record in records(path):
            reading.records[split] += 1
            try:
                sample = dataset.sample(record)
            except LeftOut as why:
                reading.left_out[why.reason] += 1
            except BadRow as bad:
                reading.problems.append((path.name, replace(bad.problem, line=line)))
            else:
                yield Found(sample, path.name, line, sample.split or settled)
    except BadRow as broken:  # of the file itself: what follows cannot be read
        raise InvalidData(_list_problems([(path.name, broken.problem)])) from None


def _merge_records(first: Found, more: Found) -> Found:
    """Fill in what the first record of a prompt did not say."""
    one, other = first.sample, more.sample
    sample = replace(
        one,
        kind=one.kind or other.kind,
        completion=other.completion if one.completion is None else one.completion,
        safe=other.safe if one.safe is None else one.safe,
        suite=one.suite or other.suite,
    )
    return replace(first, sample=sample)


def _place_records(dataset: Dataset, reading: _Reading) -> list[Found]:
    prompts, given = [each.sample.prompt for each in reading.found], [each.split for each in reading.found]
    splits = place(prompts, given, dataset.shares, dataset.rest, dataset.most)
    reading.left_out["near_held_out_prompt"] += splits.count(None)
    return [replace(each, split=split) for each, split in zip(reading.found, splits, strict=True) if split]


def _valid(output: Output, reading: _Reading) -> list[tuple[Found, Row]]:
    """Return the rows that the definition of their kind of row accepts; the others become problems of their records."""
    rule: RowRule
    match output.rule:
        case "training":
            rule = TrainingRows()
        case "pool":
            rule = pool_row
        case kind:
            rule = SUITE_RULES[kind]
    kept = []
    for found, row in output.rows:
        errors = [each for each in rule(row, found.line) if each.severity == "error"]
        reading.problems += [(found.file, each) for each in errors[:1]]
        kept += [] if errors else [(found, row)]
    return kept


def _list_problems(problems: Sequence[tuple[str, Problem]]) -> str:
    lines = [
        f"{file}, line {each.line}{each.pointer and f', {each.pointer}'}: {each.message} ({each.code}); {each.hint}"
        for file, each in problems[:_SHOWN]
    ]
    more = len(problems) - len(lines)
    return "\n".join([*lines, *([f"and {more} more"] if more else [])])


def _manifest(
    dataset: Dataset, sources: Mapping[Split, Path], reading: _Reading, settings: dict[str, bool]
) -> dict[str, Any]:
    """Return what was read: names and digests of the files, no path of this machine."""
    files = {
        split: {
            "file": path.name,
            "sha256": file_sha256(path),
            "bytes": path.stat().st_size,
            "records": reading.records[split],
        }
        for split, path in sources.items()
    }
    facts = {"dataset": dataset.name, "license": dataset.license, "origin": dataset.origin}
    return {**facts, "sources": files, "settings": settings}


def _write(folder: Path, texts: Mapping[str, str], dataset: Dataset) -> None:
    """Write the files; those that the last conversion made and this one does not are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        _write_aside(folder / name, text)
    last = manifest_path(folder, dataset.name)
    made = json.loads(last.read_text(encoding="utf-8"))["outputs"] if last.exists() else {}
    for name in made.keys() - texts.keys():
        (folder / name).unlink(missing_ok=True)


def _write_aside(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)
