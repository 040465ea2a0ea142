"""The bench: the paper's tables and figures, on a model of one's own or on the lab's tiny one.

`source`      what is measured on: model, training rows, attacks, pools and suites, a set for each seed
`methods`     names of methods and settings, as changes to a recipe
`cells`       the runs that a table consists of; `measure` does one, `store` keeps it, `bench` does those not yet done
`report`      results.csv, results.json, tables as Markdown; `page` writes these, figures, and one HTML file of both
"""

from __future__ import annotations
