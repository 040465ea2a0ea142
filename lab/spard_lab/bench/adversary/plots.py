"""Plot the models' behavior under each attack as SVG; needs matplotlib, the `bench` extra."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import matplotlib as mpl
from matplotlib.axes import Axes

from spard_lab.bench.adversary.rounds import PLAIN, Round
from spard_lab.bench.adversary.scores import MOST, share
from spard_lab.bench.plots import COLORS, GRAY, STYLE, mean_dot, place_legend, row_of_axes, svg

ARM_COLORS = {PLAIN: COLORS[1], "spard": COLORS[2]}
PANELS = {
    "complied": "complies as attacked, %",
    "refused_dressed": "benign refused as attacked, %",
    "right": "task right, %",
}


def attacks(found: Sequence[Round]) -> str:
    """Return an SVG with each attack and its arms: a dot for each seed, a cross if its job is stopped.

    A large dot is the mean with the interval over seeds, a gray bar the mean of the base models. The dotted line is the
    largest compliance allowed for a released model.
    """
    names, arms = ([*dict.fromkeys(getattr(each, name) for each in found)] for name in ("attack", "method"))
    others = [color for color in COLORS if color not in ARM_COLORS.values()]
    colors = {arm: ARM_COLORS.get(arm, others[j % len(others)]) for j, arm in enumerate(arms)}
    with mpl.rc_context(STYLE):
        figure, axes = row_of_axes(len(PANELS), 10.5, 1.1 + 0.16 * len(names) * (1 + len(arms)))
        for axis, (way, title) in zip(axes, PANELS.items(), strict=True):
            for i, attack in enumerate(names):
                of_attack = [each for each in found if each.attack == attack]
                _base(axis, of_attack, way, i, 5 + 5 * len(arms))
                there = [arm for arm in arms if any(each.method == arm for each in of_attack)]
                for j, arm in enumerate(there):
                    y = i + (j - (len(there) - 1) / 2) * 0.7 / len(arms)
                    _arm(axis, [each for each in of_attack if each.method == arm], way, y, colors[arm])
            axis.set(title=title, xlim=(-4, 104), ylim=(len(names) - 0.5, -0.5))
            axis.set_yticks(range(len(names)), names if axis is axes[0] else [""] * len(names))
        axes[0].axvline(100 * MOST, color=GRAY, lw=0.8, ls=":")
        for arm in arms:
            axes[0].plot([], [], "o", ms=5.5, color=colors[arm], label=arm)
        axes[0].plot([], [], "x", ms=3.5, color=GRAY, label="job stopped")
        axes[0].plot([], [], "|", ms=9, color=GRAY, label="base model")
        place_legend(figure, axes[0], len(arms) + 2)
        return svg(figure)


def _base(axis: Axes, found: Sequence[Round], way: str, y: float, size: float) -> None:
    shares = [100 * share(getattr(each.base, way)) for each in found if each.base]
    if shares:
        axis.plot([fmean(shares)], [y], "|", ms=size, color=GRAY)


def _arm(axis: Axes, found: Sequence[Round], way: str, y: float, color: str) -> None:
    trained = [(100 * share(getattr(each.answers, way)), each.ending == "released") for each in found if each.answers]
    for mark, size, is_released in (("o", 2.5, True), ("x", 3.5, False)):
        values = [value for value, released in trained if released is is_released]
        axis.plot(values, [y] * len(values), mark, ms=size, color=color, alpha=0.5)
    mean_dot(axis, [value for value, _ in trained], y, color, "")
