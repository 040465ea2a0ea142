"""The attacker inside: whole attacks on a fine-tuning service, each in one file, written with our source at hand.

`base`     what an attack is: what it needs of a lab, the jobs that it sends, and how its model is asked afterward
`attacks`  the attacks, found by themselves; `registry` adds those of other packages (`spard.adversary_attacks`)
`arena`    what a lab gives to attack and to measure with; `lab` is the small one

An attack knows everything but the seed: its words and rows are drawn from that. `spard_lab.bench.adversary` runs
and scores it. No attack holds harm: requests and answers are the lab's placeholders.
"""

from __future__ import annotations
