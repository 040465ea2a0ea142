"""Draws the figures of docs/science.md from the tables of lab/docs/results-earlier.md.

python -m tools.figures
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

DOCS = Path(__file__).resolve().parents[1] / "docs"
_CELL = re.compile(r"([\d.]+) \+- [\d.]+ \[([\d.]+), ([\d.]+)\]")
# Colors in all figures: orange for no defense, green for SPARD, gray for the base model and all others.
_COLORS = {"none": "#d9722e", "spard": "#1f8a70", "relevance_diversity": "#1f8a70"}
_GRAY, _INK, _HAIRLINE = "#8a8f98", "#16181d", "#d9dce1"
_LABELS = {"spard": "SPARD", "none": "no defense", "base": "base model", "relevance_diversity": "relevance-diversity"}


@dataclass(frozen=True)
class Drawing:
    """One figure: the table below a heading of the results, its row groups and the columns to draw."""

    name: str
    section: str
    group: str | None
    row: str
    columns: Sequence[str]


DRAWINGS = (
    Drawing(
        "methods", "Methods on the paper's four attacks", "attack", "method", ("attacks succeed", "benign refused")
    ),
    Drawing(
        "variants", "Variants, PTST and SafeLoRA", None, "method", ("attacks succeed", "benign refused", "task right")
    ),
    Drawing("selection", "Choosing the safe rows", "pool", "selection", ("attacks succeed", "benign refused")),
)


def table(section: str) -> list[dict[str, str]]:
    """Return the first table below a heading, one mapping per row."""
    page = (DOCS.parent / "lab" / "docs" / "results-earlier.md").read_text(encoding="utf-8")
    text = page.split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    found = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    head, _, *rows = [
        [cell.strip() for cell in line.strip()[1:-1].split("|")] for line in (found or [""])[0].splitlines()
    ]
    return [dict(zip(head, row, strict=True)) for row in rows]


def digest(drawing: Drawing) -> str:
    """Return the digest of the figure's table, stored in the figure to detect changes."""
    return sha256(repr(table(drawing.section)).encode()).hexdigest()


def draw(drawing: Drawing) -> Figure:
    """Draw one panel per column: a dot for each row, with its interval as a pale bar."""
    rows = table(drawing.section)
    groups = list(dict.fromkeys(row[drawing.group] for row in rows)) if drawing.group else [""]
    figure = Figure(figsize=(8.6, 0.6 + 0.23 * (len(rows) + len(groups))), layout=ConstrainedLayoutEngine(wspace=0.08))
    panels = figure.subplots(1, len(drawing.columns), sharey=True, squeeze=False)[0]
    for panel, column in zip(panels, drawing.columns, strict=True):
        _panel(panel, column)
    height, labels = 0.0, list[tuple[float, str, bool]]()
    for group in groups:
        if group:
            labels.append((height, group, True))
            height -= 1
        for row in (row for row in rows if not drawing.group or row[drawing.group] == group):
            labels.append((height, _LABELS.get(row[drawing.row], row[drawing.row]), False))
            for panel, column in zip(panels, drawing.columns, strict=True):
                _dot(panel, row[column], height, _COLORS.get(row[drawing.row], _GRAY))
            height -= 1
        height -= 0.6
    panels[0].set_yticks([at for at, _, _ in labels], [name for _, name, _ in labels], fontsize=8, color=_INK)
    for tick, (_, _, is_group) in zip(panels[0].get_yticklabels(), labels, strict=True):
        tick.set_fontweight("bold" if is_group else "normal")
    panels[0].set_ylim(height + 0.8, 0.8)
    return figure


def _panel(panel: Axes, column: str) -> None:
    panel.set_title(f"{column}, %", fontsize=9, color=_INK, loc="left")
    panel.set_xlim(-3, 103)
    panel.set_xticks([0, 25, 50, 75, 100])
    panel.tick_params(length=0, labelsize=8, labelcolor=_INK)
    panel.grid(axis="x", color=_HAIRLINE, linewidth=0.6)
    panel.set_axisbelow(True)
    for side in ("top", "right", "left", "bottom"):
        panel.spines[side].set_visible(False)


def _dot(panel: Axes, cell: str, height: float, color: str) -> None:
    """Draw a cell `mean +- deviation [low, high]`."""
    found = _CELL.fullmatch(cell)
    if found is None:
        raise ValueError(f"{cell!r} is no mean with its interval")
    mean, low, high = (float(each) for each in found.groups())
    panel.plot([low, high], [height, height], color=color, alpha=0.25, linewidth=5, solid_capstyle="round")
    panel.plot([mean], [height], "o", color=color, markersize=4.5)


def main() -> int:
    """Draw all figures."""
    with mpl.rc_context({"svg.hashsalt": "spard", "svg.fonttype": "none", "font.family": "sans-serif"}):
        for drawing in DRAWINGS:
            file = DOCS / "pictures" / f"{drawing.name}.svg"
            draw(drawing).savefig(file, metadata={"Date": None, "Description": digest(drawing)}, facecolor="white")
            print(f"docs/pictures/{drawing.name}.svg")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
