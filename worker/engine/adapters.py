"""The loaded adapters of one base model: verified before loading, probed after, dropped when least recently used."""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear

from app.inference.protocol import Proof
from spard.data.chat import render_question
from spard.data.rendering import Mode
from spard.digests import BaseSource
from spard.errors import AdapterNotProved
from spard.models.adapters import tensor_digest
from spard.models.base import Base
from spard.models.lora import CONFIG, WEIGHTS
from spard.models.peft import BaseTunerLayer, PeftModel, get_peft_model_state_dict
from spard.release.manifest import verify
from spard.release.proof import logit_distance
from worker.engine.batch import BASE, apply_adapters

# Probe a loaded adapter before its first answer: the engine has the signed weights and answers with them.
#
# Two things are checked. The tensors that PEFT holds under the adapter's name have the digest in the manifest. And
# the logits of fixed prompts, both alone and in one batch with the base model and another adapter, equal the logits
# that the file's tensors give when B A x is added to the base model's layers without PEFT. In 16 bits PEFT rounds the
# added term either before or after the sum, depending on the kind of layer and batch, so the nearer of the two
# counts.

PROMPTS = ("What is 2 + 3?", "Write one sentence about the sea.")
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.02}
_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def probe(model: Any, tokenizer: Any, name: str, folder: Path, wanted: str, others: Sequence[str]) -> Proof:
    """Prove that the adapter `name` of a PEFT model is the signed adapter in `folder`.

    `wanted` is the digest of its tensors from the manifest, and `others` are the names of other loaded adapters, of
    which the first joins the mixed batch. Raises `AdapterNotProved` if the digest differs, if the logits differ by more
    than the dtype's tolerance (relative to the largest logit), or if they equal the base model's.
    """
    held = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    digest = tensor_digest({key: each.contiguous() for key, each in held.items()})
    if digest != wanted:
        raise AdapterNotProved("the engine holds other weights under the adapter's name than those that were signed")
    rows = [render_question(tokenizer, prompt) for prompt in PROMPTS]
    tensors, config = load_file(folder / WEIGHTS), json.loads((folder / CONFIG).read_text())
    scale, far, near = config["lora_alpha"] / config["r"], 0.0, 0.0
    for row in rows:
        ways = [_expected_logits(model, row, tensors, scale, rounds_first=first) for first in (True, False)]
        base_TV, own_TV = _together(model, row, [BASE, *others[:1], name])
        for found_TV in (own_TV, _alone(model, row, name)):
            far = max(far, min(logit_distance(found_TV, each_TV) for each_TV in ways))
        near = max(near, logit_distance(base_TV, own_TV))
    tolerance = _TOLERANCE[model.dtype]
    if not far <= tolerance:
        raise AdapterNotProved(f"the engine's logits are {far:.2g} of the largest away from the signed adapter's")
    if not near > 0:
        raise AdapterNotProved("the adapter changes nothing: the logits are those of the base model")
    return {"tensor_digest": digest, "max_difference": far, "difference_to_base": near}


