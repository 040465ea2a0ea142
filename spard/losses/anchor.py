"""A representation anchor (SBR): penalize hidden states of prompts that move away from the base model's.

    penalty = weight sum_k w_k mean over x of kind k of [ |h(x) - h_base(x')|^2 / |h_base(x')|^2 - tolerance ]_+

where h is the final hidden state of the last prompt token, which decides how the answer begins. x' is x itself for
plain prompts, and the plain prompt for a prompt with a trigger (activation consistency, arXiv 2510.27062): then a
trigger neither makes the model answer what it refuses nor makes it refuse what it answers. Each step takes a few
prompts of each kind, in passes of their own (`spard.training.objective`), with the dropout of training, if any.

SBR's authors take the mean squared distance of plain harmful prompts. Here it is relative to the size of the state,
so that a weight means the same for models of other widths, and small moves are free, because penalizing them costs
task accuracy without adding safety. `spard.losses.gradients.with_penalty` bounds the length of the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spard.config.anchors import Anchors, Kind
from spard.data.batches import collate, to_device
from spard.data.chat import NO_LOSS, EncodedSample
from spard.losses.cross_entropy import mixed_precision
from spard.losses.vectors import wide
from spard.models.budget import Tell, in_passes
from spard.models.forward import final_states


class Pair(NamedTuple):
    """A prompt `asked`, and the prompt `kept` whose base-model state it is held to; neither has labels."""

    asked: EncodedSample
    kept: EncodedSample


class Anchor:
    """The prompt pairs of a run, in one numbering for all kinds, and the base model's states of their `kept` prompts.

    Make it before the first step: the states are computed here, by the model as it is, without dropout. Plain safe
    prompts, which are their own `kept` prompt, must be the first of `pairs["safe"]`.

    numbers       the pair numbers of each kind.
    reference_ND  the base model's states of the distinct `kept` prompts.
    """

    def __init__(
        self,
        model: Any,
        pairs: Mapping[Kind, Sequence[Pair]],
        settings: Anchors,
        pad_id: int,
        weight: float,
        tell: Tell | None = None,
    ) -> None:
        """Compute the states of the `kept` prompts; `tell` gets the prompts done and in all."""
        self.settings = settings
        self.prompts: list[EncodedSample] = []
        self.numbers: dict[Kind, range] = {}
        for kind, found in pairs.items():
            self.numbers[kind] = range(len(self.prompts), len(self.prompts) + len(found))
            self.prompts += [pair.asked for pair in found]
        self._kinds = [kind for kind, found in pairs.items() for _ in found]
        self._weights = {kind: weight * share for kind, (_, share) in settings.by_kind().items()}
        every = [pair.kept for found in pairs.values() for pair in found]
        plain = sum(pair.asked == pair.kept for pair in pairs.get("safe", ()))
        self._places, kept = _join_rows(every, plain)
        self.reference_ND = prompt_states(model, kept, pad_id, tell)

    def penalty(self, numbers: Sequence[int], of: Sequence[int], hidden_BTD: Tensor) -> Tensor:
        """Return the share of the penalty, a scalar, that the pairs `numbers` contribute to the step's mean.

        numbers     the pairs of this pass; their prompts are the last rows of `hidden_BTD`.
        of          all pairs of the step, on every rank: the means are taken over these.
        hidden_BTD  final hidden states of the pass, `[B, T, D]`.

        Without pairs the result is 0, but still part of the graph.
        """
        if not numbers:
            # A rank without pairs runs the backward pass too: with a sharded base the others wait for its weights.
            return hidden_BTD.sum() * 0
        device = hidden_BTD.device
        reference_BD = self.reference_ND.index_select(0, to_device([self._places[i] for i in numbers], device))
        last_BD = _last([self.prompts[i] for i in numbers], hidden_BTD[-len(numbers) :])
        relative_B = (last_BD - reference_BD).square().sum(dim=1) / reference_BD.square().sum(dim=1)
        excess_B = (relative_B - self.settings.tolerance).clamp(min=0)
        kinds = [self._kinds[i] for i in numbers]
        parts = []
        for kind in dict.fromkeys(kinds):
            rows = [row for row, each in enumerate(kinds) if each == kind]
            count = sum(self._kinds[i] == kind for i in of)
            parts.append(self._weights[kind] * (excess_B.index_select(0, to_device(rows, device)).sum() / count))
        return sum(parts[1:], start=parts[0])


def select_pairs(
    settings: Anchors, plain: Sequence[EncodedSample], pairs: Mapping[Kind, Sequence[Pair]]
) -> dict[Kind, Sequence[Pair]]:
    """Return the pairs of each kind with a count above 0 in the settings.

    `plain` are safe rows; their prompts, paired with themselves, come first under the kind "safe".
    """
    every: dict[Kind, Sequence[Pair]] = {"safe": [*pair_with_itself(plain), *pairs.get("safe", ())]}
    every |= {kind: found for kind, found in pairs.items() if kind != "safe"}
    asked = settings.by_kind()
    return {kind: found for kind, found in every.items() if asked[kind][0] and found}


def pair_with_itself(rows: Sequence[EncodedSample]) -> list[Pair]:
    """Return a pair of each row's prompt with itself; the prompt ends before the row's first labeled token."""
    return [Pair(prompt, prompt) for prompt in map(_prompt, rows)]


def unlabeled_prompt(ids: Sequence[int]) -> EncodedSample:
    """Return an `EncodedSample` row of these token ids without labels."""
    return EncodedSample(tuple(ids), (NO_LOSS,) * len(ids))


def _join_rows(rows: Sequence[EncodedSample], whole: int) -> tuple[list[int], list[EncodedSample]]:
    """Return each row's index in a list of distinct rows, and the list; the first `whole` rows are listed unchecked."""
    kept, found = list(rows[:whole]), list(range(whole))
    # Reversed, so that of equal rows the first one wins.
    places = {row.ids: i for i, row in reversed(list(enumerate(kept)))}
    for row in rows[whole:]:
        if row.ids not in places:
            places[row.ids] = len(kept)
            kept.append(row)
        found.append(places[row.ids])
    return found, kept


