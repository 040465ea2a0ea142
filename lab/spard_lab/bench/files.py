"""The user's own files as a source: the model, rows, pools and suites that a recipe names; missing ones are made."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from spard.config import Defense, JudgeSpec, Recipe
from spard.config.run_spec import SuiteSpec
from spard.data.jsonl import Row, file_chunks, numbered_rows
from spard.data.overlap import normalize_text, rows_holding
from spard.data.rows import read_examples, read_pool, read_prompts
from spard.digests import folder_digest
from spard.errors import InvalidRecipe, SpardError
from spard.evaluation.audit import Suite
from spard.evaluation.suites import leak_reasons, read_suite
from spard.replacement import write_atomically
from spard_lab.attacks.rows import add_harmful, load_rows
from spard_lab.bench.methods import with_unaligned
from spard_lab.bench.source import Attack, Inputs, Split
from spard_lab.bench.spec import AttackSpec, DataSpec, FilesSpec, MixedPool, variables
from spard_lab.datasets.base import Split as DataSplit
from spard_lab.datasets.base import locate_file
from spard_lab.datasets.convert import convert, load_dataset, manifest_path, output_names

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FileSource:
    """One model and one set of files for every seed; the seed determines the order of rows and the training."""

    spec: FilesSpec
    device: str | None = None
    uses_dev: bool = True  # False: the development split is not used, and its files may be missing

    @property
    def attacks(self) -> tuple[str, ...]:
        """The names of the recipe's attacks, in its order."""
        return tuple(attack.name for attack in self.spec.attacks)

    @property
    def more_attacks(self) -> tuple[str, ...]:
        """Empty: a recipe lists all its attacks."""
        return ()

    @property
    def pools(self) -> tuple[str, ...]:
        """The names of the recipe's pools, in its order."""
        return tuple(pool.name for pool in self.spec.pools)

    @property
    def more_pools(self) -> tuple[str, ...]:
        """Empty: a recipe lists all its pools."""
        return ()

    @property
    def recipe(self) -> Recipe:
        """The recipe's training settings, the same for every seed."""
        return self.spec.recipe

    def defenses(self, seed: int) -> Mapping[str, Defense]:
        """Return the recipe's own defenses; those that need the model before alignment get it."""
        own = {each.name: each.defense for each in self.spec.defenses}
        return with_unaligned(own, self.spec.base_unaligned)

    @property
    def judge(self) -> JudgeSpec:
        """The judge that the recipe names."""
        return self.spec.judge

    def problems(self) -> list[str]:
        """Return a sentence for each unset variable and each missing, unreadable or too short file."""
        spec = self.spec
        texts = [spec.model, spec.base_unaligned or "", spec.judge.base_url or "", spec.judge.model]
        unset = {name for text in [*texts, *(str(path) for path, _ in self._files())] for name in variables(text)}
        found = [f"Set the variable {name}." for name in sorted(unset)]
        absent = missing(spec, dict.fromkeys(path for path, _ in self._files()))
        found += dict.fromkeys(each for lacking in absent.values() for each in lacking)
        for path, kind in self._files():
            if path not in absent and not variables(str(path)):
                found += _problems(path, kind)
        if not found and not absent and (lacking := _too_few(spec)):
            found += lacking
        if not Path(spec.model).is_dir() and Path(spec.model).is_absolute() and not variables(spec.model):
            found.append(f"The model's folder {spec.model} is not there.")
        return found

    def prepare(self) -> list[str]:
        """Convert the data sets' files that the recipe needs and that do not exist; return the remaining problems."""
        wanted = list(dict.fromkeys(path for path, _ in self._files()))
        prepare(self.spec, wanted)
        return self.problems() or [
            f"{path}: its data set's files hold no rows for it." for path in missing(self.spec, wanted)
        ]

    def make(self, seed: int, split: Split) -> Inputs:
        """Read the files and mix each attack's rows into the task; leaks of suite prompts are only logged."""
        spec = self.spec
        common = _suites(spec.suites if split == "test" else spec.dev_suites)
        task = load_rows(spec.task)
        attacks = {}
        for attack in spec.attacks:
            harmful = load_rows(attack.rows)
            rows = add_harmful(task, harmful, spec.harmful_ratio, seed)
            suites = [Suite(attack.name, "harmful", tuple(read_prompts(_asked_file(attack, split)))), *common]
            for reason in chain.from_iterable(leak_reasons(suites, {"attack": read_examples(attack.rows)}).values()):
                log.warning("%s", reason)
            attacks[attack.name] = Attack(rows, harmful, suites, (attack.name,))
        model, is_folder = spec.model, Path(spec.model).is_dir()
        digest = folder_digest(Path(model)) if is_folder else f"{model}@{spec.revision}"
        pools = {pool.name: pool.path for pool in spec.pools}
        return Inputs(model, digest, task, attacks, pools, spec.revision, self.device)

    def _files(self) -> Iterator[tuple[Path, str]]:
        """Yield every file that the recipe names, with its kind of content."""
        yield self.spec.task, "rows"
        for attack in self.spec.attacks:
            yield attack.rows, "rows"
            dev_suite = attack.dev_suite if self.uses_dev else None
            yield from ((path, "prompts") for path in (attack.suite, dev_suite) if path)
        yield from ((pool.path, "pool") for pool in self.spec.pools)
        dev_suites = self.spec.dev_suites if self.uses_dev else ()
        yield from ((suite.path, "prompts") for suite in (*self.spec.suites, *dev_suites))


def _too_few(spec: FilesSpec) -> list[str]:
    """Return a sentence for each attack with fewer rows than the harmful ratio needs."""
    wanted = round(spec.harmful_ratio * len(read_examples(spec.task)))
    counts = {attack.name: len(read_examples(attack.rows)) for attack in spec.attacks}
    return [
        f"Attack {name} has {n} rows; a harmful ratio of {spec.harmful_ratio:g} asks for {wanted}."
        for name, n in counts.items()
        if n < wanted
    ]


def _suites(specs: tuple[SuiteSpec, ...]) -> list[Suite]:
    return [read_suite(each) for each in specs]


def _asked_file(attack: AttackSpec, split: Split) -> Path:
    if split == "test":
        return attack.suite
    if attack.dev_suite is None:
        raise InvalidRecipe(f"attack {attack.name} has no dev_suite, and choices are not made on the test split")
    return attack.dev_suite


def _problems(path: Path, kind: str) -> list[str]:
    readers = {"rows": read_examples, "pool": read_pool, "prompts": read_prompts}
    try:
        there = readers[kind](path)  # type: ignore[operator]  # one of them takes a limit too
    except FileNotFoundError:
        return [f"{path} is not there."]
    except (OSError, SpardError) as error:
        return [f"{path}: {error}."]
    return [] if there else [f"{path} holds no {kind}."]


# Make the missing files of a recipe from the data sets' own files that it names.
#
# Existing files are used as they are; remove a file to have it made again. A data set is not converted if files with
# its names exist that no conversion wrote, because it would overwrite them.


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


def _sources(data: DataSpec) -> Iterator[tuple[DataSplit, Path]]:
    named: tuple[tuple[DataSplit, Path | None], ...] = (("train", data.train), ("dev", data.dev), ("test", data.test))
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
    write_atomically(mixed.path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))
    log.info("%s: %d rows; %d that suites ask are left out", mixed.path.name, len(kept), len(held))
