"""Check that vLLM computes the same model as transformers, by the first tokens of a few prompts.

The distance of two distributions is the largest difference of a likely token's log-probability, in nats. The adapter's
effect on a prompt is the distance of transformers with and without the adapter; the prompts with the largest effects
are used. The checks: vLLM must be within the tolerance of transformers, with the adapter and without it. For each
effect above the tolerance, vLLM with the adapter must be nearer than half of the effect to transformers with the
adapter, and the adapter's effect in vLLM must be more than half of its effect in transformers. An engine that ignores
the adapter, or loads another one, cannot pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch

from spard.evaluation.audit import sample
from spard.evaluation.vllm_offline.process import EngineFailed, Likely
from spard.models.base import disable_adapters
from spard.models.peft import PeftModel
from spard.models.sharding import inference

PROMPTS = 8
TOP = 20  # likeliest tokens per prompt; vLLM's default limit
_CANDIDATES = 64
_COMPARED = 5  # likeliest tokens of each side that are compared
_TOLERANCE = {torch.float32: 0.02}  # nats
_ROUNDED = 0.25  # nats, for a model that computes in 16 bits

Row = Sequence[int]


@dataclass(frozen=True, slots=True)
class Answers:
    """The likeliest first tokens of each prompt: of the base model and, if there is one, of the adapter."""

    base: Sequence[Likely]
    adapter: Sequence[Likely] | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of a probe, in nats: distance of vLLM to transformers, and of the adapter to the base model."""

    prompts: int
    tolerance: float
    difference: float
    to_base: float | None = None


def choose_prompts(model: Any, rows: Sequence[Row]) -> tuple[list[Row], Answers]:
    """Return the prompts for the probe, and the first tokens of transformers for them."""
    some = sample(rows, _CANDIDATES if isinstance(model, PeftModel) else PROMPTS)
    if not isinstance(model, PeftModel):
        return some, Answers(first_tokens(model, some))
    adapter = first_tokens(model, some)
    with disable_adapters(model):
        base = first_tokens(model, some)
    changed = [distance(*each) for each in zip(adapter, base, strict=True)]
    first = sorted(range(len(some)), key=lambda i: -changed[i])[:PROMPTS]
    return [some[i] for i in first], Answers([base[i] for i in first], [adapter[i] for i in first])


def first_tokens(model: Any, rows: Sequence[Row]) -> list[Likely]:
    """Return the `TOP` likeliest tokens after each row with their log-probabilities, by transformers."""
    was_training, found = model.training, list[Likely]()
    model.eval()
    for row in rows:
        with inference(model):
            logits_V = model(input_ids=torch.tensor([list(row)], device=model.device), logits_to_keep=1).logits[0, -1]
            top = logits_V.float().log_softmax(dim=-1).topk(min(TOP, len(logits_V)))
        found.append(dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
    model.train(was_training)
    return found


def dtype_tolerance(dtype: torch.dtype) -> float:
    """Return the allowed distance between vLLM and transformers, in nats, for weights of this dtype."""
    return _TOLERANCE.get(dtype, _ROUNDED)


def compare_answers(found: Answers, expected: Answers, tolerance: float) -> Probe:
    """Return the result of the probe; raise `EngineFailed` unless vLLM agrees with transformers.

    found      first tokens of vLLM.
    expected   first tokens of transformers, for the same prompts.
    tolerance  allowed distance, in nats.
    """
    told = [*found.base, *(found.adapter or ())]
    if not all(len(each) >= _COMPARED and all(map(isfinite, each.values())) for each in told):
        raise EngineFailed("vLLM returned too few log probabilities of its first tokens")
    far = max(distance(*each) for each in zip(found.base, expected.base, strict=True))
    _check_distance(far, tolerance, "the base model's")
    if expected.adapter is None or found.adapter is None:
        return Probe(len(expected.base), tolerance, far)
    cases = zip(found.adapter, expected.adapter, found.base, expected.base, strict=True)
    near, own, wanted = zip(*(_distances(*each) for each in cases), strict=True)
    _check_distance(max(near), tolerance, "the adapter's")
    if not max(wanted) > 0:
        raise EngineFailed("the adapter changes no first token by which vLLM could be checked")
    for i, change in enumerate(wanted):
        # Where the adapter changes less than the tolerance, agreement would prove nothing; the largest change always
        # decides.
        decides = change > tolerance or change == max(wanted)
        if decides and not (near[i] < change / 2 and own[i] > change / 2):
            moves = f"the adapter moves vLLM's first tokens by {own[i]:.2g} nats, and transformers' by {change:.2g}"
            raise EngineFailed(f"{moves}, with {near[i]:.2g} between them")
    return Probe(len(expected.base), tolerance, max(far, *near), max(wanted))


def distance(a: Likely, b: Likely, *others: Likely) -> float:
    """Return the largest difference of a likely token's log-probability, in nats.

    Tokens that are likely in `others` count too. A missing token is at most as likely as the last one that is present.
    """
    every = (a, b, *others)
    tokens = {token for each in every for token in sorted(each, key=lambda token: -each[token])[:_COMPARED]}
    floor = max(min(each.values()) for each in every)
    return max(abs(max(a.get(each, floor), floor) - max(b.get(each, floor), floor)) for each in tokens)


def _distances(own: Likely, expected: Likely, own_base: Likely, base: Likely) -> tuple[float, float, float]:
    """Return three distances: vLLM to transformers, and adapter to base model in vLLM and in transformers."""
    every = (own, expected, own_base, base)
    return distance(own, expected, *every), distance(own, own_base, *every), distance(expected, base, *every)


def _check_distance(far: float, tolerance: float, whose: str) -> None:
    if not far <= tolerance:
        raise EngineFailed(f"vLLM's first tokens are {far:.2g} nats away from {whose}, and {tolerance:g} are allowed")
