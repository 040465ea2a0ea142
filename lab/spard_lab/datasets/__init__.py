"""Data sets as their authors publish them, converted into training files, pools and suites of this project's form.

Each data set is one module here and one line in `DATASETS`; other packages add theirs through the entry-point group
`spard.datasets`. No data is shipped: `spard convert` reads files that its user has.
"""

from __future__ import annotations

from spard.config.extensions import Registry

_HERE = "spard_lab.datasets"

DATASETS = Registry(
    "spard.datasets",
    "data set",
    {
        "gsm8k": f"{_HERE}.gsm8k:GSM8K",
        "openbookqa": f"{_HERE}.openbookqa:OPENBOOKQA",
        "sst2": f"{_HERE}.sst2:SST2",
        "mbpp": f"{_HERE}.mbpp:MBPP",
        "beavertails": f"{_HERE}.beavertails:BEAVERTAILS",
        "i-beavertails": f"{_HERE}.beavertails:I_BEAVERTAILS",
        "lat": f"{_HERE}.lat:LAT",
        "q-lat": f"{_HERE}.lat:Q_LAT",
        "harmbench": f"{_HERE}.harmbench:HARMBENCH",
        "xstest": f"{_HERE}.xstest:XSTEST",
    },
)
