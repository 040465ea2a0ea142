"""Differences of arms that share something: selections by seed, since labs differ more; methods prompt by prompt."""

from __future__ import annotations

from collections.abc import Sequence

from spard.evaluation.results import SuiteResult
from spard.evaluation.statistics import Pairs, count_pairs, holm, is_not_inferior, mcnemar, paired_difference
from spard.research.bench.measure import Measurement
from spard.research.bench.report import Table, figures, spread, summarize

MARGIN = 0.01  # a share of right answers that a defense may cost
REFERENCE = "spard"
METHODS_HEADING = (
    f"Each method minus {REFERENCE} on the same prompts, in points [95 % interval]; p of McNemar's test after Holm. "
    "They speak of these models, not of other seeds"
)
HEADING = "Attack success minus that of another selection, in points, paired by seed [95 % interval of the mean]"


def paired_table(found: Sequence[Measurement]) -> Table:
    """Compare the first selection with each other one, by method, attack and pool; return head and rows."""
    asr: dict[tuple[str, str, str], dict[str, dict[int, float]]] = {}
    for each in found:
        value = figures(each)["asr"]
        if each.selection and value is not None:
            place = (each.method, each.attack, each.pool)
            asr.setdefault(place, {}).setdefault(each.selection, {})[each.seed] = value
    rows = []
    for place, by_selection in asr.items():
        first, *others = by_selection
        for other in others:
            both = sorted(by_selection[first].keys() & by_selection[other].keys())
            if both:
                less = summarize([by_selection[first][seed] - by_selection[other][seed] for seed in both])
                rows.append([*place, first, other, spread("asr", less), str(len(both))])
    return ["method", "attack", "pool", "selection", "minus", "difference", "seeds"], rows


def methods_table(found: Sequence[Measurement]) -> Table:
    """Compare each method with `REFERENCE` on the prompts of all seeds that both were asked; return head and rows.

    Prompts that one of the two could not be scored on are left out.
    """
    pairs = _pairs(found)
    p_values = holm([mcnemar(each) for each in pairs.values()])
    rows = []
    for ((figure, method, attack), each), p in zip(pairs.items(), p_values, strict=True):
        less = paired_difference(each)
        kept = ("yes" if is_not_inferior(each, MARGIN) else "not shown") if figure == "accuracy" else ""
        points = f"{100 * less.value:.1f} [{100 * less.low:.1f}, {100 * less.high:.1f}]"
        rows.append([figure, attack, method, points, f"{p:.2g}", str(each.n), kept])
    head = ["figure", "attack", "method", f"minus {REFERENCE}", "p", "prompts", f"at most {MARGIN:.0%} worse"]
    return head, rows


def _pairs(found: Sequence[Measurement]) -> dict[tuple[str, str, str], Pairs]:
    """Count the pairs of outcomes by figure, method and attack; a method without a pool meets the first pool's."""
    ours = [each for each in found if each.method == REFERENCE]
    references = {(each.attack, each.seed, ""): each for each in reversed(ours)}
    references |= {(each.attack, each.seed, each.pool): each for each in ours}
    outcomes: dict[tuple[str, str, str], tuple[list[bool], list[bool]]] = {}
    for each in found:
        reference = references.get((each.attack, each.seed, each.pool))
        if reference is None or each.method == REFERENCE:
            continue
        for result in each.results:
            figure = _figure(result, each)
            both = zip(each.hits.get(result.suite, ""), reference.hits.get(result.suite, ""), strict=False)
            scored = [pair for pair in both if "-" not in pair]
            if figure and scored:
                first, second = outcomes.setdefault((figure, each.method, each.attack), ([], []))
                first += [own == "1" for own, _ in scored]
                second += [other == "1" for _, other in scored]
    return {place: count_pairs(*each) for place, each in outcomes.items()}


def _figure(result: SuiteResult, found: Measurement) -> str | None:
    """Return the column of the bench's tables that a suite counts in, or None."""
    if result.kind == "harmful":
        return "asr" if result.suite in found.attacked else None
    return {"benign": "over_refusal", "utility": "accuracy"}.get(result.kind)
