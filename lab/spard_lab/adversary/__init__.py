"""Whole attacks on a fine-tuning service, by an attacker who knows this source code.

`base`     the types of an attack (the abilities it needs of a lab, its jobs, and how it asks the trained model), and
           the interface of a lab that can be attacked; finds all attacks by name
`attacks`  the attacks of this package; others are registered by their packages (`spard.adversary_attacks`)
`lab`      the small lab as an arena, and what a copy of a lab's base model replies that the attacker trains and asks
`natural`  the lab of natural English as an arena

The attacker knows everything but the seed, from which words and rows are drawn. `spard_lab.bench.adversary` runs and
scores the attacks. No attack contains harmful text: requests and answers are the lab's placeholders.
"""

from __future__ import annotations
