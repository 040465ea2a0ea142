"""The contribution of each part of the defense: left out of the whole, added alone, and in selected pairs.

A part is data: the changes that switch it on and off (`spard_lab.bench.methods`), and the parts it needs. A new part is
one line of `PARTS`, a new pair one line of `PAIRS`. An arm is a set of parts; its name contains every setting that it
depends on, so that the table stays the same when a default changes.

The row signal and the judge's reading are settings of the job and not of the training. The whole has them, as a new
deployment does; since they drop most harmful rows and leave the other parts little to do, each part is also measured
without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from spard.config import defenses
from spard.errors import InvalidRecipe
from spard_lab.bench.differences import MARGIN, Difference, compare, correct_p_values
from spard_lab.bench.measure import Measurement
from spard_lab.bench.report import Table

PROJECTION, ANCHOR, DRESSED, OWN, DPP = "projection", "anchor", "dressed-rows", "own-answers", "dpp"
EXCESS, BENIGN_ANCHOR, DRESSED_ANCHOR = "excess", "dressed-benign-anchor", "dressed-safe-anchor"
BOUND, CLOSE = "anchor-bound", "close-anchor"
SIGNAL, READING = "row-signal", "judge-reading"
EVERY = 4  # steps between two looks of the projection, in the whole
BARE, PROJECTED = "none", "spard"
PUBLISHED = ("spard_paper", "spard_authors")
RIVALS = tuple(
    name for name, kind in defenses().items() if kind.trains_on_safe_rows and name not in (PROJECTED, *PUBLISHED)
)
PARTS_HEADING = (
    "With a part minus without it, in points [95 % interval of the prompts, which speaks of these models], seeds [95 % "
    "interval of the mean over seeds]; p of McNemar's test after Holm over the table"
)


@dataclass(frozen=True, slots=True)
class Part:
    """A part other than the projection.

    on, off  changes to a method that switch it on and off
    needs    parts of which at least one must be present for it to have an effect; empty: none
    """

    name: str
    on: str
    off: str
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Comparison:
    """The method `first` minus `second`, which measures a part in the way that `how` describes."""

    part: str
    how: str
    first: str
    second: str


PARTS = (
    Part(ANCHOR, "anchor", "anchor_weight=0"),
    Part(DRESSED, "dressed", "undressed", (PROJECTION,)),
    Part(DPP, "dpp", "random", (PROJECTION, ANCHOR)),
    Part(OWN, "self", "others", (PROJECTION,)),
    Part(EXCESS, "bound=excess", "bound=loss", (PROJECTION,)),
    Part(BENIGN_ANCHOR, "benign_anchor", "no_benign_anchor", (ANCHOR,)),
    Part(DRESSED_ANCHOR, "dressed_anchor", "no_dressed_anchor", (ANCHOR,)),
    Part(BOUND, "bounded_anchor", "unbounded_anchor", (ANCHOR,)),
    Part(CLOSE, "close_anchor", "loose_anchor", (ANCHOR,)),
    Part(SIGNAL, "row_signal", "no_row_signal"),
    Part(READING, "judge_reads", "no_judge_reads", (SIGNAL,)),
)
NAMES = (PROJECTION, *(part.name for part in PARTS))
TRAINING = (
    PROJECTION,
    ANCHOR,
    DRESSED,
    BENIGN_ANCHOR,
    DRESSED_ANCHOR,
    BOUND,
    CLOSE,
    DPP,
)  # the parts of the training itself; no row is dropped
WHOLE = (*TRAINING, SIGNAL, READING)  # the default of a new deployment


def arm(parts: Iterable[str], every: int = EVERY) -> str:
    """Return the name of the method with exactly these parts; the projection looks every `every` steps.

    Raises `InvalidRecipe` for an unknown part.
    """
    names = frozenset(parts)
    if unknown := names - set(NAMES):
        raise InvalidRecipe(f"--parts: there is no {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}", "parts")
    able = [_switch(part, names) for part in PARTS if not part.needs or names & {*part.needs}]
    if PROJECTION in names:
        return "+".join([PROJECTED, f"check_every={every}", *able])
    return "+".join([BARE, *able]) if names else BARE


def _switch(part: Part, names: frozenset[str]) -> str:
    return part.on if part.name in names else part.off


PAIRS = (
    *(
        Comparison(f"{PROJECTION} every {every} steps", "alone, with random plain rows", arm([PROJECTION], every), BARE)
        for every in (1, 2, 4, 8)
    ),
    Comparison(f"{PROJECTION} every step, not every {EVERY}", "in the training", arm(TRAINING, 1), arm(TRAINING)),
    Comparison(f"{DPP}, not random", "under the anchor alone", arm([ANCHOR, DPP]), arm([ANCHOR])),
    Comparison("the training", "the row signal and the judge's reading beside it", arm(WHOLE), arm([SIGNAL, READING])),
    Comparison("the training", "minus its anchor alone", arm(TRAINING), arm([ANCHOR, BOUND, CLOSE])),
    *(Comparison("the training", f"minus {name}", arm(TRAINING), name) for name in PUBLISHED),
    *(
        Comparison("the training", f"minus {name} with the same anchor and rows", arm(TRAINING), f"{name}+anchor+dpp")
        for name in RIVALS
    ),
)


def comparisons(asked: Sequence[str] = (), whole: Sequence[str] = WHOLE) -> list[Comparison]:
    """Return the questions of the table: each part left out of or added to the whole, and added alone; then the pairs.

    The whole is compared with and without the row signal. A part that needs another one is added alone to an arm with
    that other part. If parts are `asked` for by name, there are no others and no pairs.
    """
    found = []
    for name in asked or NAMES:
        others = [each for each in whole if each != name]
        is_in = name in whole
        how = "left out of the whole" if is_in else "added to the whole"
        found.append(Comparison(name, how, arm([*others, name]), arm(others)))
        if SIGNAL in others:
            bare = [each for each in others if each != SIGNAL]
            found.append(Comparison(name, f"{how}, no row dropped", arm([*bare, name]), arm(bare)))
        for floor in _floors(name):
            on = f" to the {floor[0]}" if floor else ""
            found.append(Comparison(name, f"added alone{on}", arm([*floor, name]), arm(floor)))
    return _distinct([*found, *(() if asked else PAIRS)])


def compared_methods(questions: Iterable[Comparison]) -> tuple[str, ...]:
    """Return every arm of the questions once, plain fine-tuning first."""
    return tuple(dict.fromkeys(arm for each in questions for arm in (BARE, each.first, each.second)))


def parts_table(found: Sequence[Measurement], questions: Sequence[Comparison]) -> Table:
    """Answer every question on every attack, with Holm's correction over the whole table; return head and rows."""
    arms: dict[tuple[str, str], dict[int, Measurement]] = {}
    for each in found:
        arms.setdefault((each.method, each.attack), {})[each.seed] = each
    rows: list[tuple[list[str], Mapping[str, Difference]]] = []
    for attack in dict.fromkeys(each.attack for each in found):
        for asked in questions:
            first, second = arms.get((asked.first, attack)), arms.get((asked.second, attack))
            if first and second:
                seeds = str(len(first.keys() & second.keys()))
                rows.append(([attack, asked.part, asked.how, seeds], compare(first, second)))
    p_values = iter(correct_p_values([each for _, by_figure in rows for each in by_figure.values()]))
    head = ["attack", "part", "asked", "seeds", "attacks succeed", "benign refused", "task right", "is worth"]
    return head, [
        [*names, *_cells({figure: (each, next(p_values)) for figure, each in by.items()})] for names, by in rows
    ]


