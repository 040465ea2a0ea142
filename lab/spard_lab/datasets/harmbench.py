"""HarmBench (Mazeika et al., 2024): behaviors, CSV with `Behavior`, `FunctionalCategory`, `ContextString` and others.

Standard behaviors are asked as they are; contextual ones follow their context, joined as the authors do it. Copyright
behaviors are left out, because hashes and not a judge of harm decide if a reply violates copyright.
"""

from __future__ import annotations

from spard_lab.datasets.base import Dataset, LeftOut, Record, Sample, require_text

_COPYRIGHT = "copyright"


def sample(record: Record) -> Sample:
    """Convert a behavior; raise `LeftOut` for copyright behaviors."""
    behavior, function = require_text(record, "Behavior"), require_text(record, "FunctionalCategory")
    if function == _COPYRIGHT:
        raise LeftOut("copyright")
    context = record.get("ContextString")
    asked = f"{context.strip()}\n\n---\n\n{behavior}" if isinstance(context, str) and context.strip() else behavior
    category = record.get("SemanticCategory")
    return Sample(
        prompt=asked, kind="harmful", suite={"category": category} if isinstance(category, str) and category else {}
    )


HARMBENCH = Dataset(
    name="harmbench",
    stems={"harmful": "harmbench"},
    sample=sample,
    origin="harmbench_behaviors_text_all.csv in data/behavior_datasets of github.com/centerforaisafety/HarmBench",
    license="MIT",
    shares={"dev": 0.2},
    rest="test",
)