@torch.inference_mode()
def _together(model: Any, row: Sequence[int], names: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return the logits [T, V] of one prompt for the first and the last adapter, from one batch with all of them."""
    ids_BT = torch.tensor([list(row)] * len(names), device=model.device)
    logits_BTV = model(input_ids=ids_BT, adapter_names=list(names)).logits.float()
    return logits_BTV[0], logits_BTV[-1]


@torch.inference_mode()
def _alone(model: Any, row: Sequence[int], name: str) -> Tensor:
    """Return the logits [T, V] of one prompt in a batch of its own, where the adapter is PEFT's active one."""
    ids_1T = torch.tensor([list(row)], device=model.device)
    logits_TV: Tensor = model(input_ids=ids_1T, **apply_adapters(model, [name])).logits[0].float()
    return logits_TV


@torch.inference_mode()
def _expected_logits(
    model: Any, row: Sequence[int], tensors: Mapping[str, Tensor], scale: float, *, rounds_first: bool
) -> Tensor:
    with _add_adapter(model, tensors, scale, rounds_first=rounds_first):
        ids_1T = torch.tensor([list(row)], device=model.device)
        logits_TV: Tensor = model(input_ids=ids_1T, adapter_names=[BASE]).logits[0].float()
    return logits_TV


@contextmanager
def _add_adapter(model: Any, tensors: Mapping[str, Tensor], scale: float, *, rounds_first: bool) -> Iterator[None]:
    """Add `scale` * B A x to the output of each adapted layer of the base model, by hooks, inside the block."""
    hooks = []
    try:
        for key in tensors:
            if key.endswith(_A):
                name = key.removeprefix(_PREFIX).removesuffix(_A)
                layer = model.get_base_model().get_submodule(name).base_layer
                a_RD, b_ER = (tensors[each].to(model.device) for each in (key, key.removesuffix(_A) + _B))
                hooks.append(layer.register_forward_hook(_adding(a_RD, b_ER, scale, rounds_first=rounds_first)))
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _adding(a_RD: Tensor, b_ER: Tensor, scale: float, *, rounds_first: bool) -> Any:
    def add(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        more = linear(linear(inputs[0].to(a_RD.dtype), a_RD), b_ER) * scale
        return output + more.to(output.dtype) if rounds_first else (output + more).to(output.dtype)

    return add


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter in memory; `system` and `mode` are the system prompt and mode of thinking that its audit used."""

    name: str
    bytes: int
    system: str | None
    mode: Mode | None
    proof: Proof


def measured_conditions(adapter: LoadedAdapter | None) -> tuple[str | None, Mode | None]:
    """Return the system prompt and mode of thinking that an adapter has to be served with, as in its audit."""
    return (adapter.system, adapter.mode) if adapter else (None, None)


_UNUSED_S = 10.0  # how long an adapter is kept for a request that comes next


class Adapters:
    """The adapters in memory, by the digest of their archive.

    Their weights take at most `limit_bytes`, unless more are needed by rows in the batch, or by requests that had an
    adapter loaded and come next: requests for many adapters would else drop each other's before any is used. `model` is
    the base model, or a PEFT model once there is an adapter, so read it again after each `load`.
    """

    def __init__(self, base: Base, limit_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._base, self._limit, self._clock = base, limit_bytes, clock
        self._held: OrderedDict[str, LoadedAdapter] = OrderedDict()
        self._asked_at: dict[str, float] = {}  # by digest, of adapters whose request comes next
        self.model: Any = base.model  # a PEFT model as soon as there is an adapter

    def find(self, digest: str) -> LoadedAdapter | None:
        """Return a loaded adapter and mark it as used, or None if it is not loaded."""
        found = self._held.get(digest)
        if found:
            self._held.move_to_end(digest)
        return found

    def use(self, digest: str) -> LoadedAdapter | None:
        """Like `find`, for a reply that begins: the adapter need no longer be kept for it."""
        self._asked_at.pop(digest, None)
        return self.find(digest)

    def keep_for_next(self, digest: str) -> None:
        """Keep a loaded adapter for ten seconds, or until a reply uses it: its request comes next."""
        self._asked_at[digest] = self._clock()

    def load(self, digest: str, folder: Path, manifest_sha256: str, needed: Collection[str]) -> Proof:
        """Load an adapter from a folder and return the proof that the engine answers with its signed weights.

        `needed` are the names of the adapters that current replies use; they are not dropped to make room. Raises
        `NotProved` or `AdapterNotProved` if the signature, the base model, the weights or the logits differ.
        """
        proved = verify(folder)
        if proved.manifest_sha256 != manifest_sha256:
            raise AdapterNotProved("the folder holds another adapter than the one that was verified")
        stated = (proved.manifest.get("base_source") or BaseSource()).get("digest")
        if stated != self._base.digest:
            raise AdapterNotProved("the adapter was trained on another base model than the one that is loaded")
        name, size = f"a{digest[:24]}", (folder / WEIGHTS).stat().st_size
        self._make_room(size, needed)
        try:
            self._put(folder, name)
            others = [each.name for each in self._held.values()]
            proof = probe(self.model, self._base.tokenizer, name, folder, str(proved.manifest["tensor_digest"]), others)
        except BaseException:
            self._drop(name)
            raise
        mode = (proved.manifest.get("rendering") or {}).get("asked")
        self._held[digest] = LoadedAdapter(name, size, proved.manifest.get("system_prompt"), mode, proof)
        return proof

    def _put(self, folder: Path, name: str) -> None:
        place = str(self._base.device)
        if not isinstance(self.model, PeftModel):
            self.model = PeftModel.from_pretrained(self._base.model, str(folder), adapter_name=name, torch_device=place)
        else:
            self.model.load_adapter(str(folder), adapter_name=name, torch_device=place)
        self.model.eval()

    def _make_room(self, size: int, needed: Collection[str]) -> None:
        for digest, each in list(self._held.items()):
            if sum(held.bytes for held in self._held.values()) + size <= self._limit:
                return
            if each.name not in needed and not self._is_awaited(digest):
                del self._held[digest]
                self._asked_at.pop(digest, None)
                self._drop(each.name)

    def _is_awaited(self, digest: str) -> bool:
        asked_at = self._asked_at.get(digest)
        return asked_at is not None and self._clock() - asked_at < _UNUSED_S

    def _drop(self, name: str) -> None:
        """Remove an adapter, even a partly loaded one; with the last adapter, remove PEFT's layers too."""
        base, others = self._base.model, [each.name for each in self._held.values()]
        layers = {path: each for path, each in base.named_modules() if isinstance(each, BaseTunerLayer)}
        if others:
            self.model.set_adapter(others[0])  # PEFT cannot delete the active adapter; each pass names its own anyway
            for layer in layers.values():
                layer.delete_adapter(name)
            self.model.peft_config.pop(name, None)
        else:
            for path, layer in layers.items():
                base.set_submodule(path, layer.get_base_layer())
            vars(base).pop("peft_config", None)
            self.model = base
        log.info("dropped adapter %s", name)


def adapter_names(rows: Collection[str]) -> set[str]:
    """Return the rows' names without `BASE`, which marks rows of the base model alone."""
    return {name for name in rows if name != BASE}
