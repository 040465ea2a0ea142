"""The defense's parts for a foreign training loop: safe rows, plain and disguised, their losses, and the anchor.

They are the parts of our own training loop (`spard.training`): rows rendered with the model's chat template, their
variants in the disguises of the customer's rows (`spard.pipeline.augment`), the constrained losses, and the
representation anchor (`spard.losses.anchor`), whose gradient is added before each optimizer step. The anchor is on safe
and benign prompts, plain and disguised (`spard.pipeline.anchors`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor

from spard.config import PLAIN, Anchors, Spard
from spard.data.batches import collate
from spard.data.chat import encode_all, set_plain_template
from spard.data.rows import Example
from spard.errors import InvalidData, InvalidRecipe
from spard.losses.anchor import Anchor, select_pairs
from spard.losses.cross_entropy import evaluate, mixed_precision
from spard.losses.gradients import Loss, gradient, safe_excess, safe_losses
from spard.losses.relative import base_losses
from spard.losses.vectors import Vector, add_, norm, shorten_
from spard.methods.spag import base_tau
from spard.models.forward import final_states
from spard.models.lora import dropping_modules
from spard.models.peft import PeftModel
from spard.pipeline.anchors import begin_replies, make_anchor_pairs
from spard.pipeline.augment import variants
from spard.training.objective import anchor_pairs, safe_rows

ANCHORS = replace(Anchors(), max_gradient_ratio=1.0)  # twice a job's, which also has row signal and gate
_EARLIER = replace(PLAIN, max_gradient_ratio=ANCHORS.max_gradient_ratio)  # the anchor before disguised prompts
_ANY_LENGTH = 2**31
_BASE, _ANCHOR = "base_losses", "anchor"


class Place(TypedDict):
    """A position in the random schedules, the number of anchored prompts, and the begun answers.

    Checkpoints of earlier versions lack the last two.
    """

    drawn: int
    anchored: int
    pairs: NotRequired[int | None]
    replies: NotRequired[list[str] | None]


class SafeRows:
    """Safe rows of a model, with the model's losses and hidden states before training: create it before the first step.

        pool = Path("pool.jsonl")
        safe = SafeRows(model, tokenizer, read_pool(pool), read_examples(Path("train.jsonl")), benign=read_benign(pool))
        optimizer = SafetyProjection(AdamW(model.parameters(), lr=1e-4), safe)

    `rows` are the training rows as conversations. Their beginnings, endings and system prompts disguise the safe rows;
    without training rows the disguises are words of the safe prompts. `benign` are harmless requests that the model
    must keep answering, disguised ones too; without them the anchor holds only safe prompts. Everything random depends
    on the seed alone.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        safe: Sequence[Example],
        rows: Sequence[Example] = (),
        defense: Spard | None = None,
        seed: int = 0,
        *,
        benign: Sequence[Example] = (),
        anchors: Anchors = ANCHORS,
    ) -> None:
        if not safe:
            raise InvalidData("there are no safe examples to train on")
        # The caller's tokenizer keeps its own chat template and rendering.
        tokenizer = copy.deepcopy(tokenizer)
        set_plain_template(tokenizer)
        self.defense, self.seed, self.pad_id = defense or Spard(), seed, tokenizer.pad_token_id
        self.model = _whole(model)
        self.plain = encode_all(tokenizer, safe, _ANY_LENGTH)
        twins = variants(tokenizer, safe, rows or safe, self.defense.augmentations, seed, self._longest())
        self.encoded = [*self.plain, *twins]
        self.drawn = self.anchored = 0
        self._dropping = dropping_modules(model)
        # Measured now, while the model is still the base model.
        self._base_N2 = base_losses(self.model, self.encoded, self.pad_id) if self.defense.bound == "excess" else None
        self._anchors, self._replies = anchors, list[str]()
        self._beside = partial(make_anchor_pairs, tokenizer, safe, benign, rows or safe, anchors, seed, self._longest())
        if self.defense.anchor and anchors.has_begun and benign:
            self._replies = begin_replies(self.model, tokenizer, benign)
        self._anchor = self._make_anchor() if self.defense.anchor else None

    def tau(self) -> dict[str, float]:
        """Return the bound on each constrained loss, in nats per token: as set, or derived from the model itself.

        With "auto" it is the model's own loss on the plain rows; for the excess, whose value is 0 now, it is a small
        tolerance.
        """
        return base_tau(self.defense, lambda: evaluate(self.model, self.plain, self.pad_id))

    def losses(self, theta: Vector) -> dict[str, Loss]:
        """Return the safe losses on the next safe batch; call it and differentiate inside `without_dropout`."""
        places = safe_rows(self.seed, self.drawn, len(self.encoded), self.defense.safe_batch_size)
        self.drawn += 1
        batch = collate([self.encoded[i] for i in places], self.pad_id, theta[0].device)
        if self._base_N2 is None:
            return safe_losses(self.model, theta, batch)
        return safe_excess(self.model, theta, batch._replace(rows=tuple(places)), self._base_N2)

    @torch.no_grad()
    def add_anchor_(self, theta: Vector) -> float:
        """Add the anchor's gradient to `.grad` before the optimizer's step, and return the penalty.

        The gradient is scaled down to at most `max_gradient_ratio` times the norm of the existing one.
        """
        if self._anchor is None:
            return 0.0
        places = anchor_pairs(self.seed, self.anchored, self._anchor.settings, self._anchor.numbers)
        self.anchored += 1
        with torch.enable_grad(), self.without_dropout():
            penalty = anchor_penalty(self._anchor, self.model, places, self.pad_id)
            found = float(penalty.detach())
            added = gradient(penalty, theta) if found > 0 else []
        if added:
            before = [torch.zeros_like(part) if part.grad is None else part.grad for part in theta]
            if (ratio := self._anchor.settings.max_gradient_ratio) is not None:
                shorten_(added, ratio * norm(before))
            add_(before, added)
            for part, summed in zip(theta, before, strict=True):
                part.grad = summed
        return found

    @contextmanager
    def without_dropout(self) -> Iterator[None]:
        """Disable dropout inside the block, and restore it afterward."""
        was = [module.training for module in self._dropping]
        for module in self._dropping:
            module.training = False
        try:
            yield
        finally:
            for module, mode in zip(self._dropping, was, strict=True):
                module.training = mode

    def tensors(self) -> dict[str, Tensor]:
        """Return the reference losses and states of the untrained model, for checkpoints."""
        kept = {_BASE: self._base_N2, _ANCHOR: self._anchor.reference_ND if self._anchor else None}
        return {name: tensor for name, tensor in kept.items() if tensor is not None}

    def place(self) -> Place:
        """Return the position in the random schedules and the begun answers, for checkpoints, as JSON types."""
        pairs = len(self._anchor.prompts) if self._anchor else 0
        return {"drawn": self.drawn, "anchored": self.anchored, "pairs": pairs, "replies": self._replies}

    def restore(self, tensors: Mapping[str, Tensor], place: Place) -> None:
        """Continue from the results of `tensors` and `place`; raise `InvalidRecipe` if they had other prompts."""
        self.drawn, self.anchored = place["drawn"], place["anchored"]
        if self._base_N2 is not None:
            self._base_N2 = tensors[_BASE].to(self._base_N2.device)
        if self._anchor:
            self._anchor = self._restore_anchor(place, self._anchor)
            self._anchor.reference_ND = tensors[_ANCHOR].to(self._anchor.reference_ND.device)

    def _restore_anchor(self, place: Place, anchor: Anchor) -> Anchor:
        """Return the anchor that matches a saved state; raise `InvalidRecipe` if its prompts cannot match."""
        pairs_then, replies = place.get("pairs"), place.get("replies")
        if pairs_then is None:
            pairs = select_pairs(_EARLIER, self.plain, {})
            return Anchor(self.model, pairs, _EARLIER, self.pad_id, self.defense.anchor)
        if replies is not None and replies != self._replies:  # asked of a trained model by now
            self._replies = list(replies)
            anchor = self._make_anchor() or anchor
        if pairs_then != len(anchor.prompts):
            raise InvalidRecipe(f"the state is of {pairs_then} anchored prompts, not {len(anchor.prompts)}")
        return anchor

    def _make_anchor(self) -> Anchor | None:
        """Return the anchor of the settings, with the known beginnings; None if it holds no prompts."""
        pairs = select_pairs(self._anchors, self.plain, self._beside(self._replies))
        return Anchor(self.model, pairs, self._anchors, self.pad_id, self.defense.anchor) if pairs else None

    def _longest(self) -> int:
        """Return the maximum tokens of a disguised row: the model's positions."""
        config = self.model.config.get_text_config()
        return int(getattr(config, "max_position_embeddings", None) or _ANY_LENGTH)


def _whole(model: Any) -> Any:
    """Return the transformers model, with its adapters in place."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def anchor_penalty(anchor: Anchor, model: Any, places: Sequence[int], pad_id: int) -> Tensor:
    """Return the anchor's penalty on the prompts at the given indices, from a separate forward pass."""
    prompts = [anchor.prompts[i] for i in places]
    ids_BT = collate(prompts, pad_id, next(model.parameters()).device).ids_BT
    with mixed_precision(model):
        hidden_BTD = final_states(model, ids_BT)
    return anchor.penalty(places, places, hidden_BTD)