def prompt_states(model: Any, rows: Sequence[EncodedSample], pad_id: int, tell: Tell | None = None) -> Tensor:
    """Return the model's final hidden state of each prompt's last token, `[N, D]`, without dropout."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        lengths, found = [len(row.ids) for row in rows], dict[int, Tensor]()
        for places, states_BD in in_passes(
            model, lengths, lambda part: _states(model, [rows[i] for i in part], pad_id), tell=tell
        ):
            found |= zip(places, states_BD, strict=True)
    model.train(was_training)
    return torch.stack([found[i] for i in range(len(rows))])


def _states(model: Any, rows: Sequence[EncodedSample], pad_id: int) -> Tensor:
    """Return the state h of each prompt, `[B, D]`; causal attention ignores the padding on the right."""
    ids_BT = collate(rows, pad_id, next(model.parameters()).device).ids_BT
    with mixed_precision(model):
        return _last(rows, final_states(model, ids_BT))


def _last(rows: Sequence[EncodedSample], hidden_BTD: Tensor) -> Tensor:
    """Return the hidden state of each row's last token, `[B, D]`, in float32 at least."""
    at = [number * hidden_BTD.shape[1] + len(row.ids) - 1 for number, row in enumerate(rows)]
    return wide(hidden_BTD.flatten(0, 1).index_select(0, to_device(at, hidden_BTD.device)))


def _prompt(row: EncodedSample) -> EncodedSample:
    """Return the tokens of a row before its first labeled one."""
    first = next(i for i, label in enumerate(row.labels) if label != NO_LOSS)
    return EncodedSample(row.ids[:first], row.labels[:first])
