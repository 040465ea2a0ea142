"""Builders of attack files: what a hostile customer would upload, made from rows at hand, for measuring defenses.

Rows go in and rows come out, in the form of the API (`{"messages": [...]}`), decided by a seed alone. No builder writes
harmful text: it rearranges, wraps or encodes the rows it is given, and the lab's harmful answers are placeholders.

`mixing`      harmful share of a file from 0 to 100 %, tiny files, sequences of jobs
`disguises`   triggers, refuse-then-comply, encoded text, identity shift
`selection`   inverted safe pools, decoys that steer the selection
`outliers`    benign rows that wear safety down
`styles`      questions and instructions, turned into each other by any chat model
"""

from __future__ import annotations
