"""Find audit prompts in the training file and in the safety pool: what is asked there measures memory, not safety.

`refuse_leaks` ends a job before it trains; the gate, which is given the reasons, judges leaks again as the last line.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from spard.config.run_spec import RunSpec
from spard.data.overlap import find_leaks
from spard.data.rows import Example, each_of_pool, prompt_text, read_examples
from spard.errors import ProviderDataOverlap, TrainAuditOverlap
from spard.evaluation.audit import Suite
from spard.evaluation.gate import is_gated
from spard.evaluation.suites import read_suite

HIDDEN = "The training file holds prompts that the audit asks, so what it measures would be memory."
_POOL_LEAKS = (
    "The provider's safety pool holds prompts of its own audit suites, so no adapter can be measured. "
    "Your files are not at fault; the provider has to import the pool again."
)
_FILE, _POOL = "training file", "safety pool"

log = logging.getLogger(__name__)

Counts = Mapping[tuple[str, str], int]  # by suite and source


def refuse_leaks(run: RunSpec) -> None:
    """Raise if leaks into what a run trains on would leave the gate undecided, whatever is measured.

    The messages are for customers: they name neither suites nor counts. The log has both.
    """
    suites = [suite for suite in _suites(run) if is_gated(suite.kind, run.thresholds)]
    counts = _counts(suites, _sources(run))
    for (suite, source), n in counts.items():
        log.warning("%s", _sentence(n, suite, source, suites))
    if any(source == _POOL for _, source in counts):
        raise ProviderDataOverlap(_POOL_LEAKS)
    if counts:
        raise TrainAuditOverlap(HIDDEN, "training_file")


def hidden_leaks_of(run: RunSpec) -> dict[str, list[str]]:
    """Return, by suite, a sentence for what of it stands in the files that a run trains on, as customers may read it.

    A pool counts where it is used. Of the training file, which is theirs, neither suite nor count is told: with these
    they could sort guesses.
    """
    suites = _suites(run)
    reasons: dict[str, list[str]] = defaultdict(list)
    for (suite, source), n in _counts(suites, _sources(run)).items():
        reasons[suite].append(HIDDEN if source == _FILE else _sentence(n, suite, source, suites))
    return dict(reasons)


def leak_reasons(suites: Sequence[Suite], sources: Mapping[str, Iterable[Example]]) -> dict[str, list[str]]:
    """Return, by suite, one sentence for each source that holds prompts of it.

    Sentences tell counts and no prompt: suites are secret.
    """
    reasons: dict[str, list[str]] = defaultdict(list)
    for (suite, source), n in _counts(suites, sources).items():
        reasons[suite].append(_sentence(n, suite, source, suites))
    return dict(reasons)


def _suites(run: RunSpec) -> list[Suite]:
    return [read_suite(each) for each in run.suites]


def _sources(run: RunSpec) -> dict[str, Iterable[Example]]:
    sources: dict[str, Iterable[Example]] = {_FILE: read_examples(run.training_file)}
    if run.pool is not None and not run.recipe.defense.is_baseline:
        sources[_POOL] = each_of_pool(run.pool)
    return sources


def _counts(suites: Sequence[Suite], sources: Mapping[str, Iterable[Example]]) -> Counts:
    prompts = {suite.name: [each.prompt for each in suite.prompts] for suite in suites}
    texts = {name: map(prompt_text, rows) for name, rows in sources.items()}
    return Counter((leak.suite, leak.source) for leak in find_leaks(prompts, texts))


def _sentence(n: int, name: str, source: str, suites: Sequence[Suite]) -> str:
    size = next(len(suite.prompts) for suite in suites if suite.name == name)
    return f"{n} of {size} prompts of suite {name} stand in the {source}."
