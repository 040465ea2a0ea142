"""Read suites from files, for audits without the service, and find their prompts in training files and in safety pools.

JSONL has rows `{"prompt": ...}`, in utility suites with `answer` and `scorer`. CSV is in XSTest's form: columns
`prompt` and `type`, where types that begin with `contrast_` are unsafe, or a column `label` with safe or unsafe. Rows
of both may declare a `language`.

Choosing weights by prompts fits the weights to them a little, so the gate never asks those of the development share.

Replies to audit prompts that the model was trained on measure memory, not safety. A few prompts that the training file
contains are left out of the job's audit. If they are too many, or if the pool contains any, `refuse_leaks` ends a job
before it trains. The gate gets the reasons too and decides on leaks again.
"""

from __future__ import annotations

import csv
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import get_args

from spard.config import MIN_SCORED
from spard.config.run_spec import RunSpec, SuiteSpec
from spard.data.jsonl import raise_first_error
from spard.data.overlap import Leak, find_leaks
from spard.data.row_rules import SuiteRowKind, suite_row
from spard.data.rows import Example, Prompt, each_of_pool, prompt_text, read_examples, read_prompts, suite_prompt
from spard.errors import InvalidSuite, ProviderDataOverlap, TrainAuditOverlap
from spard.evaluation.audit import Suite
from spard.evaluation.gate import is_gated
from spard.evaluation.results import SuiteKind

log = logging.getLogger(__name__)


def read_suite(spec: SuiteSpec) -> Suite:
    """Read the suite that a run spec names; a file that has not changed since is not read again."""
    found = spec.path.stat()
    return _read_suite(spec, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=16)  # the stages of a run read the same few suites some forty times
def _read_suite(spec: SuiteSpec, mtime_ns: int, size: int) -> Suite:
    return Suite(spec.name, spec.kind, tuple(read_prompts(spec.path, kind=spec.kind, language=spec.language)))


def named_suites(source: str) -> list[Suite]:
    """Read suites from `[KIND:]FILE`; without a kind, rows with answers make a utility suite, others a harmful one."""
    kind, colon, rest = source.partition(":")
    stated = next((each for each in get_args(SuiteKind) if colon and each == kind != "mined"), None)
    return read_suites(Path(rest if stated else source), stated)


def read_suites(path: Path, kind: SuiteKind | None = None) -> list[Suite]:
    """Read the suites of a file: one from JSONL, up to two from CSV.

    Raises `InvalidSuite` if the file cannot be read, has the wrong columns, or contains no prompts of the kind.
    """
    try:
        suites = _of_csv(path) if path.suffix == ".csv" else [_of_jsonl(path, kind)]
    except OSError as error:
        raise InvalidSuite(f"{path} cannot be read: {error.strerror}", "suite") from error
    suites = [suite for suite in suites if kind in (None, suite.kind)]
    if not any(suite.prompts for suite in suites):
        raise InvalidSuite(f"{path} holds no {kind or ''} prompts".replace("  ", " "), "suite")
    return suites


def _row_kind(kind: SuiteKind | None) -> SuiteRowKind:
    """Return the rules for rows: only utility rows need an answer."""
    return "utility" if kind == "utility" else "harmful"


def _of_jsonl(path: Path, kind: SuiteKind | None) -> Suite:
    prompts = tuple(read_prompts(path, kind=_row_kind(kind)))
    has_answers = bool(prompts) and all(each.answer is not None for each in prompts)
    return Suite(path.stem, kind or ("utility" if has_answers else "harmful"), prompts)


def _of_csv(path: Path) -> list[Suite]:
    rows = _csv_rows(path)
    if not rows or "prompt" not in rows[0][1] or not {"type", "label"} & rows[0][1].keys():
        raise InvalidSuite(f"{path} needs the columns prompt and type, or prompt and label", "suite")
    for line, row in rows:
        raise_first_error(suite_row({"prompt": row["prompt"]}, line), InvalidSuite)
    sides: dict[bool, list[Prompt]] = {False: [], True: []}
    for line, row in rows:
        sides[_is_unsafe(row, line)].append(_prompt(row))
    found = [
        Suite(f"{path.stem}-safe", "benign", tuple(sides[False])),
        Suite(f"{path.stem}-unsafe", "harmful", tuple(sides[True])),
    ]
    return [suite for suite in found if suite.prompts]


