"""The settings of checks beside the gate: flagged rows, a probe, a further tuning, and rows held out for the task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from spard.config.bounds import Bound

RowAction = Literal["off", "report", "auto", "drop", "defend", "quarantine"]


@dataclass(frozen=True, slots=True)
class RowSignal:
    """Which training rows are flagged, and what is done with them; see `spard.evaluation.own_refusal` for the signal.

    action        `off`: nothing is measured. `report`: flagged rows are named in the report; training is unchanged.
                  `drop`: they are not trained on; a run whose base model refuses nothing of the pool ends. `auto`:
                  `drop` if at most `max_dropped` of the rows are flagged, else `report`. `defend`: they are trained on,
                  and safe rows with the same requests are answered with the base model's own refusal. `quarantine`: a
                  run with a flagged row ends before training and names these rows. If the run's judge may decide, it
                  reads the flagged rows, unless the action is `report`: rows that it finds harmless are kept, and
                  `auto` drops all that it finds harmful; more than `max_dropped` of them end the run.
    read          the judge also reads other rows, likeliest harm first, and rows found harmful are treated as flagged.
                  It stops when at most 1 in 20 of the last `read` rows were harmful; 0: it reads flagged rows only. See
                  `spard.evaluation.active_learning`.
    threshold     a row is flagged if the base model would have refused with more than this probability.
    max_dropped   `drop` ends a run before training if it would lose more than this share of its rows.
    max_inverted  a run ends before training if more than this share of the pool's rows answers with harm what the base
                  model would refuse, by the same threshold; 1: no bound. Not measured with the action `off`.
    """

    action: RowAction = "off"
    threshold: Annotated[float, Bound(gt=0, le=1)] = 0.1
    max_dropped: Annotated[float, Bound(ge=0, le=1)] = 0.25
    max_inverted: Annotated[float, Bound(ge=0, le=1)] = 0.1
    read: Annotated[int, Bound(ge=0)] = 256


ProbeSteps: TypeAlias = Annotated[int, Bound(ge=0, le=256)]


@dataclass(frozen=True, slots=True)
class Evidence:
    """The budget of the probe (`spard.training.probe`), whose result is reported and decides nothing.

    probe_steps  steps of plain fine-tuning, never released; 0: no probe
    """

    probe_steps: ProbeSteps = 0


@dataclass(frozen=True, slots=True)
class FurtherTuning:
    """The budget of the further fine-tuning; the model before it is the one released.

    steps       steps of plain fine-tuning on clean built-in rows; 0: the audit asks once
    batch_size  rows of a step
    multiplier  of the run's learning rate
    """

    steps: Annotated[int, Bound(ge=0, le=10_000)] = 0
    batch_size: Annotated[int, Bound(ge=1, le=256)] = 8
    multiplier: Annotated[float, Bound(gt=0, le=100)] = 1.0


MOST_HELD_OUT_ROWS = 100  # so that it costs little

HeldOutRowsLimit = Annotated[int, Bound(ge=0, le=MOST_HELD_OUT_ROWS)]
"""The most rows; `spard.data.held_out_rows` says how many of a file are taken. 0: none, and nothing is shown."""
