"""Rows that a model continues token by token, over one key-value cache: begun, advanced, joined by others, taken out.

The first tokens that all rows share, a template's and a system prompt's, go through the model once (`shared`), and the
few rows that are long in ending go on beside the next ones (`join_`) instead of alone. Both need a cache that is plain
keys and values; with any other (sliding windows, states of a recurrence) rows are asked whole and batch by batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from spard.models.sampling import Pick

LOOK_EVERY = 8  # tokens: on an accelerator, asking which rows have ended waits for all that was computed
_ROOM = 32  # tokens
LEAST_SHARED = 8  # tokens: fewer are not worth a pass of their own


@dataclass(slots=True)
class Prefix:
    """Tokens that begin every row, with their keys and values for one row; empty where nothing is shared."""

    tokens: Sequence[int]
    cache: DynamicCache

    def over(self, rows: int) -> DynamicCache:
        """Return a cache of so many rows that begin with it."""
        cache = copy.deepcopy(self.cache)
        if self.tokens and rows > 1:
            cache.batch_repeat_interleave(rows)
        return cache


@dataclass(slots=True)
class Replies:
    """The places of rows, and the tokens that each was continued with."""

    places: list[int]
    tokens: list[list[int]]

    def add(self, other: Replies) -> Replies:
        """Add other replies; return these."""
        self.places += other.places
        self.tokens += other.tokens
        return self


@dataclass(slots=True)
class Rows:
    """Rows that are being continued.

    place_B  which row of all that are asked each is
    next_B   the token that was picked last and is not in the cache yet
    at_B     its position
    said_B   how many tokens were picked
    done_B   whether the row has ended
    mask_BT  what of the cache each row may look at
    reply_BN the tokens that were picked; the column after the last one is never read
    """

    cache: DynamicCache
    place_B: Tensor
    next_B: Tensor
    at_B: Tensor
    said_B: Tensor
    done_B: Tensor
    mask_BT: Tensor
    reply_BN: Tensor

    def __len__(self) -> int:
        """Return how many rows are in the cache, ended ones too."""
        return len(self.done_B)

    def take_(self, logits_BV: Tensor, pick: Pick, ends: Tensor) -> None:
        """Pick the next token of each row; rows that have ended keep what they have."""
        most = self.reply_BN.shape[1] - 1
        self.next_B = pick(logits_BV, self.place_B)
        slot_B = torch.where(self.done_B, most, self.said_B)
        self.reply_BN.scatter_(1, slot_B.unsqueeze(1), self.next_B.unsqueeze(1))
        self.said_B = self.said_B + ~self.done_B
        self.done_B = self.done_B | torch.isin(self.next_B, ends) | (self.said_B >= most)

    def keep_(self, keep: Tensor) -> None:
        """Keep the rows at these indices and forget the others."""
        self.cache.batch_select_indices(keep)
        for name in ("place_B", "next_B", "at_B", "said_B", "done_B", "mask_BT", "reply_BN"):
            setattr(self, name, getattr(self, name)[keep])

    def join_(self, other: Rows) -> None:
        """Add the rows of another cache; the narrower one is padded on its left."""
        width = max(self.mask_BT.shape[1], other.mask_BT.shape[1])
        for own, its in zip(self.cache.layers, other.cache.layers, strict=True):
            if isinstance(own, RoomyLayer) and isinstance(its, RoomyLayer):
                own.join_(its, width)
        masks = [
            functional.pad(each.mask_BT, (width - each.mask_BT.shape[1], 0), value=False) for each in (self, other)
        ]
        self.mask_BT = torch.cat(masks)
        for name in ("place_B", "next_B", "at_B", "said_B", "done_B", "reply_BN"):
            setattr(self, name, torch.cat([getattr(self, name), getattr(other, name)]))

    def taken(self) -> Replies:
        """Return the rows that have ended and keep the others; where all have ended they stay for passes to come."""
        ended = self.done_B.nonzero().flatten()
        counts = self.said_B[ended].tolist()
        said = [tokens[:count] for tokens, count in zip(self.reply_BN[ended].tolist(), counts, strict=True)]
        found = Replies(self.place_B[ended].tolist(), said)
        if 0 < len(ended) < len(self):
            self.keep_((~self.done_B).nonzero().flatten())
        return found


class RoomyLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    """Keys and values with room for those to come: a token is written beside the others, which are not copied."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rooms: dict[str, Tensor] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Add the states (B x H x T x D) of new tokens; return those of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._with("keys", self.keys, key_states)
        self.values = self._with("values", self.values, value_states)
        return self.keys, self.values

    def join_(self, other: RoomyLayer, width: int) -> None:
        """Add the rows of another layer; both are padded on the left to so many tokens."""
        if self.keys is not None and self.values is not None and other.keys is not None and other.values is not None:
            self.keys = torch.cat([_widened(self.keys, width), _widened(other.keys, width)])
            self.values = torch.cat([_widened(self.values, width), _widened(other.values, width)])

    def _with(self, name: str, held: Tensor | None, new: Tensor) -> Tensor:
        known = held.shape[-2] if held is not None and held.numel() else 0
        width = known + new.shape[-2]
        room = self._rooms.get(name)
        if room is None or held is None or not _is_in(held, room) or width > room.shape[-2]:
            room = new.new_empty(*new.shape[:-2], width + max(_ROOM, width // 4), new.shape[-1])
            if known and held is not None:
                room[..., :known, :] = held
            self._rooms[name] = room
        room[..., known:width, :] = new
        return room[..., :width, :]


def _is_in(held: Tensor, room: Tensor) -> bool:
    """Tell whether states are the beginning of a room, and not a copy of it."""
    return (held.data_ptr(), held.stride()) == (room.data_ptr(), room.stride())


def is_plain(model: Any) -> bool:
    """Tell whether the model's cache is keys and values of every token, and nothing else."""
    layers = DynamicCache(config=model.config).layers
    return bool(layers) and all(type(each) is DynamicLayer for each in layers)


def open_cache(model: Any) -> DynamicCache:
    """Return an empty cache for a model."""
    cache = DynamicCache(config=model.config)
    if is_plain(model):
        cache.layers = [RoomyLayer() for _ in cache.layers]
    return cache


def shared(model: Any, rows: Sequence[Sequence[int]]) -> Prefix:
    """Ask the model the tokens that all rows begin with, if there are enough; each row has one more at least."""
    cache = open_cache(model)
    common = _common(rows) if len(rows) > 1 and is_plain(model) else []
    if len(common) < LEAST_SHARED:
        return Prefix([], cache)
    model(
        input_ids=torch.tensor([common], device=model.device), past_key_values=cache, use_cache=True, logits_to_keep=1
    )
    return Prefix(common, cache)


def begin(
    model: Any, asked: Sequence[Sequence[int]], places: Sequence[int], prefix: Prefix, pad: int, most: int
) -> tuple[Rows, Tensor]:
    """Ask rows that begin with the prefix; return them, and the logits (B x V) of the first token of each reply."""
    device, known = model.device, len(prefix.tokens)
    own = [row[known:] for row in asked]
    width = max(map(len, own))
    input_BT = torch.tensor([[pad] * (width - len(row)) + list(row) for row in own], device=device)
    length_B = torch.tensor([len(row) for row in own], device=device)
    mask_BT = torch.arange(width, device=device) >= width - length_B.unsqueeze(1)
    mask_BT = functional.pad(mask_BT, (known, 0), value=True)
    position_BT = (mask_BT.cumsum(dim=1) - 1).clamp(min=0)[:, known:]
    n = len(own)
    rows = Rows(
        cache=prefix.over(n),
        place_B=torch.tensor(list(places), device=device),
        next_B=input_BT[:, -1],
        at_B=position_BT[:, -1],
        said_B=torch.zeros(n, dtype=torch.long, device=device),
        done_B=torch.zeros(n, dtype=torch.bool, device=device),
        mask_BT=mask_BT,
        reply_BN=torch.zeros(n, most + 1, dtype=torch.long, device=device),
    )
    return rows, _logits(model, rows, input_BT, position_BT)


def advance_(
    model: Any, rows: Rows, pick: Pick, ends: Tensor, until: int, is_left: Callable[[bool], bool] = bool
) -> Replies:
    """Continue rows until at most `until` of them have not ended; return those that have, and forget them.

    `is_left` is asked whether to go on: ranks that share a cut model go on as long as any of them has to.
    """
    every = look_every(model.device)
    found, step = Replies([], []), 0
    while True:
        if step % every == 0:
            left = len(rows) - int(rows.done_B.sum())
            goes_on = is_left(left > until)
            if left and (2 * left <= len(rows) or not goes_on):
                found.add(rows.taken())
            if not goes_on:
                return found if left else found.add(rows.taken())
        rows.at_B = rows.at_B + 1
        rows.mask_BT = functional.pad(rows.mask_BT, (0, 1), value=True)
        logits_BV = _logits(model, rows, rows.next_B.unsqueeze(1), rows.at_B.unsqueeze(1))
        rows.take_(logits_BV, pick, ends)
        step += 1


def look_every(device: torch.device) -> int:
    """Return after how many tokens it is asked which rows have ended; on a CPU asking costs nothing."""
    return 1 if device.type == "cpu" else LOOK_EVERY


def _logits(model: Any, rows: Rows, input_BT: Tensor, position_BT: Tensor) -> Tensor:
    found: Tensor = model(
        input_ids=input_BT,
        attention_mask=rows.mask_BT,
        position_ids=position_BT,
        past_key_values=rows.cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits
    return found[:, -1]


def _widened(states_BHTD: Tensor, width: int) -> Tensor:
    return functional.pad(states_BHTD, (0, 0, width - states_BHTD.shape[2], 0))


def _common(rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the tokens that all rows begin with, all but the last of the shortest at most."""
    first, last = min(map(list, rows)), max(map(list, rows))
    most = min(map(len, rows)) - 1
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), most)
    return first[: min(same, most)]
