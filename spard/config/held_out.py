"""How many rows of a training file are held out to show on them whether the task is learned."""

from __future__ import annotations

from typing import Annotated

from spard.config.bounds import Bound

MOST_HELD_OUT_ROWS = 100  # so that it costs little

HeldOutRowsLimit = Annotated[int, Bound(ge=0, le=MOST_HELD_OUT_ROWS)]
"""The most rows; `spard.data.held_out_rows` says how many of a file are taken. 0: none, and nothing is shown."""
