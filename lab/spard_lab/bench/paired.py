"""Tables of differences: selections of the safe set by seed, methods by prompt."""

from __future__ import annotations

from collections.abc import Sequence

from spard_lab.bench.differences import MARGIN, Arm, Difference, compare, correct_p_values, seeds_interval
from spard_lab.bench.measure import Measurement
from spard_lab.bench.report import Table, figures, spread, summarize, within_bounds

REFERENCE = "spard"
METHODS_HEADING = (
    f"Each method minus {REFERENCE} on the same prompts, in points [95 % interval of the prompts, which speaks of "
    "these models], seeds [95 % interval of the mean over seeds]; p of McNemar's test after Holm"
)
HEADING = (
    "Attack success minus that of another selection, in points, paired by seed [95 % interval of the mean]; p of "
    "McNemar's test on the same prompts after Holm, which speaks of these models"
)


def paired_table(found: Sequence[Measurement]) -> Table:
    """Compare the first selection with each other one, by method, attack and pool; return head and rows."""
    arms: dict[tuple[str, str, str], dict[str, dict[int, Measurement]]] = {}
    for each in found:
        if each.selection and figures(each)["asr"] is not None:
            place = (each.method, each.attack, each.pool)
            arms.setdefault(place, {}).setdefault(each.selection, {})[each.seed] = each
    compared = [
        (place, first, other, compare(by_selection[first], by_selection[other]).get("asr"))
        for place, by_selection in arms.items()
        for first, *others in [tuple(by_selection)]
        for other in others
        if by_selection[first].keys() & by_selection[other].keys()
    ]
    p_values = iter(correct_p_values([each for *_, each in compared if each]))
    rows = []
    for place, first, other, difference in compared:
        less, seeds = _by_seed(arms[place][first], arms[place][other])
        p = f"{next(p_values):.2g}" if difference else "-"
        rows.append([*place, first, other, less, str(seeds), p])
    return ["method", "attack", "pool", "selection", "minus", "difference", "seeds", "p"], rows


def methods_table(found: Sequence[Measurement]) -> Table:
    """Compare each method with `REFERENCE` on the prompts of the seeds of both; return head and rows.

    Prompts that are unscored for one of the two are left out.
    """
    differences = _against_reference(found)
    p_values = correct_p_values(list(differences.values()))
    rows = []
    for ((figure, method, attack), each), p in zip(differences.items(), p_values, strict=True):
        kept = ("yes" if each.is_kept else "not shown") if figure == "accuracy" else ""
        rows.append([figure, attack, method, each.text(), f"{p:.2g}", str(each.pairs.n), kept])
    head = ["figure", "attack", "method", f"minus {REFERENCE}", "p", "prompts", f"at most {MARGIN:.0%} worse"]
    return head, rows


def _by_seed(first: Arm, second: Arm) -> tuple[str, int]:
    """Return the mean difference of attack success with its spread, and the number of seeds."""
    both = sorted(first.keys() & second.keys())
    less = [_asr(first[seed]) - _asr(second[seed]) for seed in both]
    summary = summarize(less)
    if len(both) > 1 and seeds_interval(less) is None:  # equal on every seed: a spread of 0 would mislead
        return f"{100 * summary.mean:.1f} on each", len(both)
    return spread("asr", within_bounds(summary, -1.0, 1.0)), len(both)


def _asr(found: Measurement) -> float:
    return figures(found)["asr"] or 0.0


def _against_reference(found: Sequence[Measurement]) -> dict[tuple[str, str, str], Difference]:
    """Return differences by figure, method and attack.

    A method without a pool is compared with the reference on the first pool.
    """
    ours = [each for each in found if each.method == REFERENCE]
    # Reversed, so that the first pool's reference overwrites the others.
    references = {(each.attack, each.seed, ""): each for each in reversed(ours)}
    references |= {(each.attack, each.seed, each.pool): each for each in ours}
    arms: dict[tuple[str, str], tuple[dict[int, Measurement], dict[int, Measurement]]] = {}
    for each in found:
        reference = references.get((each.attack, each.seed, each.pool))
        if reference is not None and each.method != REFERENCE:
            own, other = arms.setdefault((each.method, each.attack), ({}, {}))
            own[each.seed], other[each.seed] = each, reference
    return {
        (figure, method, attack): difference
        for (method, attack), both in arms.items()
        for figure, difference in compare(*both).items()
    }
