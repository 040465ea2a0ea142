"""The bench: the paper's tables and figures, on the user's own model or on the lab's tiny one.

`source`      the inputs of a bench: model, training rows, attacks, pools and suites, for each seed
`methods`     names of methods and settings, as changes to a recipe
`cells`       the runs of a table; `measure` does one, `store` keeps it, `bench` does the missing ones
`report`      results.csv, results.json, tables as Markdown, figures, and one HTML file of both
"""

from __future__ import annotations