def _csv_rows(path: Path) -> list[tuple[int, dict[str, str | None]]]:
    """Return the rows, each with the number of its last line; missing fields are None."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            return [(reader.line_num, row) for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidSuite(f"{path} is no CSV in UTF-8: {error}", "suite") from error


def _is_unsafe(row: dict[str, str | None], line: int) -> bool:
    """Return True if a prompt asks for harm: by its label, or by its type if it has no label."""
    label, kind = (row.get("label") or "").strip().lower(), row.get("type") or ""
    if label not in ("safe", "unsafe", "") or not (label or kind):
        wrong = f"the label {label[:40]!r} is neither safe nor unsafe" if label else "there is no label, and no type"
        raise InvalidSuite(f"line {line}: {wrong}", "suite")
    return label == "unsafe" if label else kind.startswith("contrast_")


def _prompt(row: dict[str, str | None]) -> Prompt:
    return suite_prompt({"prompt": row["prompt"], "category": row.get("type"), "language": row.get("language")})


LEAST = 20  # least prompts of a share; fewer are not informative
_PART = 5  # at most one in this many prompts of a suite


def split(suite: Suite, most: int) -> tuple[Suite, Suite | None]:
    """Return the gate's part of a suite, and its development share of at most `most` evenly spaced prompts.

    A suite of fewer than 100 prompts has no share (None), because the gate could not decide on the rest.
    """
    count = min(most, len(suite.prompts) // _PART)
    if count < LEAST:
        return suite, None
    # Evenly spaced, so that a suite sorted by category gives a share of every category.
    places = {i * len(suite.prompts) // count for i in range(count)}
    taken = tuple(prompt for i, prompt in enumerate(suite.prompts) if i in places)
    left = tuple(prompt for i, prompt in enumerate(suite.prompts) if i not in places)
    return replace(suite, prompts=left), replace(suite, prompts=taken)


HIDDEN = "The training file holds prompts that the audit asks, so what it measures would be memory."
LEFT_OUT = "A few prompts of the audit stand in the training file, and this audit does without them."
MOST_LEFT_OUT = 0.1
"""The largest share of a suite, and of each category that is gated by itself, that an audit may leave out.

