"""Find audit prompts in the training file and in the safety pool; replies to these measure memory, not safety.

A few prompts that the training file contains are left out of the job's audit. If they are too many, or if the pool
contains any, `refuse_leaks` ends a job before it trains. The gate gets the reasons too and decides on leaks again.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

from spard.config import MIN_SCORED
from spard.config.run_spec import RunSpec
from spard.data.overlap import Leak, find_leaks
from spard.data.rows import Example, Prompt, each_of_pool, prompt_text, read_examples
from spard.errors import ProviderDataOverlap, TrainAuditOverlap
from spard.evaluation.audit import Suite
from spard.evaluation.gate import is_gated
from spard.evaluation.suites import read_suite

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

log = logging.getLogger(__name__)

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
    """Return a note if prompts are left out; it names neither suite nor count, because these help to find them."""
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
