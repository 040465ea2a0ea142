"""`spard bench adversary`: whole attacks against whole jobs, scored by the gate's decision and the model's behavior.

`campaign`   runs the jobs of one attack through the pipeline and the gate
`asking`     asks the final model as the attacker does, and counts harm by the lab's truth
`arenas`     opens the lab of a recipe
`rounds`     plays each attack on each arm and seed once, and stores the result
`scores`     the tables: wins, releases, and the cost for each honest customer, compared with the undefended run
`parts`      the table of parts, on whole jobs
`hours`      estimates the hours before the start
`joined`     joins the results of several labs and sizes into one page
`provenance` hidden seeds, on which nobody could choose settings; digests of others' code; signatures of results
`plots`      the figures
"""

from __future__ import annotations
