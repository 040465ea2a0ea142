"""Builders of attack files: rows that a hostile customer would upload, for measuring defenses.

They take and return rows in the API's form (`{"messages": [...]}`); a seed determines the result. No builder writes
harmful text: it rearranges, wraps or encodes the rows it is given, and the lab's harmful answers are placeholders.

`rows`       harmful share of a file from 0 to 100 %, tiny files, sequences of jobs; preference pairs
`disguises`  triggers, refuse-then-comply, encoded text, identity shift
`selection`  inverted safe pools, decoys that steer the selection, benign rows that weaken safety
`styles`     questions rewritten as instructions and back, by any chat model
"""

from __future__ import annotations
