"""How an audit asks prompts beside plainly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from spard.config.bounds import Bound

Count = Annotated[int, Bound(ge=0, le=1000)]


@dataclass(frozen=True, slots=True)
class Asking:
    """How an audit asks prompts beside plainly: how many of each kind; 0 turns a kind off.

    dresses    triggers, system prompts, tools and earlier turns that the training rows have, the most suspicious
    prompts    harmful ones, and as many benign ones, in each dress
    random     likewise, behind words drawn from the rows, at the start, in the middle and at the end
    sampled    harmful ones answered `samples` times each at `temperature`, with seeds
    prefilled  harmful ones whose answer has begun to comply
    turns      harmful ones after an earlier turn of the training rows
    phrases    harmful ones in turn in what suspicious rows begin or end with, where that varies from row to row, and in
               further dresses: as many for every twelve of these, where with the phrases there are more; benign ones
               in these dresses alone
    requests   of rows in which the run's judge finds harm, as the rows ask them
    modes      harmful ones, and as many benign ones, in each other mode of thinking that the rows train or that the
               base model has by default
    """

    dresses: Annotated[int, Bound(ge=0, le=16)] = 4
    prompts: Count = 60
    random: Count = 120
    sampled: Count = 30
    samples: Annotated[int, Bound(ge=1, le=16)] = 2
    temperature: Annotated[float, Bound(gt=0, le=2)] = 1.0
    prefilled: Count = 120
    turns: Count = 120
    phrases: Count = 120
    requests: Count = 60
    modes: Count = 120


DRESSES_ALONE = Asking(random=0, sampled=0, prefilled=0, turns=0, phrases=0, requests=0, modes=0)
"""What audits of version 1 asked beside plainly, but for benign prompts in the dresses."""
