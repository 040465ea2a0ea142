"""Make the missing files of a recipe from the data sets' own files that it names.

Existing files are used as they are; remove a file to have it made again. A data set is not converted if files with its
names exist that no conversion wrote, because it would overwrite them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

from spard.data.jsonl import Row, file_chunks, numbered_rows
from spard.data.overlap import normalize_text, rows_holding
from spard.data.rows import read_prompts
from spard_lab.bench.spec import DataSpec, FilesSpec, MixedPool, variables
from spard_lab.bench.store import write_aside
from spard_lab.datasets.base import Split
from spard_lab.datasets.convert import convert, load_dataset, manifest_path
from spard_lab.datasets.outputs import output_names
from spard_lab.datasets.sources import locate_file

log = logging.getLogger(__name__)


def missing(spec: FilesSpec, wanted: Iterable[Path]) -> dict[Path, list[str]]:
    """Return, for each wanted file that does not exist, a sentence per missing source; empty if it can be made."""
    found = {}
    for path in wanted:
        if not path.is_file() and not variables(str(path)):
            found[path] = _lacking(spec, path)
    return found


def prepare(spec: FilesSpec, wanted: Iterable[Path]) -> None:
    """Make every wanted file that does not exist and can be made: data sets first, then the pools mixed from them."""
    for path in wanted:
        data = _find_data_set(spec, path)
        if data and spec.converted and not path.is_file():
            found = convert(data.name, dict(_sources(data)), spec.converted, shared=data.shared)
            log.info("%s: %s; left out: %s", data.name, dict(found.rows), dict(found.left_out) or "nothing")
    for path in wanted:
        mixed = _find_mix(spec, path)
        if mixed and not path.is_file():
            prepare(spec, mixed.of)
            _mix(spec, mixed)


def _lacking(spec: FilesSpec, path: Path) -> list[str]:
    if mixed := _find_mix(spec, path):
        return [each for part in mixed.of if not part.is_file() for each in _lacking(spec, part)]
    data = _find_data_set(spec, path)
    if data is None:
        return [f"{path} is not there."]
    dataset = load_dataset(data.name)
    absent = [str(each) for _, each in _sources(data) if not variables(str(each)) and locate_file(each) is None]
    return [f"{' and '.join(absent)}: not there. Take {dataset.origin}. License: {dataset.license}."] if absent else []


def _find_data_set(spec: FilesSpec, path: Path) -> DataSpec | None:
    """Return the data set that a file is converted from, unless files exist that no conversion wrote."""
    if spec.converted is None or path.parent != spec.converted:
        return None
    for data in spec.data:
        names = output_names(load_dataset(data.name))
        if path.name in names:
            is_ours = manifest_path(spec.converted, data.name).is_file()
            return data if is_ours or not any((spec.converted / name).exists() for name in names) else None
    return None


def _find_mix(spec: FilesSpec, path: Path) -> MixedPool | None:
    return next((each for each in spec.mixed_pools if each.path == path), None)


def _sources(data: DataSpec) -> Iterator[tuple[Split, Path]]:
    named: tuple[tuple[Split, Path | None], ...] = (("train", data.train), ("dev", data.dev), ("test", data.test))
    for split, path in named:
        if path:
            yield split, locate_file(path) or path


def _mix(spec: FilesSpec, mixed: MixedPool) -> None:
    """Write the first row of each prompt of all parts, without rows that contain a prompt of a suite."""
    rows: dict[str, Row] = {}
    for part in mixed.of:
        for _, row in numbered_rows(file_chunks(part)):
            rows.setdefault(normalize_text(row["prompt"]), row)
    suites = [path for attack in spec.attacks for path in (attack.suite, attack.dev_suite) if path]
    suites += [suite.path for suite in (*spec.suites, *spec.dev_suites)]
    asked = [each.prompt for path in suites if path.is_file() for each in read_prompts(path)]
    texts = [row["prompt"] for row in rows.values()]
    held = rows_holding(asked, texts)
    kept = [row for i, row in enumerate(rows.values()) if i not in held]
    write_aside(mixed.path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))
    log.info("%s: %d rows; %d that suites ask are left out", mixed.path.name, len(kept), len(held))
