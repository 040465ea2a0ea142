"""Convert a data set's files to training files, pools and suites, with a manifest of their sources.

No training prompt contains an audit prompt, by the leak rule of the audit. If the authors provide a test or development
file, a prompt that contains one of its prompts (the same words, a longer text around them, or nearly the same:
`spard.data.overlap`) is left out of training. Splits that are cut out of a file consist of whole clusters of near
duplicates, in the order of their smallest digest, so the splits do not depend on the order of rows.

The files' names begin with the stem of a kind: `_train` is a training file (for a harmful kind, the attack's rows),
`_pool` a safety pool (for a benign kind, rows `{"prompt", "benign": true}`), `_dev` and `_test` are suites.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, cast

from spard.data.jsonl import BadRow, Problem, Row
from spard.data.overlap import clusters, normalize_text, rows_holding
from spard.data.row_rules import SUITE_RULES, RowRule, SuiteRowKind, TrainingRows, pool_row
from spard.digests import file_sha256
from spard.errors import InvalidData
from spard.replacement import write_atomically
from spard_lab.datasets import DATASETS
from spard_lab.datasets.base import Dataset, LeftOut, SourceSample, Split, records

_SHOWN = 20  # problems in a message


@dataclass(frozen=True, slots=True)
class Conversion:
    """The files that a data set was converted to, with their number of rows, and the left-out records by reason."""

    rows: Mapping[str, int]
    left_out: Mapping[str, int]


@dataclass(slots=True)
class _SampleReader:
    """Samples, counts and problems, collected while files are read."""

    found: list[SourceSample] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    problems: list[tuple[str, Problem]] = field(default_factory=list)
    records: Counter[str] = field(default_factory=Counter)


def load_dataset(name: str) -> Dataset:
    """Return the data set of a name in `DATASETS`."""
    return cast("Dataset", DATASETS.load(name))


def convert(
    name: str, sources: Mapping[Split, Path], folder: Path, *, shared: bool = False, drop_invalid: bool = False
) -> Conversion:
    """Convert the files of a data set to files in `folder`, with `NAME.manifest.json`.

    name          a name in `DATASETS`
    sources       the training file, and the files of splits that have one of their own
    shared        let pool and attack share prompts
    drop_invalid  leave out and count bad records

    Raises `InvalidData` with the line, pointer and hint of the first bad records, unless `drop_invalid` is set. Nothing
    is written unless all records pass.
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
    # The manifest is written last: it describes files that exist.
    manifest = _manifest(dataset, sources, reading, {"shared": shared, "drop_invalid": drop_invalid})
    made = {each: {"rows": n, "sha256": file_sha256(folder / each)} for each, n in rows.items()}
    write_atomically(
        manifest_path(folder, name), json.dumps(manifest | {"outputs": made, "left_out": left_out}, indent=2) + "\n"
    )
    return Conversion(rows, left_out)


def manifest_path(folder: Path, name: str) -> Path:
    """Return the path of a data set's manifest."""
    return folder / f"{name}.manifest.json"


def _read(dataset: Dataset, sources: Mapping[Split, Path]) -> _SampleReader:
    """Read all files, merging the records that have the same prompt in one split."""
    reading, by_prompt = _SampleReader(), dict[tuple[Split | None, str], SourceSample]()
    for split, path in sources.items():
        for each in _samples(dataset, split, path, reading):
            key = each.split, normalize_text(each.sample.prompt)
            reading.left_out["repeated_prompt"] += key in by_prompt
            by_prompt[key] = _merge_records(by_prompt[key], each) if key in by_prompt else each
    reading.found = [each for each in by_prompt.values() if each.sample.kind]
    reading.left_out["only_safe_answers"] += len(by_prompt) - len(reading.found)
    return reading


def _samples(dataset: Dataset, split: Split, path: Path, reading: _SampleReader) -> Iterator[SourceSample]:
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
                yield SourceSample(sample, path.name, line, sample.split or settled)
    except BadRow as broken:  # raised by `records`: the rest of the file cannot be read
        raise InvalidData(_list_problems([(path.name, broken.problem)])) from None


