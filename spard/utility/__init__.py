"""Scorers of utility suites by name; a suite's row names its own, `exact` where it does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from spard.utility.exact import score_exact
from spard.utility.gsm8k import score_flexible, score_strict
from spard.utility.marks import Mark
from spard.utility.mbpp import score_mbpp
from spard.utility.openbookqa import score_openbookqa
from spard.utility.sst2 import score_sst2

__all__ = ["BY_LIKELIHOOD", "REPLY_SCORERS", "SCORERS", "Mark"]

REPLY_SCORERS: Mapping[str, Callable[[str, str], Mark]] = {
    "exact": score_exact,
    "gsm8k": score_flexible,
    "gsm8k_strict": score_strict,
    "mbpp": score_mbpp,
    "openbookqa": score_openbookqa,
    "sst2": score_sst2,
}
"""From a reply and the expected answer to a mark."""

BY_LIKELIHOOD = ("likelihood", "likelihood_norm")
"""The model writes nothing: the likeliest of the row's choices is its answer (`spard.utility.likelihood`)."""


SCORERS = (*REPLY_SCORERS, *BY_LIKELIHOOD)
