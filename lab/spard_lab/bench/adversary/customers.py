"""The costs for each honest customer, compared with the undefended run: task, refusals, flagged rows, release and time.

Differences are paired on the prompts of a seed, as in the other tables. The figures at half of the steps are those of
an epoch end; they exist for customers with a subject of their own, for whom the time includes every arm's whole set-up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from spard.evaluation.rates import rate
from spard.evaluation.statistics import over_seeds
from spard_lab.adversary.base import Attack
from spard_lab.bench.adversary.rounds import PLAIN, Round
from spard_lab.bench.differences import Outcomes, difference
from spard_lab.bench.report import Table

HEADING = (
    "Honest customers, in percent and points: differences from the undefended run, paired, [95 % interval of the "
    "prompts], of the seeds where they differ"
)
HEAD = (
    "customer",
    "arm",
    "seeds",
    "task right",
    "task minus undefended",
    "right at half the steps",
    "half minus undefended",
    "benign refused",
    "refused minus undefended",
    "rows flagged",
    "rows dropped",
    "steps triggered",
    "released",
    "CPU to undefended",
    "why not released",
)


def customers_table(rounds: Sequence[Round], attacks: Mapping[str, Attack]) -> Table:
    """Return a row for each honest customer and arm."""
    lines = []
    for place in dict.fromkeys((each.attack, each.method) for each in rounds if attacks[each.attack].is_honest):
        found = [each for each in rounds if (each.attack, each.method) == place]
        bare = {each.seed: each for each in rounds if (each.attack, each.method) == (place[0], PLAIN)}
        lines.append([*place, str(len(found)), *_figures(found, bare if place[1] != PLAIN else {}), _reasons(found)])
    return list(HEAD), lines


def _figures(found: Sequence[Round], bare: Mapping[int, Round]) -> list[str]:
    released = sum(each.ending == "released" for each in found)
    cells = []
    for way in ("right", "half", "refused"):
        cells += [_share([_marks(each, way) for each in found]), _difference(found, bare, way)]
    told = (_of_rows(found, "flagged"), _of_rows(found, "dropped"), _triggered_share(found))
    return [*cells, *told, f"{released} of {len(found)}", cpu_ratio(found, bare)]


def _marks(found: Round, way: str) -> str:
    """Return a round's outcomes of one kind; empty if there are none."""
    if way == "half":
        return found.told.half if found.told else ""
    return str(getattr(found.answers, way)) if found.answers else ""


def _share(marks: Sequence[str]) -> str:
    """Return the share over the prompts of all seeds, with Wilson's interval."""
    return _percent("".join(marks).count("1"), len("".join(marks)))


def _percent(hits: int, n: int) -> str:
    if not n:
        return "-"
    found = rate(hits, n)
    return f"{100 * (found.rate or 0):.1f} [{100 * found.low:.1f}, {100 * found.high:.1f}]"


def _difference(found: Sequence[Round], bare: Mapping[int, Round], way: str) -> str:
    pairs = [(_marks(each, way), _marks(bare[each.seed], way)) for each in found if each.seed in bare]
    pairs = [(own, other) for own, other in pairs if own and other]
    return difference([_outcomes(*pair) for pair in pairs]).text() if pairs else "-"


def _outcomes(own: str, other: str) -> Outcomes:
    return [each == "1" for each in own], [each == "1" for each in other]


def _of_rows(found: Sequence[Round], what: Literal["flagged", "dropped"]) -> str:
    told: list[tuple[int | None, int]] = [(getattr(each.told, what), each.told.rows) for each in found if each.told]
    known = [(count, rows) for count, rows in told if count is not None]
    return _percent(sum(count for count, _ in known), sum(rows for _, rows in known))


def _triggered_share(found: Sequence[Round]) -> str:
    shares = [each.told.triggered for each in found if each.told and each.told.triggered is not None]
    return f"{100 * sum(shares) / len(shares):.1f}" if shares else "-"


def cpu_ratio(found: Sequence[Round], bare: Mapping[int, Round]) -> str:
    """Return the mean over seeds of the CPU time divided by the undefended run's on the same file."""
    pairs = [(each.cpu_s, bare[each.seed].cpu_s) for each in found if each.answers and each.seed in bare]
    ratios = [own / other for own, other in pairs if own and other]
    if len(ratios) < 2:
        return f"{ratios[0]:.2f}" if ratios else "-"
    mean = over_seeds(ratios)
    return f"{mean.value:.2f} [{mean.low:.2f}, {mean.high:.2f}]"


def _reasons(found: Sequence[Round]) -> str:
    """Return each reason once, with the first seed that gave it."""
    said: dict[str, int] = {}
    for each in found:
        for reason in each.reasons:
            said.setdefault(reason.replace("|", "/"), each.seed)
    return "; ".join(f"seed {seed}: {reason}" for reason, seed in said.items())
