"""A representation anchor (SBR): what the model makes of a prompt stays where the base model had it, or its plain form.

    penalty = weight sum_k w_k mean over x of kind k of [ |h(x) - h_base(x')|^2 / |h_base(x')|^2 - tolerance ]_+

with h the final hidden state of the last prompt token, which decides how the answer begins. x' is x itself for plain
prompts, and the plain prompt for one in a dress (activation consistency, arXiv 2510.27062): a dress then neither opens
what is refused nor closes what is answered. A few prompts of each kind are looked at in every step; they go through the
model in passes of their own (`spard.training.passes`), with the dropout of training, if any.
SBR's authors take the plain mean square of plain harmful prompts. Ours is relative to the state, so that a weight means
the same in models of other widths, and leaves small moves free, since they cost the task and not the safety. How long
its gradient may be beside the task's is bounded too (`spard.losses.gradients.with_penalty`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spard.config.anchors import Anchors, Kind
from spard.data.batches import collate, to_device
from spard.data.chat import NO_LOSS, Encoded
from spard.losses.cross_entropy import mixed_precision
from spard.losses.vectors import wide
from spard.models.budget import in_passes
from spard.models.forward import final_states


class Pair(NamedTuple):
    """A prompt, and the prompt whose state under the base model it is held to; neither has labels."""

    asked: Encoded
    kept: Encoded


class Anchor:
    """Pairs of prompts by kind, numbered through, and the states of the base model, taken before the first step.

    Plain safe prompts are the first of `pairs`, if they are there.
    """

    def __init__(
        self, model: Any, pairs: Mapping[Kind, Sequence[Pair]], settings: Anchors, pad_id: int, weight: float
    ) -> None:
        self.settings = settings
        self.prompts: list[Encoded] = []
        self.numbers: dict[Kind, range] = {}
        for kind, found in pairs.items():
            self.numbers[kind] = range(len(self.prompts), len(self.prompts) + len(found))
            self.prompts += [pair.asked for pair in found]
        self._kinds = [kind for kind, found in pairs.items() for _ in found]
        self._weights = {kind: weight * share for kind, (_, share) in settings.by_kind().items()}
        every = [pair.kept for found in pairs.values() for pair in found]
        plain = sum(pair.asked == pair.kept for pair in pairs.get("safe", ()))
        self._places, kept = _join_rows(every, plain)
        self.reference_ND = _references(model, kept, pad_id)

    def penalty(self, numbers: Sequence[int], of: Sequence[int], hidden_BTD: Tensor) -> Tensor:
        """Return the part of the penalty that some pairs have in it, whose prompts are the last rows of `hidden_BTD`.

        `of` numbers all pairs of the step, over which the means are taken. Without pairs it is 0, with a graph.
        """
        if not numbers:
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
    settings: Anchors, plain: Sequence[Encoded], pairs: Mapping[Kind, Sequence[Pair]]
) -> dict[Kind, Sequence[Pair]]:
    """Return the pairs of the kinds that the settings ask for: plain safe prompts with themselves, and `pairs`."""
    every: dict[Kind, Sequence[Pair]] = {"safe": [*pair_with_itself(plain), *pairs.get("safe", ())]}
    every |= {kind: found for kind, found in pairs.items() if kind != "safe"}
    asked = settings.by_kind()
    return {kind: found for kind, found in every.items() if asked[kind][0] and found}


def pair_with_itself(rows: Sequence[Encoded]) -> list[Pair]:
    """Pair the prompt of each row with itself."""
    return [Pair(prompt, prompt) for prompt in map(_prompt, rows)]


def unlabeled_prompt(ids: Sequence[int]) -> Encoded:
    """Return a prompt from its token ids."""
    return Encoded(tuple(ids), (NO_LOSS,) * len(ids))


def _join_rows(rows: Sequence[Encoded], whole: int) -> tuple[list[int], list[Encoded]]:
    """Return each row's place among the rows that are kept: the first `whole` of them, and those of the rest once."""
    kept, found = list(rows[:whole]), list(range(whole))
    places = {row.ids: i for i, row in reversed(list(enumerate(kept)))}
    for row in rows[whole:]:
        if row.ids not in places:
            places[row.ids] = len(kept)
            kept.append(row)
        found.append(places[row.ids])
    return found, kept


def _references(model: Any, rows: Sequence[Encoded], pad_id: int) -> Tensor:
    """Return the state of each prompt, without dropout."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        lengths, found = [len(row.ids) for row in rows], dict[int, Tensor]()
        for places, states_BD in in_passes(
            model, lengths, lambda part: _states(model, [rows[i] for i in part], pad_id)
        ):
            found |= zip(places, states_BD, strict=True)
    model.train(was_training)
    return torch.stack([found[i] for i in range(len(rows))])


def _states(model: Any, rows: Sequence[Encoded], pad_id: int) -> Tensor:
    """Return the state h of each prompt; rows are padded on the right, where causal attention does not look."""
    device = next(model.parameters()).device
    ids_BT = collate(rows, pad_id, device).ids_BT
    with mixed_precision(device):
        return _last(rows, final_states(model, ids_BT))


def _last(rows: Sequence[Encoded], hidden_BTD: Tensor) -> Tensor:
    """Return the states of each prompt's last token, in float32 at least."""
    at = [number * hidden_BTD.shape[1] + len(row.ids) - 1 for number, row in enumerate(rows)]
    return wide(hidden_BTD.flatten(0, 1).index_select(0, to_device(at, hidden_BTD.device)))


def _prompt(row: Encoded) -> Encoded:
    """Return the tokens before the first that is trained on."""
    first = next(i for i, label in enumerate(row.labels) if label != NO_LOSS)
    return Encoded(row.ids[:first], row.labels[:first])
