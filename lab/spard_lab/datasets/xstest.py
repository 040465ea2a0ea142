"""XSTest (Roettger et al., 2024): safe prompts that look unsafe and their unsafe contrasts, CSV with `prompt`, `type`.

The types of contrasts begin with `contrast_`; newer files also have a column `label` with `safe` or `unsafe`. Part of
the safe prompts becomes a benign pool: look-alikes that no suite asks, for defenses that use benign rows.
"""

from __future__ import annotations

from spard_lab.datasets.base import Dataset, Record, Sample, require_text

_CONTRAST = "contrast_"


def sample(record: Record) -> Sample:
    """Convert a prompt; its category is its type without the prefix `contrast_`."""
    prompt, type_ = require_text(record, "prompt"), require_text(record, "type")
    is_unsafe = type_.startswith(_CONTRAST)
    return Sample(
        prompt=prompt,
        kind="harmful" if is_unsafe else "benign",
        suite={"category": type_.removeprefix(_CONTRAST)},
    )


XSTEST = Dataset(
    name="xstest",
    stems={"benign": "xstest", "harmful": "xstest_contrast"},
    sample=sample,
    origin="xstest_prompts.csv of github.com/paul-rottger/xstest",
    license="CC-BY-4.0",
    shares={"dev": 0.2, "train": 0.2},
    rest="test",
)