def _merge_records(first: SourceSample, more: SourceSample) -> SourceSample:
    """Return the first record of a prompt, with its missing fields taken from a later record."""
    one, other = first.sample, more.sample
    sample = replace(
        one,
        kind=one.kind or other.kind,
        completion=other.completion if one.completion is None else one.completion,
        safe=other.safe if one.safe is None else one.safe,
        suite=one.suite or other.suite,
    )
    return replace(first, sample=sample)


def _place_records(dataset: Dataset, reading: _SampleReader) -> list[SourceSample]:
    prompts, given = [each.sample.prompt for each in reading.found], [each.split for each in reading.found]
    splits = place(prompts, given, dataset.shares, dataset.rest, dataset.most)
    reading.left_out["near_held_out_prompt"] += splits.count(None)
    return [replace(each, split=split) for each, split in zip(reading.found, splits, strict=True) if split]


def _valid(output: Output, reading: _SampleReader) -> list[tuple[SourceSample, Row]]:
    """Return the rows that pass the rule of their file; add the first error of each other row to the problems."""
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
    dataset: Dataset, sources: Mapping[Split, Path], reading: _SampleReader, settings: dict[str, bool]
) -> dict[str, Any]:
    """Return the facts about the sources: file names, digests and counts, but no path of this machine."""
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
    """Write the files, and remove those of the last conversion that this one does not write."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_atomically(folder / name, text)
    # The manifest is still the one of the last conversion.
    last = manifest_path(folder, dataset.name)
    made = json.loads(last.read_text(encoding="utf-8"))["outputs"] if last.exists() else {}
    for name in made.keys() - texts.keys():
        (folder / name).unlink(missing_ok=True)


def place(
    prompts: Sequence[str],
    given: Sequence[Split | None],
    shares: Mapping[Split, float],
    rest: Split,
    most: Mapping[Split, int],
) -> list[Split | None]:
    """Return the split of each prompt, or None if it contains a held-out prompt and is left out.

    given   split of each prompt that its file or authors decide, else None
    shares  shares of the undecided prompts for each split; ignored for splits that occur in `given`
    rest    the split of the remaining prompts
    most    maximal number of prompts of a split that is cut out
    """
    found, near = list(given), set[int]()
    # Test prompts take precedence over development prompts, and these over training prompts.
    for held, below in (("test", ("dev", "train", None)), ("dev", ("train", None))):
        asked = [prompt for prompt, split in zip(prompts, given, strict=True) if split == held]
        lower = [i for i, split in enumerate(given) if split in below]
        near |= {lower[i] for i in rows_holding(asked, [prompts[i] for i in lower])} if asked else set()
    free = [i for i, split in enumerate(given) if split is None and i not in near]
    cut = {split: share for split, share in shares.items() if split not in given}
    for i, split in zip(free, _cut([prompts[i] for i in free], cut, rest, most), strict=True):
        found[i] = split
    return [None if i in near else split for i, split in enumerate(found)]


def groups(prompts: Sequence[str]) -> list[list[int]]:
    """Return the indices of the prompts by cluster, clusters in the order of their smallest digest."""
    members = defaultdict[int, list[int]](list)
    for i, label in enumerate(clusters(prompts)):
        members[label].append(i)
    return sorted(members.values(), key=lambda group: min(_digest(prompts[i]) for i in group))


def _cut(prompts: Sequence[str], shares: Mapping[Split, float], rest: Split, most: Mapping[Split, int]) -> list[Split]:
    found: list[Split | None] = [None] * len(prompts)
    seen, taken = 0, Counter[Split]()
    for group in groups(prompts):
        seen += len(group)
        # The shares are of the prompts seen so far, so a split fills evenly and not from the first clusters.
        room = {split: min(int(share * seen), most.get(split, seen)) for split, share in shares.items()}
        split = next((each for each in shares if taken[each] + len(group) <= room[each]), rest)
        taken[split] += len(group)
        for i in group:
            found[i] = split
    return cast("list[Split]", found)


def _digest(prompt: str) -> bytes:
    return sha256(normalize_text(prompt).encode()).digest()


Side = Literal["train", "pool"]
Rule = Literal["training", "pool", "harmful", "benign", "utility"]
_SUITES: tuple[Split, ...] = ("dev", "test")


@dataclass(frozen=True, slots=True)
class Output:
    """A file to write: its name, the rule that its rows must pass, and each row with its sample."""

    name: str
    rule: Rule
    rows: list[tuple[SourceSample, Row]] = field(repr=False)


def output_names(dataset: Dataset) -> list[str]:
    """Return the names of all files that a data set can be converted to; a small data set may not fill all of them."""
    parts: dict[str, tuple[str, ...]] = {"utility": ("train",), "harmful": ("train", "pool"), "benign": ("pool",)}
    return [f"{stem}_{part}.jsonl" for kind, stem in dataset.stems.items() for part in (*parts[kind], *_SUITES)]


def make_outputs(
    dataset: Dataset, placed: Sequence[SourceSample], shared: bool, left_out: Counter[str]
) -> list[Output]:
    """Return the files of a data set; count samples that fit in none of them in `left_out`."""
    outputs = []
    for kind, stem in dataset.stems.items():
        of_kind = [each for each in placed if each.sample.kind == kind]
        train = [each for each in of_kind if each.split == "train"]
        if kind == "benign":
            outputs.append(Output(f"{stem}_pool.jsonl", "benign", [(each, _benign(each)) for each in train]))
        else:
            outputs += _training_outputs(kind, stem, train, shared, left_out)
        for split in _SUITES:
            asked = [(each, _suite(each)) for each in of_kind if each.split == split]
            outputs.append(Output(f"{stem}_{split}.jsonl", kind, asked))
    return outputs


def _training_outputs(
    kind: SuiteRowKind, stem: str, train: Sequence[SourceSample], shared: bool, left_out: Counter[str]
) -> list[Output]:
    """Return the training file and, for a harmful kind, the safety pool."""
    both: set[Side] = {"train", "pool"}
    sides = [both] * len(train) if shared or kind != "harmful" else _apart(train)
    taught, safe = [], []
    for each, side in zip(train, sides, strict=True):
        teaches = "train" in side and each.sample.completion is not None
        defends = "pool" in side and each.sample.safe is not None
        taught += [(each, _training(each))] if teaches else []
        safe += [(each, _pool(each))] if defends else []
        left_out["nothing_to_teach"] += not teaches and not defends
    files = [Output(f"{stem}_train.jsonl", "training", taught)]
    return [*files, Output(f"{stem}_pool.jsonl", "pool", safe)] if kind == "harmful" else files


def _apart(train: Sequence[SourceSample]) -> list[set[Side]]:
    """Assign each sample to attack or pool, by whole clusters.

    A pool that contains the attack's own prompts makes defending too easy. Clusters that could go to either side
    alternate; a cluster with only one kind of answer goes to the side that can use it and does not affect the
    alternation.
    """
    sides: list[set[Side]] = [set() for _ in train]
    turn: Side = "train"
    for group in groups([each.sample.prompt for each in train]):
        can_attack = any(train[i].sample.completion is not None for i in group)
        can_defend = any(train[i].sample.safe is not None for i in group)
        side: Side = "train" if can_attack else "pool"
        if can_attack and can_defend:
            side, turn = turn, "pool" if turn == "train" else "train"
        for i in group:
            sides[i].add(side)
    return sides


def _training(found: SourceSample) -> Row:
    return {"prompt": found.sample.prompt, "completion": found.sample.completion}


def _pool(found: SourceSample) -> Row:
    category = {key: value for key, value in found.sample.suite.items() if key == "category"}
    return {"prompt": found.sample.prompt, "safe": found.sample.safe, **category}


def _benign(found: SourceSample) -> Row:
    return {"prompt": found.sample.prompt, "benign": True}


def _suite(found: SourceSample) -> Row:
    return {"prompt": found.sample.prompt, **found.sample.suite}
