"""`spard bench adversary`: whole attacks against whole jobs, scored by what the gate releases and what it then does.

`campaign`  runs the jobs of one attack through the pipeline and the gate
`asking`    asks the model that comes out, in the attack's own way, and knows the truth about its replies
`seeds`     seeds that nobody could choose settings on
`rounds`    which attack on which arm and seed; done once and kept
`scores`    the tables: who wins, what is released
`customers` what each honest customer pays, beside the undefended run
`signing`   a result that says who measured it
`hours`     how long that will take, told before it starts
`joined`    the results of several labs and sizes as one page
`strangers` whose code it was measured with
"""

from __future__ import annotations
