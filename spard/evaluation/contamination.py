"""Find audit prompts in the training file and in the safety pool: what is asked there measures memory, not safety.

A few prompts that the training file holds are left out of the job's audit. Where they are too many, or where the pool
holds any, `refuse_leaks` ends a job before it trains; the gate, which is given the reasons, judges leaks again.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

from spard.config.run_spec import RunSpec
from spard.data.overlap import Leak, find_leaks
from spard.data.rows import Example, Prompt, each_of_pool, prompt_text, read_examples
from spard.errors import ProviderDataOverlap, TrainAuditOverlap
from spard.evaluation.audit import Suite
from spard.evaluation.bounded import MIN_SCORED
from spard.evaluation.gate import is_gated
from spard.evaluation.suites import read_suite

HIDDEN = "The training file holds prompts that the audit asks, so what it measures would be memory."
LEFT_OUT = "A few prompts of the audit stand in the training file, and this audit does without them."
MOST_LEFT_OUT = 0.1
"""The share of a suite, and of each category that the gate decides on alone, that a job's audit may leave out.

A suite of attacks that an ordinary file meets in 2 of 134 prompts still measures; a file that is made of a suite must
not be able to take from it what it trains against.
"""
_POOL_LEAKS = (
    "The provider's safety pool holds prompts of its own audit suites, so no adapter can be measured. "
    "Your files are not at fault; the provider has to import the pool again."
)
_FILE, _POOL = "training file", "safety pool"

log = logging.getLogger(__name__)

Counts = Mapping[tuple[str, str], int]  # by suite and source
LeftOut = Mapping[str, Set[int]]  # places of prompts, counted from 0, by suite


def refuse_leaks(run: RunSpec) -> None:
    """Raise if leaks into what a run trains on would leave the gate undecided, whatever is measured.

    The messages are for customers: they name neither suites nor counts. The log has both.
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
    """Return which prompts of which suites the training file holds, of suites in which they are few."""
    suites = _suites(run)
    return _few(suites, _leaks(suites, {_FILE: read_examples(run.training_file)}))


def remove_prompts(suite: Suite, left_out: LeftOut) -> Suite:
    """Return a suite without the prompts that are left out of it."""
    places = left_out.get(suite.name, frozenset())
    return replace(suite, prompts=tuple(each for i, each in enumerate(suite.prompts) if i not in places))


def overlap_notes(left_out: LeftOut) -> list[str]:
    """Say whether prompts are left out; neither of which suites nor how many, for that would help to find them."""
    return [LEFT_OUT] if any(left_out.values()) else []


def find_hidden_leaks(run: RunSpec, left_out: LeftOut) -> dict[str, list[str]]:
    """Return, by suite, a sentence for what of it stands in the files that a run trains on, as customers may read it.

    A pool counts where it is used, and prompts of the training file that are `left_out` do not count. Of the training
    file, which is theirs, neither suite nor count is told: with these they could sort guesses.
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
    """Return, by suite, one sentence for each source that holds prompts of it.

    Sentences tell counts and no prompt: suites are secret.
    """
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
    """Return the prompts of each suite that the training file holds, where the suite still measures without them."""
    found: dict[str, set[int]] = defaultdict(set)
    for leak in leaks:
        if leak.source == _FILE:
            found[leak.suite].add(leak.index)
    return {suite.name: found[suite.name] for suite in suites if suite.name in found and _measures(suite, found)}


def _measures(suite: Suite, found: Mapping[str, Set[int]]) -> bool:
    """Tell whether a suite, and each of its categories that decides alone, has enough prompts without those found."""
    for group in _groups(suite.prompts):
        lost = len(group & found[suite.name])
        if lost and (lost > MOST_LEFT_OUT * len(group) or len(group) - lost < MIN_SCORED):
            return False
    return True


def _groups(prompts: Sequence[Prompt]) -> Iterator[Set[int]]:
    """Yield the places of all prompts, and of those of each category with enough of them for the gate."""
    yield set(range(len(prompts)))
    categories: dict[str | None, set[int]] = defaultdict(set)
    for place, prompt in enumerate(prompts):
        categories[prompt.category].add(place)
    yield from (places for name, places in categories.items() if name is not None and len(places) >= MIN_SCORED)


def _sentence(n: int, name: str, source: str, suites: Sequence[Suite]) -> str:
    size = next(len(suite.prompts) for suite in suites if suite.name == name)
    return f"{n} of {size} prompts of suite {name} stand in the {source}."
