"""Batched decoding of rows over one key-value cache: rows can start, advance, join another batch and leave.

The tokens that all rows begin with (a template, a system prompt) go through the model once (`prefill`), and the few
rows that take longest continue beside the next batch (`join_`) instead of alone. Both need a cache of plain keys and
values; with any other cache (sliding windows, recurrent states) rows are processed whole and batch by batch. In the
cache, a row's padding comes between the shared tokens and its own, therefore models that count cache columns
(`counts_columns`) get whole rows too, as do rows that are long enough to change the angles of all their tokens
(`changes_angles`). Our caches append tokens in place; transformers' own copy everything for each token.

In sampling each row has its own seed: its tokens depend neither on the batch nor on other rows.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

Pick = Callable[[Tensor, Tensor], Tensor]
"""Takes the logits [B, V] of a batch's next tokens and the indices of their rows in the batch, and returns a token for
each."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """Samples from softmax(logits / temperature); `seeds` has one seed per row."""

    temperature: float
    seeds: Sequence[int]

    def make_picker(self, rows: Sequence[int]) -> Pick:
        """Return a function that samples tokens for these rows, each with its own generator."""
        generators = [torch.Generator().manual_seed(self.seeds[i]) for i in rows]

        def pick(logits_BV: Tensor, row_B: Tensor) -> Tensor:
            # On the CPU, because generators of different devices draw different numbers from the same seed.
            p_BV = torch.softmax(logits_BV.float().cpu() / self.temperature, dim=-1)
            drawn = [
                torch.multinomial(p_V, 1, generator=generators[i]) for p_V, i in zip(p_BV, row_B.tolist(), strict=True)
            ]
            return torch.cat(drawn).to(logits_BV.device)

        return pick


def sample_seed(tokens: Sequence[int], draw: int) -> int:
    """Return the seed of a sample, from the prompt's tokens and the sample's number."""
    return int.from_bytes(hashlib.sha256(repr((list(tokens), draw)).encode()).digest()[:7], "big")


_ROOM = 32  # tokens of spare capacity


class RoomyLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    """Keys and values with spare capacity: new tokens are written in place instead of copying the old ones."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rooms: dict[str, Tensor] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append the states `[B, H, T, D]` of new tokens; return the states of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._append("keys", self.keys, key_states)
        self.values = self._append("values", self.values, value_states)
        return self.keys, self.values

    def join_(self, other: RoomyLayer, width: int) -> None:
        """Append the rows of another layer, which is emptied; both are padded on the left to `width` tokens."""
        if self.keys is not None and self.values is not None and other.keys is not None and other.values is not None:
            self.keys = torch.cat([_widen(self.keys, width), _widen(other.keys, width)])
            self.values = torch.cat([_widen(self.values, width), _widen(other.values, width)])
            other.keys = other.values = None
            self._free_rooms()
            other._free_rooms()

    def take_columns_(self, at_T: Tensor) -> None:
        """Keep only the tokens in these columns."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[:, :, at_T], self.values[:, :, at_T]
            self._free_rooms()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the rows at these indices."""
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._free_rooms()

    def _free_rooms(self) -> None:
        # The buffers would otherwise live beside the copies of all layers until each layer's next token.
        self._rooms.clear()

    def _append(self, name: str, held: Tensor | None, new: Tensor) -> Tensor:
        known = held.shape[-2] if held is not None and held.numel() else 0
        width = known + new.shape[-2]
        room = self._rooms.get(name)
        # Reordering or repeating a cache replaces `keys` by a copy outside of the buffer; a new buffer is needed then.
        if room is None or held is None or not _is_view(held, room) or width > room.shape[-2]:
            room = new.new_empty(*new.shape[:-2], width + max(_ROOM, width // 4), new.shape[-1])
            if known and held is not None:
                room[..., :known, :] = held
            self._rooms[name] = room
        room[..., known:width, :] = new
        return room[..., :width, :]


def _is_view(held: Tensor, room: Tensor) -> bool:
    """Return True if the tensor of states is a view of the buffer's beginning, not a copy."""
    return (held.data_ptr(), held.stride()) == (room.data_ptr(), room.stride())


def is_plain(model: Any) -> bool:
    """Return True if the model's cache holds only the keys and values of every token."""
    layers = DynamicCache(config=model.config).layers
    return bool(layers) and all(type(each) is DynamicLayer for each in layers)


def open_cache(model: Any) -> DynamicCache:
    """Return an empty cache for the model, with in-place layers if its cache is plain."""
    cache = DynamicCache(config=model.config)
    if is_plain(model):
        cache.layers = [RoomyLayer() for _ in cache.layers]
    return cache


def counts_columns(model: Any) -> bool:
    """Return True if the model measures distances between cache columns, including padding.

    GPT-Neo's local attention and MPT's ALiBi biases do; other models use position ids or the mask.
    """
    config = model.config.get_text_config()
    has_biases = getattr(getattr(config, "attn_config", None), "alibi", False)
    return bool(has_biases) or "local" in (getattr(config, "attention_layers", None) or ())


def changes_angles(model: Any, tokens: int) -> bool:
    """Return True if in a row of so many tokens the rotary angles differ from those in a short row, as in Phi-3.

    Keys and values that were computed for the row's beginning alone are then wrong for the row.
    """
    config = model.config.get_text_config()
    found = getattr(config, "rope_parameters", None) or {}
    kinds = [found, *(each for each in found.values() if isinstance(each, dict))]  # models may have one per layer type
    limits = [
        each.get("original_max_position_embeddings") or config.max_position_embeddings
        for each in kinds
        if each.get("rope_type") in ("dynamic", "longrope")
    ]
    return any(tokens > limit for limit in limits)


def _widen(states_BHTD: Tensor, width: int) -> Tensor:
    return functional.pad(states_BHTD, (0, 0, width - states_BHTD.shape[2], 0))


LOOK_EVERY = 8  # tokens between checks: on an accelerator a check waits for all queued work
LEAST_SHARED = 8  # tokens: fewer do not justify a separate pass


@dataclass(slots=True)
class Prefix:
    """Tokens that begin every row, with their keys and values for one row; empty if nothing is shared."""

    tokens: Sequence[int]
    cache: DynamicCache

    def repeat(self, rows: int) -> DynamicCache:
        """Return a cache in which `rows` rows begin with the prefix."""
        cache = copy.deepcopy(self.cache)
        if self.tokens and rows > 1:
            cache.batch_repeat_interleave(rows)
        return cache


@dataclass(slots=True)
class Replies:
    """Finished rows: their positions, the generated tokens of each, and whether `settle_` ended it early."""

    places: list[int] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    early: list[bool] = field(default_factory=list)

    def add(self, other: Replies) -> Replies:
        """Append other replies and return this object."""
        self.places += other.places
        self.tokens += other.tokens
        self.early += other.early
        return self


@dataclass(slots=True)
class Rows:
    """A batch of B rows in generation.

    place_B  position of each row among all requested rows
    next_B   the token picked last, not yet in the cache
    at_B     its position id
    said_B   number of tokens picked so far
    done_B   True if the row has ended
    early_B  True if the row was ended early because its remaining tokens do not matter
    mask_BT  attention mask over the cache
    reply_BN the picked tokens; finished rows write to the last column, which is never read
    """

    cache: DynamicCache
    place_B: Tensor
    next_B: Tensor
    at_B: Tensor
    said_B: Tensor
    done_B: Tensor
    early_B: Tensor
    mask_BT: Tensor
    reply_BN: Tensor

    def __len__(self) -> int:
        """Return the number of rows in the cache, including ended ones."""
        return len(self.done_B)

    def take_(self, logits_BV: Tensor, pick: Pick, ends: Tensor) -> None:
        """Pick the next token of each row from its logits; ended rows stay unchanged."""
        most = self.reply_BN.shape[1] - 1
        self.next_B = pick(logits_BV, self.place_B)
        # Ended rows are not masked out but write into the spare column: branching per row forces the host to wait for
        # the device.
        slot_B = torch.where(self.done_B, most, self.said_B)
        self.reply_BN.scatter_(1, slot_B.unsqueeze(1), self.next_B.unsqueeze(1))
        self.said_B = self.said_B + ~self.done_B
        self.done_B = self.done_B | torch.isin(self.next_B, ends) | (self.said_B >= most)

    def keep_(self, keep: Tensor) -> None:
        """Keep only the rows at these indices."""
        self.cache.reorder_cache(keep)  # type: ignore[arg-type]  # states of a recurrence have no other way
        for name in ("place_B", "next_B", "at_B", "said_B", "done_B", "early_B", "mask_BT", "reply_BN"):
            setattr(self, name, getattr(self, name)[keep])

    def narrow_(self) -> None:
        """Drop the columns of the cache that no row attends to: the padding of rows that have left."""
        used_T = self.mask_BT.any(dim=0)
        if bool(used_T.all()):
            return
        at_T = used_T.nonzero().flatten()
        self.mask_BT = self.mask_BT[:, at_T]
        for layer in self.cache.layers:
            if isinstance(layer, RoomyLayer):
                layer.take_columns_(at_T)

    def join_(self, other: Rows) -> None:
        """Append the rows of another batch; the narrower cache is padded on the left."""
        other.narrow_()
        width = max(self.mask_BT.shape[1], other.mask_BT.shape[1])
        for own, its in zip(self.cache.layers, other.cache.layers, strict=True):
            if isinstance(own, RoomyLayer) and isinstance(its, RoomyLayer):
                own.join_(its, width)
        masks = [
            functional.pad(each.mask_BT, (width - each.mask_BT.shape[1], 0), value=False) for each in (self, other)
        ]
        self.mask_BT = torch.cat(masks)
        for name in ("place_B", "next_B", "at_B", "said_B", "done_B", "early_B", "reply_BN"):
            setattr(self, name, torch.cat([getattr(self, name), getattr(other, name)]))

    def take_finished(self) -> Replies:
        """Return the ended rows and drop them; if all have ended they stay, as ranks may need further passes."""
        ended = self.done_B.nonzero().flatten()
        counts = self.said_B[ended].tolist()
        said = [tokens[:count] for tokens, count in zip(self.reply_BN[ended].tolist(), counts, strict=True)]
        found = Replies(self.place_B[ended].tolist(), said, self.early_B[ended].tolist())
        if 0 < len(ended) < len(self):
            self.keep_((~self.done_B).nonzero().flatten())
        return found


def prefill(model: Any, rows: Sequence[Sequence[int]]) -> Prefix:
    """Run the tokens that all rows share through the model, if there are enough; every row keeps at least one more."""
    cache = open_cache(model)
    can_share = len(rows) > 1 and is_plain(model) and not counts_columns(model)
    common = _common(rows) if can_share and not changes_angles(model, max(map(len, rows))) else []
    if len(common) < LEAST_SHARED:
        return Prefix([], cache)
    model(
        input_ids=torch.tensor([common], device=model.device), past_key_values=cache, use_cache=True, logits_to_keep=1
    )
    return Prefix(common, cache)


def begin(
    model: Any, asked: Sequence[Sequence[int]], places: Sequence[int], prefix: Prefix, pad: int, most: int
) -> tuple[Rows, Tensor]:
    """Run rows that begin with the prefix; return them with the logits `[B, V]` of each reply's first token."""
    device, known = model.device, len(prefix.tokens)
    own = [row[known:] for row in asked]
    width = max(map(len, own))
    input_BT = torch.tensor([[pad] * (width - len(row)) + list(row) for row in own], device=device)
    length_B = torch.tensor([len(row) for row in own], device=device)
    mask_BT = torch.arange(width, device=device) >= width - length_B.unsqueeze(1)
    mask_BT = functional.pad(mask_BT, (known, 0), value=True)
    # Positions count real tokens only, so padding does not change a row's replies; on padding the count is -1.
    position_BT = (mask_BT.cumsum(dim=1) - 1).clamp(min=0)[:, known:]
    n = len(own)
    rows = Rows(
        cache=prefix.repeat(n),
        place_B=torch.tensor(list(places), device=device),
        next_B=input_BT[:, -1],
        at_B=position_BT[:, -1],
        said_B=torch.zeros(n, dtype=torch.long, device=device),
        done_B=torch.zeros(n, dtype=torch.bool, device=device),
        early_B=torch.zeros(n, dtype=torch.bool, device=device),
        mask_BT=mask_BT,
        reply_BN=torch.zeros(n, most + 1, dtype=torch.long, device=device),
    )
    return rows, _logits(model, rows, input_BT, position_BT)


def advance_(
    model: Any,
    rows: Rows,
    pick: Pick,
    ends: Tensor,
    until: int,
    is_left: Callable[[bool], bool] = bool,
    settle_: Callable[[Rows], None] | None = None,
    on_look: Callable[[], None] | None = None,
) -> Replies:
    """Generate until at most `until` rows have not ended; return the ended rows and drop them.

    `is_left` receives True if more rows are left, and returns True to continue: ranks of a sharded model continue as
    long as any of them must. `settle_` is called at each check of the rows and may end some of them early; `on_look` is
    called at each check too.
    """
    every = look_every(model.device)
    found, step = Replies(), 0
    while True:
        if step % every == 0:
            if on_look:
                on_look()
            if settle_:
                settle_(rows)
            left = len(rows) - int(rows.done_B.sum())
            goes_on = is_left(left > until)
            # Dropping ended rows copies the cache, which pays off only when at least half of the rows have ended.
            if left and (2 * left <= len(rows) or not goes_on):
                found.add(rows.take_finished())
            if not goes_on:
                return found if left else found.add(rows.take_finished())
        rows.at_B = rows.at_B + 1
        rows.mask_BT = functional.pad(rows.mask_BT, (0, 1), value=True)
        logits_BV = _logits(model, rows, rows.next_B.unsqueeze(1), rows.at_B.unsqueeze(1))
        rows.take_(logits_BV, pick, ends)
        step += 1


def look_every(device: torch.device) -> int:
    """Return after how many tokens to check which rows have ended; on a CPU the check is free."""
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


def _common(rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the tokens that all rows begin with, excluding the last token of the shortest row."""
    # In sorted order the first and the last row differ earliest, so they bound the prefix of all rows.
    first, last = min(map(list, rows)), max(map(list, rows))
    most = min(map(len, rows)) - 1
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), most)
    return first[: min(same, most)]
