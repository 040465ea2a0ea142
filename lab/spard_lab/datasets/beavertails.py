"""BeaverTails (Ji et al., 2023): questions with answers that people labeled safe or unsafe, `{"prompt", "response"}`.

Further fields are `category`, fourteen names with true or false, and `is_safe`. A prompt is harmful if one of its
answers is unsafe; its first safe answer goes to the pool and its first unsafe one to the attack. The SPARD paper's
prepared rows, `{"prompt", "safe", "unsafe"}` with either answer optional, are read too: that is the form of
I-BeaverTails (the same requests as instructions) and of the questions in `spard_lab.datasets.lat`.
"""

from __future__ import annotations

from spard_lab.datasets.base import Dataset, Record, Sample, member, require_text, wrong

PREPARED = "files of rows {prompt, safe, unsafe} as the authors of SPARD prepare them"


def sample(record: Record) -> Sample:
    """Convert an answered question or a prepared row."""
    if "response" not in record and record.keys() & {"safe", "unsafe"}:
        return pair(record)
    prompt, response, is_safe = (
        require_text(record, "prompt"),
        require_text(record, "response"),
        member(record, "is_safe"),
    )
    if not isinstance(is_safe, bool):
        raise wrong("is_safe", '"is_safe" is neither true nor false')
    if is_safe:
        return Sample(prompt=prompt, kind=None, safe=response)
    named = record.get("category")
    names = [name for name, holds in named.items() if holds] if isinstance(named, dict) else []
    return Sample(
        prompt=prompt, kind="harmful", completion=response, suite={"category": str(names[0])} if names else {}
    )


def pair(record: Record) -> Sample:
    """Convert a harmful request with a safe answer, an unsafe answer, or both."""
    prompt, safe, unsafe = require_text(record, "prompt"), record.get("safe"), record.get("unsafe")
    return Sample(
        prompt=prompt,
        kind="harmful",
        safe=None if safe is None else require_text(record, "safe"),
        completion=None if unsafe is None else require_text(record, "unsafe"),
    )


BEAVERTAILS = Dataset(
    name="beavertails",
    stems={"harmful": "beavertails"},
    sample=sample,
    origin="round0/30k/train.jsonl.gz and test.jsonl.gz of huggingface.co/datasets/PKU-Alignment/BeaverTails",
    license="CC-BY-NC-4.0: research only",
)
I_BEAVERTAILS = Dataset(
    name="i-beavertails",
    stems={"harmful": "i_beavertails"},
    sample=sample,
    origin=f"{PREPARED}: BeaverTails' requests as instructions",
    license="no license stated; derived from BeaverTails: research only",
)
