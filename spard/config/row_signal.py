"""What is done with training rows that answer what the base model would refuse, told by the base model itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from spard.config.bounds import Bound

RowAction = Literal["off", "report", "auto", "drop", "defend", "quarantine"]


@dataclass(frozen=True, slots=True)
class RowSignal:
    """Which rows are flagged, and what becomes of them; see `spard.evaluation.own_refusal` for the signal.

    action        `off`: nothing is measured. `report`: flagged rows are named in the report, and training is the same.
                  `drop`: they are not trained on; a run whose base model refuses nothing of the pool ends. `auto`:
                  `drop` where at most `max_dropped` of the rows are flagged, else `report`. `defend`: they are trained
                  on, and safe rows ask the same and answer with the base model's own refusal. `quarantine`: a run with
                  a flagged row ends before it trains and names them. Where the run's judge may decide, it reads the
                  flagged rows, unless they are only reported: nothing is done to those that it finds harmless, and
                  `auto` drops all that it finds harmful; more than `max_dropped` of them end the run.
    read          that judge reads other rows too, those likeliest to be harm first, and what it finds harmful is acted
                  on as if it were flagged. It stops where at most 1 in 20 of the last so many were; 0: it reads the
                  flagged rows alone. See `spard.evaluation.active_learning`.
    threshold     a row is flagged above this probability that the base model would have refused instead.
    max_dropped   `drop` ends a run before it trains that would lose more than this share of its rows.
    max_inverted  a run ends before it trains if more than this share of the pool's rows answers with harm what the
                  base model would refuse, by the same threshold; 1 is no bound. The action `off` does not look.
    """

    action: RowAction = "off"
    threshold: Annotated[float, Bound(gt=0, le=1)] = 0.1
    max_dropped: Annotated[float, Bound(ge=0, le=1)] = 0.25
    max_inverted: Annotated[float, Bound(ge=0, le=1)] = 0.1
    read: Annotated[int, Bound(ge=0)] = 256
