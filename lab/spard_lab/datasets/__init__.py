"""Data sets as their authors publish them, converted into training files, pools and suites of this project's form.

Each data set is a `Dataset` in `harmful` or `tasks`, and one line in `DATASETS`; other packages add theirs through the
entry-point group `spard.datasets`. No data is shipped: `spard convert` reads files that its user has.
"""

from __future__ import annotations

from spard.config.extensions import Registry

_HERE = "spard_lab.datasets"

DATASETS = Registry(
    "spard.datasets",
    "data set",
    {
        "gsm8k": f"{_HERE}.tasks:GSM8K",
        "openbookqa": f"{_HERE}.tasks:OPENBOOKQA",
        "sst2": f"{_HERE}.tasks:SST2",
        "mbpp": f"{_HERE}.tasks:MBPP",
        "beavertails": f"{_HERE}.harmful:BEAVERTAILS",
        "i-beavertails": f"{_HERE}.harmful:I_BEAVERTAILS",
        "lat": f"{_HERE}.harmful:LAT",
        "q-lat": f"{_HERE}.harmful:Q_LAT",
        "harmbench": f"{_HERE}.harmful:HARMBENCH",
        "xstest": f"{_HERE}.harmful:XSTEST",
    },
)