def arms_table(questions: Sequence[Comparison]) -> Table:
    """Return the two methods that each question compares, in the syntax of `spard bench methods`."""
    return ["part", "asked", "with", "without"], [[each.part, each.how, each.first, each.second] for each in questions]


def _cells(found: Mapping[str, tuple[Difference, float]]) -> list[str]:
    texts = {figure: f"{each.text()}, p {p:.2g}" for figure, (each, p) in found.items()}
    return [*(texts.get(figure, "-") for figure in ("asr", "over_refusal", "accuracy")), "; ".join(_verdicts(found))]


def _verdicts(found: Mapping[str, tuple[Difference, float]]) -> list[str]:
    """Return the significant effects in words, or "nothing shown"."""
    words = {"asr": ("lets more through", "defends"), "over_refusal": ("refuses more", "refuses less")}
    said = [
        words[figure][each.value < 0] for figure, (each, p) in found.items() if figure in words and each.is_shown(p)
    ]
    if task := found.get("accuracy"):
        each, p = task
        if each.is_shown(p) and each.value < 0 and not each.is_kept:
            said.append("costs the task")
        elif each.is_shown(p) and each.value > 0:
            said.append("helps the task")
        elif each.is_kept:
            said.append(f"keeps the task within {MARGIN:.0%}")
    return said or ["nothing shown"]


def _floors(name: str) -> list[tuple[str, ...]]:
    """Return the smallest arms that a part can be added to: the empty one, or each of the parts that it needs."""
    needs = next((part.needs for part in PARTS if part.name == name), ())
    return [(each,) for each in needs] or [()]


def _distinct(found: Sequence[Comparison]) -> list[Comparison]:
    """Drop comparisons of an arm with itself and repeated comparisons."""
    seen: dict[tuple[str, str], Comparison] = {}
    for each in found:
        if each.first == each.second:
            continue
        seen.setdefault((each.first, each.second), each)
    return list(seen.values())
