"""Continuous batching: each step adds one token to every reply, and replies join or leave between two steps.

Rows share one key-value cache and are padded on the left, as in the audit's generation. Each row uses the base model or
an adapter of its own, which PEFT applies row by row. If all rows use the same one, it becomes PEFT's active adapter
instead, because with names per row PEFT walks over all modules at every token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from spard.errors import is_gpu_error, is_gpu_out_of_memory
from spard.models.peft import PeftModel

BASE = "__base__"  # PEFT's name for rows without an adapter
Names = Mapping[str, Sequence[str]]  # arguments of a forward pass that name adapters
_JOINABLE = {"full_attention", "sliding_attention", "chunked_attention"}
CHUNK = 512  # tokens of a prompt that one step reads; other replies wait no longer than that


class PromptUnread(Exception):
    """The forward pass failed on a prompt; nothing was added to the batch."""


@dataclass(slots=True)
class Prefill:
    """A prompt that is being prefilled and is not in the batch yet.

    ids        its tokens, of which the first `at` are in the cache
    name       the adapter, or `BASE`
    rows       the number of identical rows that the cache has
    logits_BV  the logits after the last token that was read
    """

    ids: Sequence[int]
    name: str
    rows: int
    cache: Any
    at: int = 0
    logits_BV: Tensor | None = None

    @property
    def is_done(self) -> bool:
        """Return True if the whole prompt was read."""
        return self.at == len(self.ids)


@dataclass(frozen=True, slots=True)
class PausedRows:
    """Rows taken out of the batch, with the state to continue them; in main memory, except for recurrent models."""

    names: list[str]
    states: Any  # keys and values of each layer, without padding; or the whole cache of a recurrent model
    mask_BT: Tensor
    logits_BV: Tensor


class Batch:
    """The rows that are written together.

    `names` are the rows' adapters, and `logits_BV` [B, V] (float32, on the CPU) the logits for each row's next token.

        batch.join(prompt_ids, BASE, 1)
        batch.step([int(logits_V.argmax()) for logits_V in batch.logits_BV])
        batch.keep([0])  # drop all other rows
    """

    def __init__(self, model: Any) -> None:
        self.model = model  # replaced by a PEFT model when the first adapter is loaded
        self.names: list[str] = []
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ())
        self._config = None if kinds <= _JOINABLE else model.config
        self.device: torch.device = model.device
        self._cache: Any = None
        self._mask_BT, self.logits_BV = torch.zeros((0, 0), dtype=torch.bool), torch.zeros((0, 0))
        self._clear()

    @property
    def is_cut(self) -> bool:
        """Return True if rows can join and leave one by one, which recurrent states do not allow."""
        return self._config is None

    def join(self, ids: Sequence[int], name: str, count: int) -> None:
        """Read a whole prompt and add `count` rows that continue it; raise as `read` does."""
        reading = self.start_reading(ids, name, count)
        while not reading.is_done:
            self.read(reading)
        self.add(reading, count)

    def start_reading(self, ids: Sequence[int], name: str, count: int) -> Prefill:
        """Return a reading of a prompt, at its first token, for `count` rows."""
        if self._config is None:
            return Prefill(ids, name, 1, DynamicCache())  # read once; `add` repeats the cache
        return Prefill(ids, name, count, DynamicCache(config=self._config))

    @torch.inference_mode()
    def read(self, reading: Prefill) -> None:
        """Read the next `CHUNK` tokens of a prompt; recurrent models read the whole prompt at once.

        Raises `PromptUnread` if the model fails on the prompt; the batch's rows are unchanged then. GPU errors pass
        through, because they affect all rows.
        """
        part = reading.ids[reading.at : reading.at + CHUNK] if self._config is None else reading.ids
        input_BT = torch.tensor([list(part)] * reading.rows, device=self.device)
        adapters = apply_adapters(self.model, [reading.name] * reading.rows)
        try:
            reading.logits_BV = self._forward(input_BT, reading.cache, adapters, None, None)
        except Exception as error:
            if is_gpu_error(error) or is_gpu_out_of_memory(error):  # not the prompt's fault alone
                raise
            raise PromptUnread from error
        reading.at += len(part)

    @torch.inference_mode()
    def add(self, reading: Prefill, count: int) -> None:
        """Add `count` rows that continue a prompt whose reading is done."""
        logits_BV = reading.logits_BV
        if logits_BV is None:
            raise ValueError("the prompt was not read")
        if reading.rows < count:
            reading.cache.batch_repeat_interleave(count)
            logits_BV = logits_BV.repeat_interleave(count, dim=0)
        mask_BT = torch.ones((count, len(reading.ids)), dtype=torch.bool, device=self.device)
        self._append([reading.name] * count, reading.cache, mask_BT, logits_BV)

    @torch.inference_mode()
    def pause(self, places: Sequence[int]) -> PausedRows:
        """Remove the rows at `places` and return them for `resume`; a recurrent model can pause only all rows."""
        if self._config is not None:
            if len(places) < len(self.names):
                raise ValueError("rows of a recurrent model are paused all at once")
            paused = PausedRows(self.names, self._cache, self._mask_BT, self.logits_BV)
            self._clear()
            self.names = []
            return paused
        index = torch.tensor(list(places), device=self.device)
        mask_BT = self._mask_BT[index]
        padding = mask_BT.shape[1] - int(mask_BT.sum(dim=1).max())
        states = [
            tuple(part[index][..., padding:, :].to("cpu") for part in (layer.keys, layer.values))
            for layer in self._cache.layers
        ]
        names = [self.names[i] for i in places]
        paused = PausedRows(names, states, mask_BT[:, padding:], self.logits_BV[list(places)])
        self.keep([i for i in range(len(self.names)) if i not in set(places)])
        return paused

    @torch.inference_mode()
    def resume(self, paused: PausedRows) -> None:
        """Add paused rows to the batch again."""
        cache = paused.states
        if self._config is None:
            cache = DynamicCache()
            for number, (keys, values) in enumerate(paused.states):
                cache.update(keys.to(self.device), values.to(self.device), number)
        self._append(paused.names, cache, paused.mask_BT, paused.logits_BV)

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> None:
        """Append one token to each row and compute the logits for the next one."""
        token_B1 = torch.tensor(tokens, device=self.device).unsqueeze(1)
        position_B1 = self._mask_BT.sum(dim=1, keepdim=True)
        self._mask_BT = pad(self._mask_BT, (0, 1), value=True)
        # Only padded rows need a mask, and attention without one costs less.
        mask_BT = None if bool(self._mask_BT.all()) else self._mask_BT
        adapters = apply_adapters(self.model, self.names)
        self.logits_BV = self._forward(token_B1, self._cache, adapters, mask_BT, position_B1)

    def keep(self, places: Sequence[int]) -> None:
        """Drop all rows except those at `places`, and trim columns that are only padding now."""
        if len(places) == len(self.names):
            return None
        self.names = [self.names[i] for i in places]
        if not places:
            return self._clear()
        index = torch.tensor(places, device=self.device)
        self._cache.reorder_cache(index)  # the only way to select rows that also works for recurrent states
        self._mask_BT = self._mask_BT[index]
        self.logits_BV = self.logits_BV[list(places)]  # on the CPU, unlike `index`
        free = self._mask_BT.shape[1] - int(self._mask_BT.sum(dim=1).max())
        if free and self._config is None:
            self._mask_BT = self._mask_BT[:, free:]
            for layer in self._cache.layers:
                layer.keys, layer.values = layer.keys[..., free:, :], layer.values[..., free:, :]
        return None

    def _clear(self) -> None:
        self._cache = DynamicCache()
        self._mask_BT = torch.zeros((0, 0), dtype=torch.bool)
        self.logits_BV = torch.zeros((0, 0))

    def _append(self, names: list[str], cache: Any, mask_BT: Tensor, logits_BV: Tensor) -> None:
        if not self.names:
            self._cache, self._mask_BT, self.logits_BV = cache, mask_BT, logits_BV
        else:
            self._append_rows(cache, mask_BT)
            self.logits_BV = torch.cat([self.logits_BV, logits_BV])
        self.names = self.names + names

    def _append_rows(self, cache: Any, mask_BT: Tensor) -> None:
        old, new = self._mask_BT.shape[1], mask_BT.shape[1]
        width = max(old, new)
        for own, other in zip(self._cache.layers, cache.layers, strict=True):
            own.keys = torch.cat([_widen(own.keys, width), _widen(other.keys, width)])
            own.values = torch.cat([_widen(own.values, width), _widen(other.values, width)])
        self._mask_BT = torch.cat([pad(self._mask_BT, (width - old, 0)), pad(mask_BT, (width - new, 0))])

    def _forward(
        self, input_BT: Tensor, cache: Any, adapters: Names, mask_BT: Tensor | None, position_BT: Tensor | None
    ) -> Tensor:
        logits_B1V = self.model(
            input_ids=input_BT,
            attention_mask=mask_BT,
            position_ids=position_BT,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            **adapters,
        ).logits
        logits_BV: Tensor = logits_B1V[:, -1].float().cpu()
        return logits_BV


def row_by_row(model: Any, names: Sequence[str]) -> Names:
    """Return the keyword arguments with which a forward pass applies each row's adapter."""
    return {"adapter_names": names} if isinstance(model, PeftModel) else {}


def apply_adapters(model: Any, names: Sequence[str]) -> Names:
    """Return the keyword arguments with which a forward pass applies the rows' adapters.

    If all rows have the same adapter, or none, it becomes PEFT's active adapter and no arguments are needed.
    """
    only = set(names)
    if len(only) > 1 or not isinstance(model, PeftModel):
        return row_by_row(model, names)
    tuner: Any = model.base_model
    wanted = [name for name in only if name != BASE]
    if tuner.active_adapters != wanted:
        tuner.set_adapter(wanted, inference_mode=True)
    return {}


def _widen(states_BHTD: Tensor, width: int) -> Tensor:
    return pad(states_BHTD, (0, 0, width - states_BHTD.shape[-2], 0))
