"""Results of audits that are kept: the base model's for all runs, and the last audit's until the report is written.

The base model's results on suites are cached: no job repeats the prompts of another. A suite of the provider is
identified by its file, a suite mined from training rows by the content of its prompts. The scores and replies of the
last audit are outputs of the run.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import NotRequired, TypedDict

from spard.config.run_spec import SuiteSpec, to_mapping
from spard.digests import file_sha256
from spard.evaluation.audit import Measurement, Suite, sample
from spard.evaluation.results import ATTACKS, SuiteKind, SuiteResult
from spard.evaluation.vllm_offline.engine import Engine
from spard.pipeline.context import Context
from spard.release.figures import SCORES, ScoreCounts
from spard.release.records import read_record
from spard.release.version import AUDIT_VERSION

Key = Mapping[str, object]
LEASE_S = 3600.0  # longest wait for another run's results; then they are computed here
_LOOK_S = 1.0  # between two attempts to claim


def file_key(context: Context, spec: SuiteSpec, engine: Engine) -> Key:
    """Return the cache key of the results on a suite of the provider."""
    key: dict[str, object] = _key(context, spec.kind, engine) | {"prompts": file_sha256(spec.path)}
    if left_out := context.left_out.get(spec.name):
        key |= {"left_out": sorted(left_out)}
    ending = context.recipe.ending
    return key | {"without_share_of": ending.prompts} if ending.compares else key


def content_key(context: Context, suite: Suite, engine: Engine) -> Key:
    """Return the cache key of the results on a suite without a file: the sampled prompts and all settings."""
    asked = [asdict(prompt) for prompt in sample(suite.prompts, context.recipe.audit.max_prompts)]
    content = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
    return _key(context, suite.kind, engine) | {"content": content}


def read_cached(context: Context, keys: Sequence[Key]) -> list[SuiteResult | None]:
    """Return the cached results, with None for each key that has none."""
    return [_read_entry(context, key) for key in keys]


def complete_cached(
    context: Context,
    suites: Sequence[Suite],
    keys: Sequence[Key],
    found: Sequence[SuiteResult | None],
    measure: Callable[[Sequence[Suite]], Sequence[SuiteResult]],
) -> list[SuiteResult]:
    """Return the results on all suites: the cached ones in `found`, the others by `measure`, which are then cached.

    Waits at most `LEASE_S` seconds for results that another run on this machine is computing.
    """
    with _claims(context, [key for key, kept in zip(keys, found, strict=True) if kept is None]):
        # Read again: another run may have stored results while this one waited for its claims.
        found = [kept or _read_entry(context, key) for key, kept in zip(keys, found, strict=True)]
        missing = [suite for suite, kept in zip(suites, found, strict=True) if kept is None]
        made = iter(measure(missing) if missing else ())
        results = []
        for suite, key, kept in zip(suites, keys, found, strict=True):
            result = kept or _keep_entry(context, key, next(made))
            results.append(replace(result, suite=suite.name))
    return results


@contextmanager
def _claims(context: Context, keys: Sequence[Key]) -> Iterator[None]:
    """Claim the entries of these keys, in sorted order in every run, which rules out a deadlock between two runs."""
    until, is_told = time.monotonic() + LEASE_S, False
    with ExitStack() as claims:
        for key in sorted(keys, key=lambda each: json.dumps(dict(each), sort_keys=True)):
            while (claim := context.cache.claim("audits", key)) is None and time.monotonic() < until:
                if not is_told:
                    context.report.event(
                        "Another job asks the base model the same prompts: its figures are awaited.", {}
                    )
                    is_told = True
                context.wait("base figures", _LOOK_S)
            if claim is not None:
                claims.enter_context(claim)
        yield


class _Absent(Exception):
    """Raised by a cache miss in `_read`."""


def _read_entry(context: Context, key: Key) -> SuiteResult | None:
    # The cache has no lookup without a maker, so the maker raises to report a miss.
    def absent() -> None:
        raise _Absent

    try:
        (found,) = context.cache.json("audits", key, absent)
    except _Absent:
        return None
    return read_record(SuiteResult, found)


def _keep_entry(context: Context, key: Key, result: SuiteResult) -> SuiteResult:
    (kept,) = context.cache.json("audits", key, partial(list, [asdict(result)]))
    return read_record(SuiteResult, kept)


def _key(context: Context, kind: SuiteKind, engine: Engine) -> dict[str, object]:
    return {
        "base": context.base.digest,
        "audit": AUDIT_VERSION,
        "engine": asdict(engine),
        "kind": kind,
        "judge": to_mapping(context.run.judge),
        "max_prompts": context.recipe.audit.max_prompts,
        "max_new_tokens": context.recipe.audit.max_new_tokens,
        "counts": "by_category, unasked_harm",  # excludes entries of versions without these counts
    } | context.rounding


_SCORES, _TRANSCRIPTS = "audit_scores", "transcripts"


class Transcript(TypedDict):
    """A prompt with its reply and verdict; the score is None if the reply was not scored.

    `votes` are the scores of the judges of a consensus; without one they are left out.
    """

    suite: str
    kind: SuiteKind
    category: str | None
    prompt: str
    reply: str
    hit: bool | None
    score: int | None
    note: str
    votes: NotRequired[list[int | None]]


def keep_audit(context: Context, found: Sequence[Measurement]) -> None:
    """Store the counts of scores and, if the run keeps transcripts, every prompt with its reply."""
    scores = [each for measured in found if measured.result.kind in ATTACKS for each in _count_scores(measured)]
    context.outputs.write(_SCORES, to_mapping(scores))
    if context.keeps_transcripts:
        context.outputs.write(_TRANSCRIPTS, [row for measured in found for row in _rows(measured)])


def keep_repeated(context: Context, found: Sequence[Measurement]) -> None:
    """Store the scores and replies of repeated suites in place of their earlier ones."""
    # `keep_audit` overwrites the stored outputs, so the earlier ones are read first and merged afterward.
    names = {each.result.suite for each in found}
    scores, transcripts = kept_scores(context), kept_transcripts(context)
    keep_audit(context, found)
    again = kept_scores(context), kept_transcripts(context)
    context.outputs.write(_SCORES, to_mapping([*(each for each in scores if each.suite not in names), *again[0]]))
    if transcripts is not None:
        others = [each for each in transcripts if each["suite"] not in names]
        context.outputs.write(_TRANSCRIPTS, [*others, *(again[1] or ())])


def kept_scores(context: Context) -> tuple[ScoreCounts, ...]:
    """Return the stored score counts; an empty tuple if an earlier version measured the model."""
    return tuple(read_record(ScoreCounts, each) for each in context.outputs.read(_SCORES) or ())


def kept_transcripts(context: Context) -> list[Transcript] | None:
    """Return every prompt with its reply, or None if the run keeps no transcripts."""
    found: list[Transcript] | None = context.outputs.read(_TRANSCRIPTS) if context.keeps_transcripts else None
    return found


def _count_scores(measured: Measurement) -> Iterator[ScoreCounts]:
    asked = list(zip(measured.prompts, measured.items, strict=True))
    for category in dict.fromkeys(prompt.category for prompt, _ in asked):
        scores = [item.score for prompt, item in asked if prompt.category == category]
        counts = tuple(scores.count(score) for score in SCORES)
        yield ScoreCounts(measured.result.suite, measured.result.kind, category, counts, scores.count(None))


def _rows(measured: Measurement) -> Iterator[Transcript]:
    for prompt, item in zip(measured.prompts, measured.items, strict=True):
        row: Transcript = {
            "suite": measured.result.suite,
            "kind": measured.result.kind,
            "category": prompt.category,
            "prompt": item.prompt,
            "reply": item.reply,
            "hit": item.hit,
            "score": item.score,
            "note": item.note,
        }
        yield row | {"votes": list(item.votes)} if item.votes else row
