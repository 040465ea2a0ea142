"""The loaded adapters of one base model: verified before loading, probed after, dropped when least recently used."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.inference.protocol import Proof
from spard.data.rendering import Mode
from spard.errors import AdapterNotProved
from spard.models.base import Base
from spard.models.lora import WEIGHTS
from spard.models.peft import BaseTunerLayer, PeftModel
from spard.release.manifest import verify
from worker.engine.batch import BASE
from worker.engine.probe import probe

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """An adapter in memory; `system` and `mode` are the system prompt and mode of thinking that its audit used."""

    name: str
    bytes: int
    system: str | None
    mode: Mode | None
    proof: Proof


def measured_conditions(adapter: Loaded | None) -> tuple[str | None, Mode | None]:
    """Return the system prompt and mode of thinking that an adapter has to be served with, as in its audit."""
    return (adapter.system, adapter.mode) if adapter else (None, None)


class Adapters:
    """The adapters in memory, by the digest of their archive.

    Their weights take at most `limit_bytes`, unless rows in the batch need more. `model` is the base model, or a PEFT
    model once there is an adapter, so read it again after each `load`.
    """

    def __init__(self, base: Base, limit_bytes: int) -> None:
        self._base, self._limit = base, limit_bytes
        self._held: OrderedDict[str, Loaded] = OrderedDict()
        self.model: Any = base.model  # a PEFT model as soon as there is an adapter

    def find(self, digest: str) -> Loaded | None:
        """Return a loaded adapter and mark it as used, or None if it is not loaded."""
        found = self._held.get(digest)
        if found:
            self._held.move_to_end(digest)
        return found

    def load(self, digest: str, folder: Path, manifest_sha256: str, needed: Collection[str]) -> Proof:
        """Load an adapter from a folder and return the proof that the engine answers with its signed weights.

        `needed` are the names of the adapters that current replies use; they are not dropped to make room. Raises
        `NotProved` or `AdapterNotProved` if the signature, the base model, the weights or the logits differ.
        """
        proved = verify(folder)
        if proved.manifest_sha256 != manifest_sha256:
            raise AdapterNotProved("the folder holds another adapter than the one that was verified")
        stated = proved.manifest.get("base_source", {}).get("digest")
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
        self._held[digest] = Loaded(name, size, proved.manifest.get("system_prompt"), mode, proof)
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
            if each.name not in needed:
                del self._held[digest]
                self._drop(each.name)

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
