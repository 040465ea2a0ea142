"""LAT's harmful requests (Sheshadri et al., 2024): `{"prompt", "chosen", "rejected"}`, a refusal and a harmful answer.

Q-LAT, the same requests as questions, is read in the prepared form of `spard_lab.datasets.beavertails`.
"""

from __future__ import annotations

from spard_lab.datasets.base import Dataset, Record, Sample, require_text
from spard_lab.datasets.beavertails import PREPARED, pair


def sample(record: Record) -> Sample:
    """Convert a request with both answers, or a prepared row."""
    if "chosen" not in record and record.keys() & {"safe", "unsafe"}:
        return pair(record)
    prompt, safe, harmful = (require_text(record, key) for key in ("prompt", "chosen", "rejected"))
    return Sample(prompt=prompt, kind="harmful", safe=safe, completion=harmful)


LAT = Dataset(
    name="lat",
    stems={"harmful": "lat"},
    sample=sample,
    origin="the training split of huggingface.co/datasets/LLM-LAT/harmful-dataset",
    license="no license that could be found: treat as research only",
)
Q_LAT = Dataset(
    name="q-lat",
    stems={"harmful": "q_lat"},
    sample=sample,
    origin=f"{PREPARED}: LAT's requests as questions",
    license="no license stated; derived from LAT's requests: research only",
)