An attack suite that shares 2 of its 134 prompts with an ordinary file still measures. A training file made from a suite
must not be able to remove the prompts that it trains against.
"""
_POOL_LEAKS = (
    "The provider's safety pool holds prompts of its own audit suites, so no adapter can be measured. "
    "Your files are not at fault; the provider has to import the pool again."
)
_FILE, _POOL = "training file", "safety pool"

Counts = Mapping[tuple[str, str], int]  # by suite and source
LeftOut = Mapping[str, Set[int]]  # indices of prompts by suite


def refuse_leaks(run: RunSpec) -> None:
    """Raise if leaks into a run's training data would leave the gate undecided, whatever the audit measures.

    Raises `ProviderDataOverlap` for the pool, `TrainAuditOverlap` for the training file. The messages are for customers
    and name neither suites nor counts; the log has both.
    """
    suites = [suite for suite in _suites(run) if is_gated(suite.kind, run.thresholds)]
    leaks = _leaks(suites, _sources(run))
    for (suite, source), n in _counts(leaks).items():
        log.warning("%s", _sentence(n, suite, source, suites))
    if any(leak.source == _POOL for leak in leaks):
        raise ProviderDataOverlap(_POOL_LEAKS)
    if {leak.suite for leak in leaks} - _few(suites, leaks).keys():
        raise TrainAuditOverlap(HIDDEN, "training_file")


def overlapping_prompts(run: RunSpec) -> LeftOut:
    """Return the indices of prompts by suite that the training file contains, for suites that can do without them."""
    suites = _suites(run)
    return _few(suites, _leaks(suites, {_FILE: read_examples(run.training_file)}))


def remove_prompts(suite: Suite, left_out: LeftOut) -> Suite:
    """Return the suite without its prompts in `left_out`."""
    places = left_out.get(suite.name, frozenset())
    return replace(suite, prompts=tuple(each for i, each in enumerate(suite.prompts) if i not in places))


def overlap_notes(left_out: LeftOut) -> list[str]:
    """Return a note if prompts are left out; it hides suite and number, which would help to find the prompts."""
    return [LEFT_OUT] if any(left_out.values()) else []


def find_hidden_leaks(run: RunSpec, left_out: LeftOut) -> dict[str, list[str]]:
    """Return, by suite, sentences on its prompts in a run's training data, as customers may read them.

    The pool counts only if the run uses it; prompts of the training file in `left_out` do not count. For the training
    file the sentence has neither suite nor count, because a customer could find the prompts by trying files.
    """
    suites = _suites(run)
    reasons: dict[str, list[str]] = defaultdict(list)
    for (suite, source), n in _counts(_leaks(suites, _sources(run))).items():
        if source == _POOL:
            reasons[suite].append(_sentence(n, suite, source, suites))
        elif suite not in left_out:
            reasons[suite].append(HIDDEN)
    return dict(reasons)


def leak_reasons(suites: Sequence[Suite], sources: Mapping[str, Iterable[Example]]) -> dict[str, list[str]]:
    """Return, by suite, one sentence for each source that contains prompts of it, with counts but no prompt."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for (suite, source), n in _counts(_leaks(suites, sources)).items():
        reasons[suite].append(_sentence(n, suite, source, suites))
    return dict(reasons)


def _suites(run: RunSpec) -> list[Suite]:
    return [read_suite(each) for each in run.suites]


def _sources(run: RunSpec) -> dict[str, Iterable[Example]]:
    sources: dict[str, Iterable[Example]] = {_FILE: read_examples(run.training_file)}
    if run.pool is not None and not run.recipe.defense.is_baseline:
        sources[_POOL] = each_of_pool(run.pool)
    return sources


def _leaks(suites: Sequence[Suite], sources: Mapping[str, Iterable[Example]]) -> list[Leak]:
    prompts = {suite.name: [each.prompt for each in suite.prompts] for suite in suites}
    return find_leaks(prompts, {name: map(prompt_text, rows) for name, rows in sources.items()})


def _counts(leaks: Iterable[Leak]) -> Counts:
    return Counter((leak.suite, leak.source) for leak in leaks)


def _few(suites: Sequence[Suite], leaks: Iterable[Leak]) -> dict[str, Set[int]]:
    """Return the indices of the prompts that the training file contains, for each suite that can do without them."""
    found: dict[str, set[int]] = defaultdict(set)
    for leak in leaks:
        if leak.source == _FILE:
            found[leak.suite].add(leak.index)
    return {suite.name: found[suite.name] for suite in suites if suite.name in found and _measures(suite, found)}


def _measures(suite: Suite, found: Mapping[str, Set[int]]) -> bool:
    """Return True if the suite and each category that the gate decides on keep enough prompts."""
    for group in _groups(suite.prompts):
        lost = len(group & found[suite.name])
        if lost and (lost > MOST_LEFT_OUT * len(group) or len(group) - lost < MIN_SCORED):
            return False
    return True


def _groups(prompts: Sequence[Prompt]) -> Iterator[Set[int]]:
    """Yield the indices of all prompts, then of each category that is large enough for the gate to decide on."""
    yield set(range(len(prompts)))
    categories: dict[str | None, set[int]] = defaultdict(set)
    for place, prompt in enumerate(prompts):
        categories[prompt.category].add(place)
    yield from (places for name, places in categories.items() if name is not None and len(places) >= MIN_SCORED)


def _sentence(n: int, name: str, source: str, suites: Sequence[Suite]) -> str:
    size = next(len(suite.prompts) for suite in suites if suite.name == name)
    return f"{n} of {size} prompts of suite {name} stand in the {source}."
