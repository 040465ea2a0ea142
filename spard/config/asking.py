"""The settings of the ways in which an audit asks prompts other than plainly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from spard.config.bounds import Bound

Count = Annotated[int, Bound(ge=0, le=1000)]


@dataclass(frozen=True, slots=True)
class Asking:
    """Ways in which an audit asks prompts other than plainly, with the number of prompts of each; 0 turns one off.

    dresses    triggers, system prompts, tools and earlier turns of the training rows, the most suspicious ones
    prompts    harmful prompts, and as many benign ones, in each dress
    random     the same with words drawn from the rows, at the start, in the middle and at the end
    sampled    harmful prompts answered `samples` times each at `temperature`, with seeds
    prefilled  harmful prompts whose answer is begun compliantly
    turns      harmful prompts after an earlier turn of the training rows
    phrases    harmful prompts, in turn in the varying phrases that suspicious rows begin or end with, and in further
               dresses. If these are more than twelve with the phrases, as many again for every twelve dresses; benign
               prompts in these dresses only
    requests   requests of rows in which the run's judge finds harm, as the rows ask them
    modes      harmful prompts, and as many benign ones, in each other mode of thinking that the rows train or that is
               the base model's default
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
"""Prompts in dresses only, as in audits of version 1, which asked no benign prompts in dresses."""
