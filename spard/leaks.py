"""The leak gate: audit prompts that stand in the training file or in the safety pool measure memory, not safety."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from spard.audit import Suite
from spard.config import NoDefense
from spard.overlap import find_leaks
from spard.recipe import RunSpec
from spard.rows import Example, prompt_text, read_examples, read_pool, read_prompts

HIDDEN = "The training file holds prompts that the audit asks, so what it measures would be memory."
_FILE = "training file"

Counts = Mapping[tuple[str, str], int]  # by suite and source


def leaks_of(run: RunSpec) -> dict[str, list[str]]:
    """By suite, what of it stands in the files that a run trains on; a pool counts where it is used."""
    return leak_reasons(_suites(run), _sources(run))


def hidden_leaks_of(run: RunSpec) -> dict[str, list[str]]:
    """The same for customers, who must not learn what is asked.

    Of the training file, which is theirs, neither suite nor count is told: with these they could sort guesses.
    """
    suites = _suites(run)
    reasons: dict[str, list[str]] = defaultdict(list)
    for (suite, source), n in _counts(suites, _sources(run)).items():
        reasons[suite].append(HIDDEN if source == _FILE else _sentence(n, suite, source, suites))
    return dict(reasons)


def leak_reasons(suites: Sequence[Suite], sources: Mapping[str, Sequence[Example]]) -> dict[str, list[str]]:
    """By suite, one sentence for each source that holds prompts of it.

    Sentences tell counts and no prompt: suites are secret.
    """
    reasons: dict[str, list[str]] = defaultdict(list)
    for (suite, source), n in _counts(suites, sources).items():
        reasons[suite].append(_sentence(n, suite, source, suites))
    return dict(reasons)


def _suites(run: RunSpec) -> list[Suite]:
    return [Suite(each.name, each.kind, tuple(read_prompts(each.path))) for each in run.suites]


def _sources(run: RunSpec) -> dict[str, Sequence[Example]]:
    sources: dict[str, Sequence[Example]] = {_FILE: read_examples(run.training_file)}
    if run.pool is not None and not isinstance(run.recipe.defense, NoDefense):
        sources["safety pool"] = read_pool(run.pool)
    return sources


def _counts(suites: Sequence[Suite], sources: Mapping[str, Sequence[Example]]) -> Counts:
    prompts = {suite.name: [each.prompt for each in suite.prompts] for suite in suites}
    texts = {name: [prompt_text(row) for row in rows] for name, rows in sources.items()}
    return Counter((leak.suite, leak.source) for leak in find_leaks(prompts, texts))


def _sentence(n: int, name: str, source: str, suites: Sequence[Suite]) -> str:
    size = next(len(suite.prompts) for suite in suites if suite.name == name)
    return f"{n} of {size} prompts of suite {name} stand in the {source}."
